"""What a forward pass of so many rows takes, learned from those that were made.

A pass costs something whatever it holds, so its time is not in proportion to its rows: passes are remembered
by the power of two of their rows. Where none of that size was seen, the nearest smaller one is taken, which
errs towards trying.
"""

from typing import Final

_NEWEST: Final = 0.2
"""Weight of the newest pass in a size's average."""


class PassCost:
    """Expected seconds of a forward pass by its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._nearest: dict[int, int] = {}
        """The size that was seen, by one that was asked for."""

    def note(self, rows: int, seconds: float) -> None:
        """A pass was made."""
        size = rows.bit_length()
        if size not in self._seconds:
            self._nearest.clear()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + _NEWEST * (seconds - known)

    def of(self, rows: int) -> float:
        """Return what one pass of so many rows is expected to take; 0 while nothing is known."""
        if not self._seconds:
            return 0.0
        size = rows.bit_length()
        if size not in self._nearest:
            smaller = [known for known in self._seconds if known <= size]
            self._nearest[size] = max(smaller) if smaller else min(self._seconds)
        return self._seconds[self._nearest[size]]

    def of_many(self, rows: int, most: int) -> float:
        """Return what so many rows take in passes of at most `most`."""
        if 0 < rows <= most:
            return self.of(rows)
        full, rest = divmod(rows, most)
        return full * self.of(most) + (self.of(rest) if rest else 0.0)
