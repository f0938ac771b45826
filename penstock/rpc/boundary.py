"""The boundary between the bytes of a call and its handler.

It is one gRPC server interceptor, the same at every server.

    bytes ─► size ─► parse ─► handler ─► reply
             INVALID_ARGUMENT  └─ what it raises ─► a status

No text of an unforeseen exception leaves the process. The standard services (health, reflection) stand behind
the same boundary: without it they would answer bytes that are no message with a traceback.
"""

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from penstock.protocol.append import Unfit
from penstock.protocol.refusal import Refused

log = logging.getLogger(__name__)

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""
Handler = Any
Body = Callable[[Any, Context], Awaitable[Any]]

_OURS: Final = "/penstock.v1."


class Malformed(ValueError):
    """A request that breaks the contract; the message names field, value and remedy."""


class Absent(LookupError):
    """Reports that what was asked for is not there, or no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """Says how a call is bounded and read.

    largest_bytes: size of the largest request; None: the transport's limit alone.
    deadline_s: how long a handler may take; None: for ever. It holds for calls without streams.
    parse: reads the request from its bytes and raises Unfit or DecodeError; None: protobuf's own parser.
    writes_bytes: whether the handler returns the reply's bytes instead of a message.
    """

    largest_bytes: int | None = None
    deadline_s: float | None = None
    parse: Callable[[bytes], Any] | None = None
    writes_bytes: bool = False


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Stands between the bytes of a call and its handler. One per server, behind the gate."""

    def __init__(
        self,
        rules: Mapping[str, CallRule] | None = None,
        *,
        ordinary: CallRule = CallRule(),
        process: str = "server",
        unavailable: Mapping[type[Exception], str] | None = None,
        in_flight: Callable[[str], AbstractContextManager[None]] | None = None,
        on_malformed: Callable[[], None] = lambda: None,
    ) -> None:
        """rules: by the name of the call, such as "Append"; `ordinary` holds for all others.

        process: whose log has the number of an unforeseen error.
        unavailable: errors of what a handler depends on, each with its name.
        in_flight: what to enter, by name, around each call of a service of the project; calls overlap in it.
        on_malformed: called for each request that ends as INVALID_ARGUMENT.
        """
        self._rules, self._ordinary, self._process = rules or {}, ordinary, process
        self._unavailable, self._in_flight = unavailable or {}, in_flight
        self._on_malformed = on_malformed
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = self._guard(handler, method)
        return self._guarded[method]

    def _guard(self, handler: Handler, method: str) -> Handler:
        name = method.rpartition("/")[2]
        rule = self._rules.get(name, self._ordinary)
        parse = rule.parse or handler.request_deserializer
        serialise = None if rule.writes_bytes else handler.response_serializer
        read = partial(read_request, name, parse, largest_bytes=rule.largest_bytes)
        if handler.unary_unary is not None:
            call = self._unary(name, read, handler.unary_unary, rule)
            if self._in_flight is not None and method.startswith(_OURS):
                call = _counted(call, self._in_flight(name))
            return grpc.unary_unary_rpc_method_handler(call, response_serializer=serialise)
        if handler.unary_stream is not None:
            replies = self._replies(name, handler.unary_stream, read, rule)
            return grpc.unary_stream_rpc_method_handler(replies, response_serializer=serialise)
        if handler.stream_stream is not None:
            streamed = handler.stream_stream
            serve = self._replies if inspect.isasyncgenfunction(streamed) else self._written
            stream = serve(name, streamed, lambda requests: _each(read, requests), rule)
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=serialise)
        raise NotImplementedError(f"{method}: a stream of requests with one reply is not used here")

    def _unary(self, name: str, read: Callable[[bytes], Any], body: Body, rule: CallRule) -> Body:
        async def call(data: bytes, context: Context) -> Any:
            request = None
            try:
                request = read(data)
                if rule.deadline_s is None:
                    return await body(request, context)
                async with asyncio.timeout(rule.deadline_s):
                    return await body(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - each has a status
                await self._abort(context, name, rule, error, request)

        return call

    def _replies(self, name: str, body: Any, read: Callable[[Any], Any], rule: CallRule) -> Any:
        """A handler that yields its replies."""

        async def generate(given: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for reply in body(read(given), context):
                    yield reply
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - each has a status
                await self._abort(context, name, rule, error)

        return generate

    def _written(self, name: str, body: Any, read: Callable[[Any], Any], rule: CallRule) -> Any:
        """A handler that writes its replies to the context."""

        async def call(given: Any, context: Context) -> None:
            try:
                await body(read(given), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - each has a status
                await self._abort(context, name, rule, error)

        return call

    async def _abort(
        self, context: Context, name: str, rule: CallRule, error: Exception, request: Any = None
    ) -> NoReturn:
        code, text = self._status(name, rule, error, request)
        await context.abort(code, text)
        raise AssertionError("an aborted call goes on")

    def _status(
        self, name: str, rule: CallRule, error: Exception, request: Any
    ) -> tuple[grpc.StatusCode, str]:
        match error:
            case Malformed():
                self._on_malformed()
                return grpc.StatusCode.INVALID_ARGUMENT, str(error)
            case Refused():
                return grpc.StatusCode.FAILED_PRECONDITION, f"{name}: {error}"
            case NotImplementedError():
                return grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here"
            case Absent():
                return grpc.StatusCode.NOT_FOUND, str(error)
            case TimeoutError() if rule.deadline_s is not None:
                text = f"{name}: no answer within {rule.deadline_s:g} s; send it again"
                return grpc.StatusCode.DEADLINE_EXCEEDED, text
        for kind, what in self._unavailable.items():
            if isinstance(error, kind):
                log.warning("%s: %s does not answer: %s", name, what, error, extra=_about(request))
                return grpc.StatusCode.UNAVAILABLE, f"{name}: {what} does not answer; send it again"
        number = secrets.token_hex(4)
        log.error("%s failed", name, exc_info=error, extra={"request_id": number, **_about(request)})
        return grpc.StatusCode.INTERNAL, f"{name} failed; request id {number} in the {self._process}'s log"


def read_request(
    name: str, parse: Callable[[bytes], Any] | None, data: bytes, largest_bytes: int | None = None
) -> Any:
    """Return the request of call `name` that `parse` reads from `data`, or `data` without a parser."""
    if largest_bytes is not None and len(data) > largest_bytes:
        raise Malformed(f"{name}: message of {len(data)} bytes, at most {largest_bytes}; send less at once")
    if parse is None:
        return data
    try:
        return parse(data)
    except Unfit as error:
        raise Malformed(str(error)) from error
    except DecodeError as error:
        text = f"{name}: {len(data)} bytes that are no {name}Request; check the protocol version"
        raise Malformed(text) from error


async def _each(read: Callable[[bytes], Any], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield read(data)


def _counted(call: Body, in_flight: AbstractContextManager[None]) -> Body:
    async def counted(data: bytes, context: Context) -> Any:
        with in_flight:
            return await call(data, context)

    return counted


def _about(request: Any) -> dict[str, int | str]:
    session, own = getattr(request, "session", 0), getattr(request, "request_id", "")
    return ({"session": session} if session else {}) | ({"client_request_id": own} if own else {})
