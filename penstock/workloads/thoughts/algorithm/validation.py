"""Validations in the course of learning: when they are made, what was found, when theatre ends a run."""

import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.model import ThinkingModel
from penstock.workloads.thoughts.settings import ThoughtReinforceSection
from penstock.workloads.thoughts.tasks import Task, draw_tests
from penstock.workloads.thoughts.validation import LEAST_GAIN, Probed, Validation, probe, validate

_SEED: Final = 2_000_000
"""Of the questions: the same in every validation, and others than evaluations ask."""

_IN_A_ROW: Final = 2
"""Validations that must find theatre, one behind the other, to end a run.

While the learning rate is high, answers of an honest run now and then follow fewer mistakes than they should.
"""

log = logging.getLogger(__name__)


class ThoughtValidation:
    """Validates a network that is being trained; used by the learner's thread."""

    def __init__(
        self,
        network: Any,
        task: Task,
        layout: Layout,
        section: ThoughtReinforceSection,
        *,
        thought_tokens: int,
    ) -> None:
        self._model, self._task, self._section = ThinkingModel(network, layout), task, section
        self._most = thought_tokens
        self._examples = draw_tests(task, _SEED, section.validation_questions)
        self._start_losses: NDArray[np.float64] | None = None
        self._best_gain = -float("inf")
        self._last: dict[str, Any] | None = None
        self._in_a_row = 0
        self._figures: dict[str, float] = {}

    def begin(self, updates: int) -> None:
        """Measure what the answers without thoughts cost before the first update."""
        if self._section.validate_every and self._start_losses is None and updates == 0:
            self._validate(0)

    def after(self, updates: int) -> None:
        every = self._section.validate_every
        if every and updates % every == 0:
            self._validate(updates)

    @property
    def is_over(self) -> bool:
        """Return whether validations found theatre in a row, and the grace is over or a gain was lost."""
        if self._last is None or self._in_a_row < _IN_A_ROW:
            return False
        is_lost = self._best_gain > LEAST_GAIN >= float(self._last["gain"])
        return is_lost or int(self._last["update"]) >= self._section.theatre_grace

    def figures(self) -> dict[str, float]:
        return dict(self._figures)

    def findings(self, updates: int | None = None) -> dict[str, Any]:
        """Return what a run's summary shows. updates: of the weights now; None: the last validation."""
        if self._last is None:
            return {}
        found = self._last if updates is None else self._told(updates, self._judged(self._probe()))
        return {"theatre": found, "remarks": found["words"]}

    def _validate(self, updates: int) -> None:
        probed = self._probe()
        if updates == 0:
            self._start_losses = -probed.without.log_prob
        found = self._judged(probed)
        self._best_gain = max(self._best_gain, found.gain)
        self._last = self._told(updates, found)
        self._in_a_row = self._in_a_row + 1 if found.verdict == "theatre" else 0
        self._figures = found.figures()
        say = log.warning if found.verdict == "theatre" else log.info
        say("thoughts validated", extra={"update": updates, "verdict": found.verdict, "words": found.words()})

    def _probe(self) -> Probed:
        return probe(self._model, self._task, self._examples, self._most)

    @staticmethod
    def _told(updates: int, found: Validation) -> dict[str, Any]:
        return {"update": updates, **found.json()}

    def _judged(self, probed: Probed) -> Validation:
        most_gain = getattr(self._task, "most_gain", None)
        return validate(probed, start_losses=self._start_losses, most_gain=most_gain)

    # ---- a checkpoint

    def state(self) -> dict[str, Any]:
        return {
            "start_loss": None if self._start_losses is None else self._start_losses.tolist(),
            "best_gain": None if self._last is None else self._best_gain,
            "last": self._last,
            "in_a_row": self._in_a_row,
            "figures": self._figures,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        losses, self._last = state["start_loss"], state["last"]
        self._start_losses = None if losses is None else np.asarray(losses, np.float64)
        self._best_gain = -float("inf") if state["best_gain"] is None else float(state["best_gain"])
        self._figures = dict(state["figures"])
        self._in_a_row = int(state["in_a_row"])
