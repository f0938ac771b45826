"""Whether the broker has work in hand: what a fault test reads to tell a busy moment from an idle one.

One event loop serves every call, so the last place that it reached says nothing of the others: calls are
counted, and only when the last has ended the broker waits. WatchLatest is held by design and counts as
waiting.
"""

from contextlib import AbstractContextManager
from typing import Final

from penstock.runtime.failpoint import failpoint

_HELD: Final = frozenset({"WatchLatest"})


class CallsInFlight:
    """The calls of one event loop."""

    def __init__(self) -> None:
        self.calls = 0

    def serving(self, name: str) -> AbstractContextManager[None]:
        """Return what is entered around each call of this name."""
        return _Serving(self, 0 if name in _HELD else 1)


class _Serving(AbstractContextManager[None]):
    def __init__(self, all_calls: CallsInFlight, weight: int) -> None:
        self._all, self._weight = all_calls, weight

    def __enter__(self) -> None:
        self._all.calls += self._weight

    def __exit__(self, *_error: object) -> None:
        self._all.calls -= self._weight
        if not self._all.calls:
            failpoint("broker.waiting")
