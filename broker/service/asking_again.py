"""When those who come before the run is there should ask again."""

import math
import time
from collections.abc import Callable
from typing import Final

LEAST_S: Final = 0.05
MOST_S: Final = 0.5
CALLS_PER_S: Final = 100.0


class AskingAgain:
    """Gives each caller a time of its own: a few are told of the run at once, and a crowd asks seldom.

    All together ask at most CALLS_PER_S times a second, unless there are so many that each would wait for
    longer than MOST_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds that only rise."""
        self._clock = clock
        self._last_s = -math.inf

    def after_ms(self) -> int:
        """Return for how many milliseconds the caller should wait."""
        now_s = self._clock()
        due_s = max(now_s + LEAST_S, self._last_s + 1.0 / CALLS_PER_S)
        self._last_s = min(due_s, now_s + MOST_S)
        return round((self._last_s - now_s) * 1000)
