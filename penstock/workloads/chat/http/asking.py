"""Which answers somebody is asked to rate: those of which an ensemble of heads is least sure, one in five.

Turns that somebody was asked about are learned from, and count for no arm: how sure the heads are depends on
what a version says.
"""

from collections import deque
from typing import Final

SHARE: Final = 0.2
"""Of the answers."""
LEAST: Final = 20
"""Answers that are looked at before somebody is asked."""
REMEMBERED: Final = 200


class Asking:
    """For one event loop."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    def asks(self, disagreement: float | None) -> bool:
        """Return whether to ask about an answer; None: nothing is known of it."""
        if disagreement is None:
            return False
        lower = sum(one < disagreement for one in self._recent)
        is_asked = len(self._recent) >= LEAST and lower >= (1.0 - self._share) * len(self._recent)
        self._recent.append(disagreement)
        return is_asked
