"""Early stopping: how many evaluations in a row may bring no improvement before a run ends."""

import math
from typing import Any

from penstock.config.settings import ConfigurationError, EvaluationSection


class Patience:
    """Told the mean return of every evaluation, in order.

    An evaluation is an improvement when its mean exceeds the best one's by more than
    `evaluation.min_improvement`; the first is one. `evaluation.patience` of the others in a row exhaust it.
    """

    def __init__(self, section: EvaluationSection) -> None:
        self._patience = section.patience
        self._least = section.min_improvement
        self.best: float | None = None
        self.without = 0
        """Evaluations since the last improvement."""

    def judge(self, mean: float) -> None:
        """The next evaluation; one without a finite mean is no improvement."""
        improved = math.isfinite(mean) and (self.best is None or mean > self.best + self._least)
        self.without = 0 if improved else self.without + 1
        if improved:
            self.best = mean

    @property
    def exhausted(self) -> bool:
        """Whether it is time to end."""
        return self._patience is not None and self.without >= self._patience

    def state(self) -> dict[str, Any]:
        """A JSON object for a checkpoint."""
        return {"best": self.best, "without": self.without}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what `state` was taken from."""
        self.best, self.without = state["best"], int(state["without"])


def check_patience(section: EvaluationSection) -> None:
    """Raise ConfigurationError for a patience that would never be tried."""
    if section.patience is not None and not (section.interval_steps and section.episodes):
        raise ConfigurationError(
            f"evaluation.patience={section.patience}: counts evaluations, and none are made while training; "
            "say how often as evaluation.interval_steps, and evaluation.episodes above 0"
        )
