"""How much one caller may ask of a server: calls and bytes per second, as two token buckets.

A caller that asks for more waits up to MAX_DELAY_S for its turn and is refused beyond that: one that is a
little too fast is slowed down, a flood is turned away. Buckets hold one second's worth, and never less
than the largest message. Of too many callers the longest idle is forgotten, by when its bucket is full
again. What a caller was answered and has not read is bounded too, on each of its connections and on all of
them: actors that share a certificate read side by side. For one event loop.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from penstock.protocol.limits import KIB, MAX_MESSAGE_BYTES, MIB

MAX_DELAY_S: Final = 1.0
MAX_CALLERS: Final = 4096
MAX_UNREAD_BYTES: Final = 4 * MIB
"""Most bytes of replies that may be unread on a connection: the server has to keep them, more than once."""
MAX_CALLER_UNREAD_BYTES: Final = 32 * MIB
"""The same on all connections of a caller: each of the actors of a machine waits for one chunk of weights."""
MAX_ALL_UNREAD_BYTES: Final = 256 * MIB
"""The same of all callers together. Replies up to SMALL_BYTES are sent all the same."""
SMALL_BYTES: Final = 4 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Limits what each caller may ask for in a second. settings: that say so, for refusals."""

    calls: float
    bytes: float
    settings: str = "broker.max_calls_per_s, broker.max_bytes_per_s"


class Exceeded(Exception):
    """The caller has to wait longer than a call is held; the message says for what and how long."""


@dataclass(slots=True)
class _Bucket:
    """What is left; below zero when later seconds are spent already."""

    calls: float
    bytes: float
    filled_s: float


class RateLimits:
    """Holds the buckets of every caller. For one event loop."""

    def __init__(self, rates: Rates, clock: Callable[[], float] = monotonic) -> None:
        self._rates = rates
        self._most_bytes = max(rates.bytes, 2.0 * MAX_MESSAGE_BYTES)
        self._most_calls = max(rates.calls, 1.0)
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._unread: Counter[str | tuple[str, str]] = Counter()
        """By caller, and by caller and connection."""
        self._all_unread = 0

    def __len__(self) -> int:
        """Return the number of callers that are remembered."""
        return len(self._buckets)

    def reserve(self, caller: str, size: int) -> float:
        """Return the seconds to wait before a call of `size` bytes is served.

        Raises Exceeded, and takes nothing then.
        """
        bucket = self._bucket(caller)
        delay = max((1 - bucket.calls) / self._rates.calls, (size - bucket.bytes) / self._rates.bytes, 0.0)
        if delay > MAX_DELAY_S:
            raise Exceeded(
                f"more than {self._rates.calls:g} calls or {self._rates.bytes:g} bytes a second "
                f"({self._rates.settings}): wait {delay:.1f} s"
            )
        bucket.calls -= 1
        bucket.bytes -= size
        return delay

    def charge(self, caller: str, size: int) -> None:
        """Take the bytes of a reply that was sent to the caller; later calls wait for them."""
        self._bucket(caller).bytes -= size

    def keep(self, caller: str, connection: str, size: int) -> Callable[[], None]:
        """Count a reply as unread until what is returned is called.

        caller, connection: whom it goes to, and on which connection. size: in bytes. Raises Exceeded for one
        too many.
        """
        line = (caller, connection)
        for key, most in ((line, MAX_UNREAD_BYTES), (caller, MAX_CALLER_UNREAD_BYTES)):
            mine = self._unread[key]
            if mine and mine + size > most:
                raise Exceeded(f"{mine} bytes of earlier replies are not read yet; read them first")
        if size > SMALL_BYTES and self._all_unread + size > MAX_ALL_UNREAD_BYTES:
            raise Exceeded(f"{self._all_unread} bytes of replies to all callers are not read yet; come again")
        for key in (line, caller):
            self._unread[key] += size
        self._all_unread += size

        def was_read() -> None:
            self._all_unread -= size
            for key in (line, caller):
                self._unread[key] -= size
                if not self._unread[key]:
                    del self._unread[key]

        return was_read

    def _bucket(self, caller: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.pop(caller, None)
        if bucket is None:
            bucket = _Bucket(self._most_calls, self._most_bytes, now)
            while len(self._buckets) >= MAX_CALLERS:
                self._buckets.popitem(last=False)
        passed, bucket.filled_s = now - bucket.filled_s, now
        bucket.calls = min(self._most_calls, bucket.calls + passed * self._rates.calls)
        bucket.bytes = min(self._most_bytes, bucket.bytes + passed * self._rates.bytes)
        self._buckets[caller] = bucket
        return bucket
