"""What stands between the wire and every handler of the broker: one gRPC server interceptor.

A request that is too large or is not the message it should be ends as INVALID_ARGUMENT before the
handler sees it, and so does Malformed raised inside. Absent ends as NOT_FOUND; a Refused that the
reply has no place for as FAILED_PRECONDITION; a handler that outlives the server's deadline as
DEADLINE_EXCEEDED; a Redis that does not answer as UNAVAILABLE where there is no refusal for it. Anything else that a handler raises is logged with a number and ends as INTERNAL with
that number: no text of an exception leaves the process.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from broker.log.store import StoreUnavailable
from broker.service.calls_in_flight import Presence
from broker.service.request_outline import check_outline
from penstock.runtime import metrics
from penstock.wire import append
from penstock.wire.limits import (
    APPEND_DEADLINE_S,
    CALL_DEADLINE_S,
    MAX_NUMBER,
    MAX_WATCH_WAIT_MS,
    WATCH_GRACE_S,
)
from penstock.wire.outline import Unfit
from penstock.wire.refusal import Reason, Refusal, Refused

LOGGER = logging.getLogger(__name__)
REDIS_DOWN_RETRY_MS: Final = 500
_DEADLINES_S: Final[dict[str, float]] = {
    "Append": APPEND_DEADLINE_S,
    "WatchLatest": MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S,
}
_PARSERS: Final[dict[str, Callable[[bytes], Any]]] = {"Append": append.parse}
"""Where it is not protobuf's."""
_WRITTEN: Final = frozenset({"WatchLatest", "GetWeights"})
"""Whose replies are bytes already."""

Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]


class Malformed(ValueError):
    """A request that breaks the contract; the message names field, value and remedy."""


class Absent(LookupError):
    """What was asked for is not there (any more); ends as NOT_FOUND."""


def redis_down(reason: Reason, error: StoreUnavailable) -> Refusal:
    """What callers are told while Redis does not answer."""
    return Refusal(reason=reason, detail=f"redis: {error}", retry_after_ms=REDIS_DOWN_RETRY_MS)


def check_number(field: str, value: int) -> None:
    """Raise Malformed unless `value` is one that the broker gives: 1 .. 2^53."""
    if not 1 <= value <= MAX_NUMBER:
        raise Malformed(f"{field}={value}: give the number that the broker gave, from 1 to 2^53")


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """See the module. One per server."""

    def __init__(self) -> None:
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._presence = Presence()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The guarded handler: of our own calls in full, of others (health, reflection) what is parsed."""
        method = handler_call_details.method
        if method in self._guarded:
            return self._guarded[method]
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = method.rpartition("/")[2]
        ours = method.startswith("/penstock.v1.") and handler.unary_unary is not None
        guarded = _guard(handler, name, self._presence) if ours else _guard_foreign(handler, name)
        self._guarded[method] = guarded
        return guarded


def _guard(
    handler: "grpc.RpcMethodHandler[Any, Any]", name: str, presence: Presence
) -> "grpc.RpcMethodHandler[Any, Any]":
    inner: Any = handler.unary_unary
    return grpc.unary_unary_rpc_method_handler(
        _guarded_call(inner, name, _DEADLINES_S.get(name, CALL_DEADLINE_S), presence),
        request_deserializer=_guarded_parse(_PARSERS.get(name, handler.request_deserializer), name),
        response_serializer=None if name in _WRITTEN else handler.response_serializer,
    )


def _guard_foreign(
    handler: "grpc.RpcMethodHandler[Any, Any]", name: str
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler of gRPC's own services, which would answer bytes that are no message with a traceback."""
    codec = {
        "request_deserializer": _guarded_parse(handler.request_deserializer, name),
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(_sound_unary(handler.unary_unary), **codec)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(_sound_replies(handler.unary_stream), **codec)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(_sound_stream(handler.stream_stream), **codec)
    return handler


def _sound_unary(inner: Any) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        return await inner(request, context)

    return guarded


def _sound_replies(inner: Any) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        async for reply in inner(request, context):
            yield reply

    return guarded


def _sound_stream(inner: Any) -> Any:
    async def sound(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, Malformed):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
            yield request

    async def guarded(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for reply in inner(sound(requests, context), context):
            yield reply

    return guarded


def _guarded_parse(parse: Any, name: str) -> Callable[[bytes], Any]:
    """`parse`, with what cannot be parsed returned as Malformed: a raise there would be INTERNAL."""

    def guarded(data: bytes) -> Any:
        try:
            check_outline(name, data)
            return parse(data)
        except Unfit as error:
            return Malformed(str(error))
        except DecodeError:
            return Malformed(
                f"{name}: {len(data)} bytes that are no {name}Request; check the protocol version"
            )

    return guarded


def _sound(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise request
    return request


def _guarded_call(inner: Handler, name: str, deadline_s: float, presence: Presence) -> Handler:
    async def guarded(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        try:
            with presence.serving(name):
                async with asyncio.timeout(deadline_s):
                    return await inner(_sound(request), context)
        except grpc.aio.AbortError:
            raise
        except Malformed as error:
            metrics.REFUSALS.labels(reason="malformed").inc()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Refused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{name}: {error}")
        except NotImplementedError:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here")
        except Absent as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except TimeoutError:
            text = f"{name}: no answer within {deadline_s:g} s; send it again"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        except StoreUnavailable as error:
            LOGGER.warning("%s: redis does not answer: %s", name, error, extra=_about(request))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{name}: redis does not answer; send it again")
        except Exception:
            number = secrets.token_hex(4)
            words = {"request_id": number, **_about(request)}
            LOGGER.exception("%s failed", name, extra=words)
            await context.abort(
                grpc.StatusCode.INTERNAL, f"{name} failed; request id {number} in the broker's log"
            )

    return guarded


def _about(request: Any) -> dict[str, int]:
    """Whose call it is, where the request says so."""
    session = getattr(request, "session", 0)
    return {"session": session} if session else {}
