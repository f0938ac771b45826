"""How often one call is sent, and how long each time: for `retry` and `retry_async` alike.

    deadline_s  ├──── attempt ────┤ jitter ├──── attempt ────┤      silence is waited for half of it, then asked again
                ├─ refused: OVERLOADED ─┤ retry_after_ms + jitter ├─ attempt …

Repeated: what nobody knows whether it was heard, and OVERLOADED where the wait fits. Nothing else.
"""

import time
from collections.abc import Iterator
from typing import Final

from penstock.client.errors import DeadlinePassed, Overloaded
from penstock.rpc.call_status import is_repeatable
from penstock.runtime.retry import full_jitter

_CAP_S: Final = 1.0
"""Longest jitter."""
_LEAST_S: Final = 0.001
"""No call is begun for less."""


class Attempts:
    """Those of one call, which begins now."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._ends_s = time.monotonic() + deadline_s
        self._last: Exception | None = None

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._ends_s - time.monotonic())

    def timeout_s(self) -> float:
        """Seconds for one more attempt; raises what ended the last one when there are none."""
        left_s = self.left_s()
        if left_s <= _LEAST_S:
            raise self._last or DeadlinePassed(
                f"deadline_s={self._deadline_s:g} passed before the call was sent"
            )
        return min(left_s, self._deadline_s / 2)

    def is_worth_another(self, error: Exception) -> bool:
        """Whether to send the same request again after this error."""
        self._last = error
        return is_repeatable(error) or (isinstance(error, Overloaded) and _told_s(error) < self.left_s())

    def delays(self) -> Iterator[float]:
        """Seconds to wait after each error."""
        for jitter_s in full_jitter(cap_s=_CAP_S):
            yield _told_s(self._last) + jitter_s


def _told_s(error: Exception | None) -> float:
    refusal = error.refusal if isinstance(error, Overloaded) else None
    return refusal.retry_after_ms / 1000 if refusal else 0.0
