"""How much of something that is bounded each caller holds.

A caller may hold as much as is still free: alone a half of the whole, so that a later caller finds room
(Choudhury and Hahne 1998, dynamic queue length thresholds). Callers without an identity are one caller, who
may hold the whole, because a server that asks for no identity knows no others.
"""

from collections import Counter

from penstock.rpc.identity import Identity


class CallerShares:
    """Used by one event loop. whole: what all callers may hold together, in any unit."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self._held = Counter[Identity | None]()
        self.used = 0

    def fits(self, owner: Identity | None, amount: int) -> bool:
        """Return whether this caller may hold so much more."""
        free = self.whole - self.used
        return amount <= free and (owner is None or self._held[owner] + amount <= free)

    def why_not(self, owner: Identity | None, setting: str) -> str:
        """Return what a caller is told that it does not fit for. setting: that bounds the whole."""
        if owner is None or self.used >= self.whole:
            return f"callers have {self.used} of {self.whole} ({setting})"
        return (
            f"this caller has {self._held[owner]}, and may have no more than the others leave free "
            f"of {self.whole} ({setting})"
        )

    def add(self, owner: Identity | None, amount: int) -> None:
        """Count more, or less where the amount is negative."""
        self.used += amount
        self._held[owner] += amount
        if not self._held[owner]:
            del self._held[owner]
