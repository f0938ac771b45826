"""How much one address and one account may ask for in a second, and follow at a time; beyond it it is 429.

The counts are of this process: several gateways give each caller as much again.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from penstock.gateway.frame.api_errors import ApiError
from penstock.protocol.limits import MIB
from penstock.rpc.rate_limits import Exceeded, RateLimits, Rates

ADDRESS: Final = Rates(calls=200.0, bytes=32.0 * MIB, settings="per address")
ACCOUNT: Final = Rates(calls=100.0, bytes=16.0 * MIB, settings="per account")
STREAMS: Final = 512
"""Streams of events of an account at a time: each holds one of the connections that there are for all."""


class CallLimits:
    """The limits of addresses and accounts; for one event loop."""

    def __init__(self, address: Rates = ADDRESS, account: Rates = ACCOUNT, *, streams: int = STREAMS) -> None:
        self._addresses = RateLimits(address)
        self._accounts = RateLimits(account)
        self._most_streams, self._streams = streams, Counter[str]()

    def admit_address(self, address: str) -> None:
        """Count a request of an address; raises ApiError 429 for one too many."""
        _take(self._addresses, address)

    def admit(self, subject: str) -> None:
        """Count a request of an account; raises ApiError 429 for one too many."""
        _take(self._accounts, subject)

    def begin_stream(self, subject: str) -> Callable[[], None]:
        """Count a stream of an account, and return what is called at its end; raises ApiError 429."""
        if self._streams[subject] >= self._most_streams:
            detail = (
                f"{self._most_streams} streams of this account are open: end one before you begin another"
            )
            raise ApiError(429, detail, retry_s=1)
        self._streams[subject] += 1
        return lambda: self._end_stream(subject)

    def _end_stream(self, subject: str) -> None:
        self._streams[subject] -= 1
        if not self._streams[subject]:
            del self._streams[subject]


def _take(limits: RateLimits, caller: str) -> None:
    """Refuse what the limits would make wait: an HTTP client waits by itself."""
    try:
        wait_s = limits.reserve(caller, 0)
    except Exceeded as error:
        raise ApiError(429, str(error), retry_s=1) from error
    if wait_s > 0:
        raise ApiError(429, "too many requests: wait a second and go on more slowly", retry_s=wait_s)
