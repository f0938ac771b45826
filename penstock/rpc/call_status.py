"""What a call that failed says: whether to repeat it, and in which words to tell of it."""

from typing import Final

import grpc

_REPEATABLE: Final = frozenset({
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
})  # fmt: skip
_TOO_LARGE: Final = "larger than max"
"""How gRPC words, under RESOURCE_EXHAUSTED, that a message of this size will never pass."""


def code_of(error: Exception) -> grpc.StatusCode | None:
    """Return the status of a failed call, with or without an event loop; None for any other error."""
    return error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None


def text_of(error: Exception) -> str:
    """Return `CODE: details`, for messages and logs."""
    code = code_of(error)
    return str(error) if code is None else f"{code.name}: {error.details()}"  # type: ignore[attr-defined]


def is_too_large(error: Exception) -> bool:
    """Return whether a message was above the limit of one of the two sides."""
    return _TOO_LARGE in text_of(error)


def is_repeatable(error: Exception) -> bool:
    """Return whether a safe call is sent again: it may not have been heard, or may be heard later."""
    return code_of(error) in _REPEATABLE and not is_too_large(error)
