"""The rate of arriving bytes, from the first arrival on."""

import time
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Rate:
    """Counts arrivals; the first one is not in the rate, since the time of its departure is not known."""

    entries: int = 0
    _bytes: int = 0
    _first_s: float | None = None
    _last_s: float = field(default=0.0)

    def add(self, entries: int, size: int) -> None:
        """Count `entries` of `size` bytes in all that have arrived and were read."""
        now = time.perf_counter()
        self.entries += entries
        if self._first_s is None:
            self._first_s = now
        else:
            self._bytes += size
        self._last_s = now

    @property
    def megabytes_per_second(self) -> float:
        """Return 10⁶ bytes per second; 0 when all arrived at once."""
        seconds = self._last_s - (self._first_s or self._last_s)
        return self._bytes / seconds / 1e6 if seconds else 0.0


def touch(payload: bytes | memoryview) -> int:
    """Read every byte once, as a learner would."""
    return int(np.frombuffer(payload, np.uint8).max(initial=0))
