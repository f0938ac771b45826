"""The scripts of the run with a clock that is set by hand: hours pass in seconds, and twice the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from penstock.broker.log import script

CLOCK: Final = "virtual:ms"
"""The key that holds the time, in milliseconds."""
_REAL: Final = "redis.call('TIME')"
_NOW: Final = f"redis.call('GET', '{CLOCK}')"
_VIRTUAL: Final = f"{{math.floor({_NOW} / 1000), {_NOW} % 1000 * 1000}}"


class Clock:
    """The time of the scripts on the server of `client`."""

    def __init__(self, client: Any, now_ms: int) -> None:
        self._client = client
        self.now_ms = now_ms
        self.set()

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms
        self.set()

    def set(self) -> None:
        """Tell the server; again after it has forgotten everything."""
        self._client.set(CLOCK, self.now_ms)


@contextmanager
def virtual_time() -> Iterator[None]:
    """Have every script that is loaded within ask the key `CLOCK` for the time."""
    read = script.read_source
    script.load.cache_clear()
    script.read_source = lambda name: read(name).replace(_REAL, _VIRTUAL)
    try:
        yield
    finally:
        script.read_source = read
        script.load.cache_clear()
