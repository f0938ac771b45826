"""The attempts of one call.

How often it is sent and how long each may take, for threads and event loops alike.

    deadline_s  ├──── attempt ────┤ jitter ├──── attempt ────┤   silence: sent again after half of it
                ├─ refused: OVERLOADED ─┤ retry_after_ms + jitter ├─ attempt …

Only two outcomes are repeated: a call of which it is unknown whether it arrived, and OVERLOADED where the
wait fits into the deadline.
"""

import math
import time
from collections.abc import Iterator
from typing import Final

import grpc

from penstock.client.errors import DeadlinePassed, Overloaded
from penstock.rpc.call_status import code_of, is_repeatable
from penstock.runtime.retry import full_jitter

_CAP_S: Final = 1.0
"""Longest jitter in seconds."""
_LEAST_S: Final = 0.001
"""Least seconds for which an attempt is begun."""


class Attempts:
    """Counts the attempts of one call, which begins when this is made.

    deadline_s: for all attempts together, in seconds. share: of it, the longest that one attempt may take.
    reach_s: seconds for which a server that cannot be reached is tried again.
    """

    def __init__(self, deadline_s: float, share: float = 0.5, reach_s: float = math.inf) -> None:
        self._deadline_s, self._longest_s = deadline_s, share * deadline_s
        self._ends_s = time.monotonic() + deadline_s
        self._reached_by_s = time.monotonic() + reach_s
        self._last: Exception | None = None

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self._ends_s - time.monotonic())

    def timeout_s(self) -> float:
        """Return the seconds for one more attempt.

        Without any it raises the error that ended the last one.
        """
        left_s = self.left_s()
        if left_s <= _LEAST_S:
            raise self._last or DeadlinePassed(
                f"deadline_s={self._deadline_s:g} passed before the call was sent"
            )
        return min(left_s, self._longest_s)

    def is_worth_another(self, error: Exception) -> bool:
        """Return whether to send the same request again after this error."""
        self._last = error
        if code_of(error) is grpc.StatusCode.UNAVAILABLE and time.monotonic() >= self._reached_by_s:
            return False
        return is_repeatable(error) or (
            isinstance(error, Overloaded) and _retry_after_s(error) < self.left_s()
        )

    def delays(self) -> Iterator[float]:
        """Yield the seconds to wait after each error."""
        for jitter_s in full_jitter(cap_s=_CAP_S):
            yield _retry_after_s(self._last) + jitter_s


def _retry_after_s(error: Exception | None) -> float:
    refusal = error.refusal if isinstance(error, Overloaded) else None
    return refusal.retry_after_ms / 1000 if refusal else 0.0
