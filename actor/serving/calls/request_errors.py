"""What could not be answered, counted, and in the log under the request's id.

One line of a kind in ten seconds.

A server in trouble refuses thousands of requests a second; its log must not be the next trouble. A line says
how many of its kind came since the one before.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from penstock.actor.serving.inference.forward_pass import Loaded, Question
from penstock.protocol.refusal import Refused
from penstock.runtime import metrics
from penstock.v1 import refusal_pb2

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class RequestErrors:
    """Counts and logs what one server refuses; `clock`: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}
        """By kind: when it was said last, and how many have come since."""

    def refused(self, request: Any, error: Refused) -> refusal_pb2.Refusal:
        """Count a request of any call that was refused; return the refusal for its reply."""
        reason = error.refusal.reason.label
        metrics.REFUSALS.labels(reason).inc()
        others = self._count(reason)
        if others is not None:
            detail = error.refusal.logged or error.refusal.detail
            words = {"reason": reason, "detail": detail, "others": others}
            log.info("refused", extra=words | _names(request))
        return error.refusal.to_proto()

    def failed(self, loaded: Loaded, question: Question, error: Exception) -> None:
        """Count a version that could not answer."""
        others = self._count("failed")
        if others is not None:
            words = {"version": loaded.version, "error": str(error), "others": others}
            log.error("a version cannot answer", exc_info=error, extra=words | _names(question))

    def _count(self, kind: str) -> int | None:
        """Return how many went unsaid before this one; None where it goes unsaid, too."""
        now = self._clock()
        said_s, others = self._said.get(kind, (now - EVERY_S, 0))
        is_due = now - said_s >= EVERY_S
        self._said[kind] = (now, 0) if is_due else (said_s, others + 1)
        return others if is_due else None


def _names(request: Any) -> dict[str, str]:
    """The caller's own id of it, and its episode, as far as it has them."""
    names = {
        "client_request_id": getattr(request, "request_id", ""),
        "episode_id": getattr(request, "episode_id", ""),
    }
    return {key: name[:80] for key, name in names.items() if name}
