"""The bound on payload bytes that this broker has staged in Redis and not yet appended.

They are taken before the first byte is staged and given back when the append is over, however it ends. No
caller waits: what does not fit is refused, and the actor sends it again.
"""

from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.runtime import metrics

RETRY_AFTER_MS = 50


class StagingLimit:
    """Counts the bytes in flight of one event loop; not for several threads."""

    def __init__(self, ceiling_bytes: int) -> None:
        self.ceiling_bytes = ceiling_bytes
        self.staged_bytes = 0
        metrics.STAGED_BYTES.set_function(lambda: self.staged_bytes)

    def take(self, size: int) -> None:
        """Take `size` bytes of the ceiling, to be given back; raises Refused(FULL) when they do not fit.

        One append is always let in, so that a ceiling below one message slows down and never blocks.
        """
        if self.staged_bytes and self.staged_bytes + size > self.ceiling_bytes:
            detail = f"staging: {self.staged_bytes} of {self.ceiling_bytes} bytes in flight, {size} asked"
            raise Refused(Refusal(reason=Reason.FULL, detail=detail, retry_after_ms=RETRY_AFTER_MS))
        self.staged_bytes += size

    def give_back(self, size: int) -> None:
        """An append of `size` bytes is over."""
        self.staged_bytes -= size
