"""Bounds on the ratio of gradient steps taken to environment steps inserted into replay.

The rule of Reverb's `SampleToInsertRatio` (Cassirer et al. 2021, section 3.4), counted in gradient steps.
With `due` = (inserted − minimum) · ratio − taken:

    a gradient step needs        size ≥ minimum   and   due − 1 ≥ −buffer · ratio
    an insertion of n steps needs                       due + n · ratio ≤ buffer · ratio

The learner takes steps as long as it may and then inserts, so the order of the log alone determines its
steps, also after a restart. Between two updates `due` lies less than one step above its lower bound; with
other settings at a resume it is put there (`rebase`). Steps in the log that are not inserted yet are bounded
by `budget`.
"""

import math
from dataclasses import dataclass
from typing import Final

_ROUNDING: Final = 1e-6
"""Of a gradient step."""


@dataclass(slots=True)
class Counts:
    """Environment steps inserted and gradient steps taken since the start of the run, or since `rebase`."""

    inserted: int = 0
    taken: float = 0


class SampleToInsertRatio:
    """Counts insertions and gradient steps of one replay memory, and tells what they allow."""

    def __init__(self, *, ratio: float, minimum: int, buffer_steps: int) -> None:
        """Begin with no step. ratio: gradient steps per environment step.

        minimum, buffer_steps: before the first gradient step, and the error's bound, in environment steps.
        """
        self._ratio = ratio
        self.minimum = minimum
        self._buffer = buffer_steps * ratio
        self.buffer_steps = buffer_steps
        self.counts = Counts()

    @property
    def due(self) -> float:
        """Return the gradient steps that are due for the inserted steps."""
        return (self.counts.inserted - self.minimum) * self._ratio - self.counts.taken

    def may_draw(self, size: int) -> bool:
        """Return whether a gradient step may be taken from a memory of `size` steps."""
        return size >= self.minimum and self.due - 1.0 >= -self._buffer

    def may_insert(self, steps: int) -> bool:
        """Return whether so many steps may be inserted."""
        return self.due + steps * self._ratio <= self._buffer + _ROUNDING

    def inserted(self, steps: int) -> None:
        """Count inserted steps; raises RuntimeError where they were not allowed, as `check` has ruled out."""
        if not self.may_insert(steps):
            raise RuntimeError(f"rate limiter: {steps} steps entered with {self.due:g} gradient steps due")
        self.counts.inserted += steps

    def drawn(self) -> None:
        """Count a gradient step."""
        self.counts.taken += 1

    def restart(self, size: int = 0) -> None:
        """Begin as with a memory of `size` steps and no gradient step, because its content was lost."""
        self.counts = Counts(inserted=size)

    def rebase(self) -> None:
        """Put what is due where it lies between two updates, if it is not: it was counted by other settings.

        A ratio that rose would otherwise ask for all that was missed, and one that fell for nothing at all
        until that is made up.
        """
        if self.counts.inserted >= self.minimum:
            due = min(max(self.due, -self._buffer), 1.0 - self._buffer)
            self.counts.taken += self.due - due

    def check(self, *, insertion: int, capacity: int) -> None:
        """Raise ValueError, with the figures, for limits at which at some time neither side may go on.

        insertion: most steps that are inserted at once. capacity: of the memory, in steps.
        """
        if capacity < self.minimum + insertion:
            raise ValueError(
                f"algorithm.capacity={capacity}: replay must hold algorithm.learning_starts={self.minimum} "
                f"steps and a fragment of {insertion} beside them, or nothing would ever be sampled; give at "
                f"least {self.minimum + insertion}"
            )
        # An insertion needs room below the upper bound after draws down to the lower one.
        needed = math.ceil(max(insertion, (insertion + 1.0 / self._ratio) / 2))
        if self.buffer_steps < needed:
            raise ValueError(
                f"algorithm.error_steps={self.buffer_steps}: with fragments of {insertion} steps, "
                f"{self._ratio:g} gradient steps per environment step there would come a time "
                f"at which neither inserting nor sampling is allowed; give at least {needed}, or lower "
                "actor.unroll_length or environment.count"
            )
