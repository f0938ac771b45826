"""Errors of a call to a policy server.

Raised before anything is sent: ValueError, for an observation or an option that the spaces do not allow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.refusal import Reason, Refusal
from penstock.rpc.gate import code_of, is_too_large, text_of
from penstock.runtime.retry import Interrupted


class PolicyError(Exception):
    """A call that failed; base of all errors here. refusal: the server's; None where there was no reply."""

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal


class Overloaded(PolicyError):
    """The server was overloaded until the deadline of the call; see `refusal.retry_after_ms`."""


class InvalidRequest(PolicyError):
    """The request is wrong, and no repetition helps; the message says which part of it must change."""


class NotAllowed(PolicyError):
    """The server does not accept these credentials for a client of this run."""


class UnknownVersion(PolicyError):
    """The server does not hold the requested version."""


class EpisodeUnknown(PolicyError):
    """The server does not have this episode, perhaps after a restart; start another one."""


class EpisodeElsewhere(PolicyError):
    """The episode is, or was, on another server; start another one."""


class NotReady(PolicyError):
    """The server has no weights, or has none yet."""


class DeadlinePassed(PolicyError):
    """No answer came in time; it is unknown whether the call arrived."""


class Unreachable(PolicyError):
    """No connection in time, or the client was closed; it is unknown whether the call arrived."""


class BadReply(PolicyError):
    """The reply cannot be read: the server speaks another version of the protocol."""


_BY_REASON: Final[dict[Reason, type[PolicyError]]] = {
    Reason.OVERLOADED: Overloaded,
    Reason.INVALID: InvalidRequest,
    Reason.UNKNOWN_VERSION: UnknownVersion,
    Reason.EPISODE_UNKNOWN: EpisodeUnknown,
    Reason.EPISODE_ELSEWHERE: EpisodeElsewhere,
    Reason.NOT_READY: NotReady,
    Reason.DEADLINE: DeadlinePassed,
}
_BY_STATUS: Final[dict[grpc.StatusCode | None, type[PolicyError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


def from_refusal(refusal: Refusal) -> PolicyError:
    """Return the error of a refusal; a plain PolicyError for a reason that this service should not give."""
    return _BY_REASON.get(refusal.reason, PolicyError)(str(refusal), refusal)


def from_status(address: str, error: Exception) -> PolicyError:
    """Return the error of a call that the transport ended."""
    if is_too_large(error):
        return InvalidRequest(
            f"a message to or from {address} is above its limit, here {MAX_MESSAGE_BYTES} bytes "
            f"({text_of(error)}); ask for fewer rows at once"
        )
    kind = _BY_STATUS.get(code_of(error), Unreachable)
    return kind(f"the policy server at {address}: {text_of(error)}")


@contextmanager
def typed(address: str) -> Iterator[None]:
    """Turn errors of the transport into a PolicyError; PolicyError and ValueError pass unchanged."""
    try:
        yield
    except Interrupted as error:
        raise Unreachable(f"the client of the policy server at {address} was closed") from error
    except grpc.RpcError as error:
        raise from_status(address, error) from error
