"""How many samples are drawn for every step that enters replay, with bounds on how far it may be off.

The rule of Reverb's `SampleToInsertRatio` (Cassirer et al. 2021, section 3.4). With `error` = inserted ·
samples_per_insert − sampled, and the middle `minimum` · samples_per_insert:

    a draw of b samples needs    size ≥ minimum   and   error − b ≥ middle − buffer
    an insertion of n steps needs                        error + n · samples_per_insert ≤ middle + buffer

The learner draws as long as it may and then inserts, so what it does follows from the log alone and a resumed
one does the same. What lies in the log and is not inserted yet is bounded by `budget`.
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Steps inserted and samples drawn since the start of the run."""

    inserted: int = 0
    sampled: int = 0


class SampleToInsertRatio:
    """Counts of one replay memory, and what they allow."""

    def __init__(self, *, samples_per_insert: float, draw: int, minimum: int, buffer_steps: int) -> None:
        """draw: samples of a gradient step.

        minimum: steps before the first. buffer_steps: bound of the error, in steps.
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
        """Samples that are owed for what was inserted."""
        return self.counts.inserted * self._ratio - self.counts.sampled

    def may_draw(self, size: int) -> bool:
        """Whether a gradient step may be made from a memory of `size` steps."""
        return size >= self._minimum and self.error - self._draw >= self._middle - self._buffer

    def may_insert(self, steps: int) -> bool:
        """Whether so many steps may enter."""
        return self.error + steps * self._ratio <= self._middle + self._buffer

    def inserted(self, steps: int) -> None:
        """Steps have entered; raises RuntimeError where they might not, which `check` has ruled out."""
        if not self.may_insert(steps):
            raise RuntimeError(f"rate limiter: {steps} steps entered at an error of {self.error:g} samples")
        self.counts.inserted += steps

    def drawn(self) -> None:
        """A gradient step was made."""
        self.counts.sampled += self._draw

    def restart(self) -> None:
        """Begin as with an empty memory: what it held was lost."""
        self.counts = Counts()

    def check(self, *, insertion: int, capacity: int) -> None:
        """Raise ValueError, with the figures, where a time would come at which neither side may go on.

        insertion: most steps that enter at once. capacity: of the memory, in steps.
        """
        if capacity < self._minimum + insertion:
            raise ValueError(
                f"algorithm.capacity={capacity}: replay must hold algorithm.learning_starts={self._minimum} "
                f"steps and a fragment of {insertion} beside them, or nothing would ever be sampled; give at "
                f"least {self._minimum + insertion}"
            )
        # Whatever enters needs room below the upper bound after draws down to the lower one.
        needed = math.ceil(max(insertion, (insertion + self._draw / self._ratio) / 2))
        if self.buffer_steps < needed:
            raise ValueError(
                f"algorithm.error_steps={self.buffer_steps}: with fragments of {insertion} steps, "
                f"{self._ratio:g} samples per step and {self._draw} samples at once there would come a time "
                f"at which neither inserting nor sampling is allowed; give at least {needed}, or lower "
                "actor.unroll_length or environment.count"
            )
