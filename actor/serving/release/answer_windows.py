"""How a canary answers, pooled over all clients in windows of a few seconds, beside the active version.

A pass takes longer the larger it is, so that slow passes of the canary are compared with those of the active
version that were at least as large: large requests are not the canary's fault. A window ends after
WINDOW_S, or with so many answers of the canary; there is always a next one.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from penstock.actor.serving.versions.answering import Answered
from penstock.registry.bounds import Window

WINDOW_S: Final = 5.0
WINDOW_ANSWERS: Final = 256
MAX_WINDOWS: Final = 64
"""Most that wait to be taken; further ones are left out."""


@dataclass(slots=True)
class _Passes:
    """Answers of passes of one size: of the canary and of the active version, and how many were slow."""

    canary: int = 0
    canary_slow: int = 0
    active: int = 0
    active_slow: int = 0


@dataclass(slots=True)
class _Open:
    began_s: float
    answers: int = 0
    failed: int = 0
    not_finite: int = 0
    passes: dict[int, _Passes] = field(default_factory=lambda: defaultdict(_Passes))
    """By the power of two of their rows."""


class AnswerWindows:
    """Used by one event loop; times in seconds of one monotonic clock."""

    def __init__(self, slow_s: float, now_s: float) -> None:
        self._slow_s = slow_s
        self._open = _Open(now_s)
        self._closed: list[Window] = []

    def answered(self, answered: Answered, *, canary: bool, now_s: float) -> None:
        """One answer was given, or failed to be."""
        window = self._open
        if canary:
            window.answers += 1
            window.failed += answered.is_to_blame
            window.not_finite += answered.is_to_blame and answered.not_finite
        answer = answered.answer
        if answer is not None and answer.passed is not None and not answered.fallback:
            passes = window.passes[answer.passed.rows.bit_length()]
            is_slow = answer.passed.seconds > self._slow_s
            if canary:
                passes.canary += 1
                passes.canary_slow += is_slow
            else:
                passes.active += 1
                passes.active_slow += is_slow
        if window.answers >= WINDOW_ANSWERS:
            self._close(now_s)

    def take(self, now_s: float) -> list[Window]:
        """Return the windows that are over."""
        if now_s - self._open.began_s >= WINDOW_S or self._open.not_finite:
            self._close(now_s)
        closed, self._closed = self._closed, []
        return closed

    def _close(self, now_s: float) -> None:
        window, self._open = self._open, _Open(now_s)
        if window.answers and len(self._closed) < MAX_WINDOWS:
            self._closed.append(
                Window(
                    answers=window.answers,
                    failed=window.failed,
                    not_finite=window.not_finite,
                    slower=_slower(window.passes),
                )
            )


def _slower(passes: dict[int, _Passes]) -> float | None:
    """Return by how much more often the canary was slow; None without passes to compare with."""
    compared = active = active_slow = 0
    more = 0.0
    for size in sorted(passes, reverse=True):
        here = passes[size]
        active += here.active
        active_slow += here.active_slow
        if here.canary and active:
            compared += here.canary
            more += here.canary_slow - here.canary * active_slow / active
    return more / compared if compared else None
