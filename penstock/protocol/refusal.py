"""Reasons for which a call is refused: one enumeration for the wire, the logs and the metrics."""

from dataclasses import dataclass
from enum import IntEnum

from penstock.v1 import refusal_pb2 as pb


class Labelled(IntEnum):
    """Its members have a lower-case name for logs, metric labels and summaries."""

    @property
    def label(self) -> str:
        return self.name.lower()


class Reason(Labelled):
    """Same numbers as `penstock.v1.Reason`; a test compares the two."""

    FULL = 1
    GAP = 2
    INVALID = 3
    EXPIRED = 4
    FENCED = 5
    NOT_READY = 6
    RUN_CLOSED = 7
    OVERLOADED = 8
    UNKNOWN_VERSION = 9
    EPISODE_UNKNOWN = 10
    EPISODE_ELSEWHERE = 11
    DEADLINE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal, with what the caller needs to continue.

    logged: the text for logs, where the detail quotes a text of the caller; "": the detail is logged.
    """

    reason: Reason
    detail: str = ""
    retry_after_ms: int = 0
    expected: int = 0
    logged: str = ""

    def __str__(self) -> str:
        return f"{self.reason.label}: {self.detail}" if self.detail else self.reason.label

    def to_proto(self) -> pb.Refusal:
        return pb.Refusal(
            reason=pb.Reason.ValueType(self.reason.value),
            detail=self.detail,
            retry_after_ms=self.retry_after_ms,
            expected=self.expected,
        )

    @classmethod
    def from_proto(cls, message: pb.Refusal) -> "Refusal | None":
        """Return the refusal of a message; None where nothing was refused."""
        if message.reason == pb.REASON_UNSPECIFIED:
            return None
        return cls(
            reason=Reason(message.reason),
            detail=message.detail,
            retry_after_ms=message.retry_after_ms,
            expected=message.expected,
        )


class Refused(Exception):
    """A refusal, raised."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Unfit(ValueError):
    """A request that is not parsed; the message names what it holds too much of."""


def invalid(detail: str) -> Refused:
    """Return the error (INVALID) for what a caller must change. detail: field, value and remedy."""
    return Refused(Refusal(reason=Reason.INVALID, detail=detail))
