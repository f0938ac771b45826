"""When weights may be published again: the least interval, and while actors fetch what was published before.

A version that no actor has the time to fetch is written to Redis for nothing. So weights of more than one
chunk wait until the fetches that are under way are over, but no longer than a bound: an actor on a slow line
delays the others by no more than that.
"""

import math
import time
from collections.abc import Callable
from typing import Final

from penstock.config.settings import LearnerSection
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES

LOOK_S: Final = 0.02
"""Pause between two looks at what is being fetched."""


class PublishInterval:
    """Tells when a publication is due. One thread notes publications and asks.

    Args:
        section: has the interval and the longest wait.
        fetched: number of versions of more than one chunk that are being fetched.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        section: LearnerSection,
        fetched: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = section.publish_interval_ms / 1000
        self._longest_s = max(self._interval_s, section.publish_fetch_wait_s)
        self._fetched, self._clock = fetched, clock
        self._last_s, self._size = -math.inf, 0

    def published(self, size: int) -> None:
        """Note that weights of so many bytes are published."""
        self._last_s, self._size = self._clock(), size

    def is_over(self) -> bool:
        """Return whether weights may be published now."""
        passed_s = self._clock() - self._last_s
        if passed_s < self._interval_s or passed_s >= self._longest_s:
            return passed_s >= self._interval_s
        return self._size <= WEIGHT_CHUNK_BYTES or self._fetched() == 0
