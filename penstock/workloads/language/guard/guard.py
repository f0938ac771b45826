"""Rules and a classifier as one guard. What cannot be checked does not pass."""

import logging
from collections.abc import Sequence
from typing import Final

from penstock.workloads.language.guard.guard_rules import BUILT_IN, Rule, fold, matched
from penstock.workloads.language.guard.text_classifier import TextClassifier
from penstock.workloads.language.guard.verdict import PASSED, Direction, Verdict

log = logging.getLogger(__name__)

MAX_CHARS: Final = 32_768
"""Longest text that is checked; a longer one is blocked, since checking it would take long."""


class Guard:
    """Checks texts. Any number of threads may use it.

    classifier: for what people say; None: rules alone.
    """

    def __init__(self, rules: Sequence[Rule] = BUILT_IN, classifier: TextClassifier | None = None) -> None:
        self._rules, self._classifier = tuple(rules), classifier

    def check(self, text: str, direction: Direction) -> Verdict:
        """Return whether a text may pass; it raises nothing: an error of a check blocks."""
        try:
            return self._checked(text, direction)
        except Exception as error:  # noqa: BLE001 - a guard that fails open is none
            # Neither text nor traceback, which may quote it: it is somebody's.
            log.error("a guard could not check a text", extra={"error": type(error).__name__})  # noqa: TRY400
            return Verdict("error")

    def _checked(self, text: str, direction: Direction) -> Verdict:
        if len(text) > MAX_CHARS:
            return Verdict("rule:too_long")
        if name := matched(fold(text), direction, self._rules):
            return Verdict(f"rule:{name}")
        judge = self._classifier
        if judge is not None and direction is Direction.INPUT and judge.chance(text) >= judge.threshold:
            return Verdict("classifier")
        return PASSED
