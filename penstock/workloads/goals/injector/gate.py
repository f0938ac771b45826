"""Whether a goal that a policy has drawn is carried out, and with which probability that happens.

    μ(a)  probability with which the server draws action a; action 0 is to do nothing
    ν(a)  probability that a is done: μ(a) for goals with μ(a) ≥ τ, ε μ(a) for safe goals below τ, 0 for the
          other goals, and the rest for nothing

What is done comes from ν, so log ν is the log-probability that a learner must be told. With log μ, doing
nothing would count as if the policy had drawn it. Without ε goals below τ would never be done, and so never
be learned.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NOTHING: Final = 0


@dataclass(frozen=True, slots=True)
class Gated:
    """What is done. log_prob: log ν of it. why: in words, for those who ask why nothing happened."""

    action: int
    log_prob: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """threshold: τ, a probability. explore: ε. safe: bool [A], goals that may be tried below τ."""

    threshold: float
    explore: float
    safe: tuple[bool, ...]

    def __post_init__(self) -> None:
        for name in ("threshold", "explore"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value}: must be a probability")

    def done_with(self, chances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ν, float64 [A]; chances: μ, float64 [A], which add up to 1."""
        passed = np.where(chances >= self.threshold, 1.0, self.explore * np.array(self.safe))
        done = chances * passed
        done[NOTHING] = 0.0
        done[NOTHING] = max(1.0 - float(done.sum()), 0.0)
        return done

    def decide(self, chances: NDArray[np.float64], drawn: int, draw: float) -> Gated:
        """Return what is done where `drawn` came from μ.

        chances: μ, float64 [A]. draw: uniform in [0, 1), for ε alone.
        """
        done = self.done_with(chances)
        certainty = float(chances[drawn])
        if drawn == NOTHING:
            return self._gated(NOTHING, done, "the policy would do nothing")
        if certainty >= self.threshold:
            return self._gated(drawn, done, f"certainty {certainty:.2f} ≥ {self.threshold:.2f}")
        below = f"certainty {certainty:.2f} < {self.threshold:.2f}"
        if self.safe[drawn] and draw < self.explore:
            return self._gated(drawn, done, f"{below}, tried as one of {self.explore:.0%} of safe goals")
        return self._gated(NOTHING, done, below)

    def _gated(self, action: int, done: NDArray[np.float64], why: str) -> Gated:
        return Gated(action, math.log(done[action]), why)
