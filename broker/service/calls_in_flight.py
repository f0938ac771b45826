"""Whether the broker has work in hand: what a fault test reads to tell a busy moment from an idle one.

One event loop serves every call, so the last place that it reached says nothing of the others: calls are
counted, and only when the last has ended the broker waits. WatchLatest is held by design and counts as
waiting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.runtime.failpoint import failpoint

_HELD: Final = frozenset({"WatchLatest"})


class CallsInFlight:
    """The calls of one event loop."""

    def __init__(self) -> None:
        self._calls = 0

    @contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """One call of this name."""
        weight = 0 if name in _HELD else 1
        self._calls += weight
        try:
            yield
        finally:
            self._calls -= weight
            if not self._calls:
                failpoint("broker.waiting")
