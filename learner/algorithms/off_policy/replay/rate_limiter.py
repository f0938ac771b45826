"""Bounds on the ratio of samples drawn to steps inserted into replay.

The rule of Reverb's `SampleToInsertRatio` (Cassirer et al. 2021, section 3.4). With `error` = inserted ·
samples_per_insert − sampled, and the middle `minimum` · samples_per_insert:

    a draw of b samples needs    size ≥ minimum   and   error − b ≥ middle − buffer
    an insertion of n steps needs                        error + n · samples_per_insert ≤ middle + buffer

The learner draws as long as it may and then inserts, so the order of the log alone determines its steps, also
after a restart. Steps in the log that are not inserted yet are bounded by `budget`.
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Steps inserted and samples drawn since the start of the run."""

    inserted: int = 0
    sampled: int = 0


class SampleToInsertRatio:
    """Counts insertions and draws of one replay memory, and tells what they allow."""

    def __init__(self, *, samples_per_insert: float, draw: int, minimum: int, buffer_steps: int) -> None:
        """Make a limiter.

        Args:
            samples_per_insert: the ratio to hold.
            draw: samples of a gradient step.
            minimum: steps before the first gradient step.
            buffer_steps: bound of the error, in steps.
        """
        self._ratio = samples_per_insert
        self._draw = draw
        self._minimum = minimum
        self._middle = minimum * samples_per_insert
        self._buffer = buffer_steps * samples_per_insert
        self.buffer_steps = buffer_steps
        self.counts = Counts()

    @property
    def error(self) -> float:
        """Return the samples that are due for the inserted steps."""
        return self.counts.inserted * self._ratio - self.counts.sampled

    def may_draw(self, size: int) -> bool:
        """Return whether a gradient step may be taken from a memory of `size` steps."""
        return size >= self._minimum and self.error - self._draw >= self._middle - self._buffer

    def may_insert(self, steps: int) -> bool:
        """Return whether so many steps may be inserted."""
        return self.error + steps * self._ratio <= self._middle + self._buffer

    def inserted(self, steps: int) -> None:
        """Count inserted steps; raises RuntimeError where they were not allowed.

        `check` has ruled that out.
        """
        if not self.may_insert(steps):
            raise RuntimeError(f"rate limiter: {steps} steps entered at an error of {self.error:g} samples")
        self.counts.inserted += steps

    def drawn(self) -> None:
        """Count a gradient step."""
        self.counts.sampled += self._draw

    def restart(self) -> None:
        """Begin as with an empty memory, because its content was lost."""
        self.counts = Counts()

    def check(self, *, insertion: int, capacity: int) -> None:
        """Raise ValueError, with the figures, for limits at which at some time neither side may go on.

        insertion: most steps that are inserted at once. capacity: of the memory, in steps.
        """
        if capacity < self._minimum + insertion:
            raise ValueError(
                f"algorithm.capacity={capacity}: replay must hold algorithm.learning_starts={self._minimum} "
                f"steps and a fragment of {insertion} beside them, or nothing would ever be sampled; give at "
                f"least {self._minimum + insertion}"
            )
        # An insertion needs room below the upper bound after draws down to the lower one.
        needed = math.ceil(max(insertion, (insertion + self._draw / self._ratio) / 2))
        if self.buffer_steps < needed:
            raise ValueError(
                f"algorithm.error_steps={self.buffer_steps}: with fragments of {insertion} steps, "
                f"{self._ratio:g} samples per step and {self._draw} samples at once there would come a time "
                f"at which neither inserting nor sampling is allowed; give at least {needed}, or lower "
                "actor.unroll_length or environment.count"
            )
