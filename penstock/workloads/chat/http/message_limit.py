"""How many messages of one person are answered in a minute; beyond it the answer is 429."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from penstock.gateway.surface import ApiError

MOST_A_MINUTE: Final = 30
MOST_PEOPLE: Final = 4096
"""Of whom is remembered when they asked."""
_WINDOW_S: Final = 60.0


class MessageLimit:
    """For one event loop. now: seconds, monotonic."""

    def __init__(self, most: int = MOST_A_MINUTE, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._asked: OrderedDict[str, deque[float]] = OrderedDict()

    def count(self, person: str) -> None:
        """Count a message of somebody; raises ApiError 429 for one too many, which is not counted."""
        now_s, asked = self._now(), self._asked.setdefault(person, deque())
        self._asked.move_to_end(person)
        while asked and now_s - asked[0] >= _WINDOW_S:
            asked.popleft()
        if len(asked) >= self._most:
            wait_s = asked[0] + _WINDOW_S - now_s
            raise ApiError(429, f"{self._most} messages a minute are answered: wait a while", retry_s=wait_s)
        asked.append(now_s)
        if len(self._asked) > MOST_PEOPLE:
            self._asked.popitem(last=False)
