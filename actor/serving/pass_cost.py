"""What a forward pass of so many rows takes, learned from those that were made.

A pass costs something whatever it holds, so its time is not in proportion to its rows: passes are remembered by the
power of two of their rows. Where none of that size was seen, the nearest smaller one is taken, which errs towards
trying.
"""

from typing import Final

_NEWEST: Final = 0.2
"""Weight of the newest pass in a size's average."""


class PassCost:
    """Seconds."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """A pass was made."""
        size = rows.bit_length()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + _NEWEST * (seconds - known)

    def of(self, rows: int) -> float:
        """What one pass of so many rows is expected to take; 0 while nothing is known."""
        size = rows.bit_length()
        if size in self._seconds:
            return self._seconds[size]
        smaller = [known for known in self._seconds if known < size]
        if smaller:
            return self._seconds[max(smaller)]
        return self._seconds[min(self._seconds)] if self._seconds else 0.0

    def of_many(self, rows: int, most: int) -> float:
        """What so many rows take in passes of at most `most`."""
        full, rest = divmod(rows, most)
        return full * self.of(most) + (self.of(rest) if rest else 0.0)
