"""The checks of every call before its handler, and the statuses of errors: one interceptor for all servers.

    bytes ─► identity (certificate or token) ─► run ─► table (`auth.ACCESS`) ─► rate limits
               UNAUTHENTICATED         PERMISSION_DENIED           RESOURCE_EXHAUSTED
          ─► size ─► parse ─► handler ─► reply
             INVALID_ARGUMENT  └─ what it raises ─► a status

A token is looked at before the message is even received. On plaintext callers have no identity; the rate
limits hold all the same. They hold for the caller's name; where several share a certificate or a token, or
show none, for the connection (on a unix socket connections cannot be told apart, so there is no limit).
Replies that are not read yet count by connection and by name. The caller is `identity.CALLER` while a
handler runs.

No text of an unforeseen exception leaves the process. The standard services (health, reflection) stand behind
the same gate: without it they would answer bytes that are no message with a traceback.
"""

import asyncio
import inspect
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from penstock.protocol.limits import KIB, MAX_MESSAGE_BYTES, MIB
from penstock.protocol.refusal import Refused, Unfit
from penstock.rpc.auth import NO_CALLS, AcceptedTokens, Calls, Proof, may_call
from penstock.rpc.identity import CALLER, Identity, Unidentified, from_alternative_names

# ---- Rate limits of a caller: calls and bytes per second, as two token buckets.

MAX_DELAY_S: Final = 1.0
MAX_CALLERS: Final = 4096
MAX_UNREAD_BYTES: Final = 4 * MIB
"""Most bytes of unread replies on a connection: the server has to keep them, more than once."""
MAX_CALLER_UNREAD_BYTES: Final = 32 * MIB
"""The same on all connections of a caller: each of the actors of a machine waits for one chunk of weights."""
MAX_ALL_UNREAD_BYTES: Final = 256 * MIB
"""The same of all callers together. Replies up to SMALL_BYTES are sent all the same."""
SMALL_BYTES: Final = 4 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Limits of each caller per second. settings: their names, for refusals."""

    calls: float
    bytes: float
    settings: str = "broker.max_calls_per_s, broker.max_bytes_per_s"


class Exceeded(Exception):
    """The caller must wait longer than a call is held; the message says for what and how long."""


@dataclass(slots=True)
class _Bucket:
    """The remaining calls and bytes; below zero when later seconds are spent already."""

    calls: float
    bytes: float
    filled_s: float


class RateLimits:
    """Holds the buckets of every caller. For one event loop."""

    def __init__(self, rates: Rates, clock: Callable[[], float] = monotonic) -> None:
        self._rates = rates
        self._most_bytes = max(rates.bytes, 2.0 * MAX_MESSAGE_BYTES)
        self._most_calls = max(rates.calls, 1.0)
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._unread: Counter[str | tuple[str, str]] = Counter()
        """By caller, and by caller and connection."""
        self._all_unread = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def reserve(self, caller: str, size: int) -> float:
        """Return the seconds to wait before a call of `size` bytes is served."""
        bucket = self._bucket(caller)
        delay = max((1 - bucket.calls) / self._rates.calls, (size - bucket.bytes) / self._rates.bytes, 0.0)
        if delay > MAX_DELAY_S:
            raise Exceeded(
                f"more than {self._rates.calls:g} calls or {self._rates.bytes:g} bytes a second "
                f"({self._rates.settings}): wait {delay:.1f} s"
            )
        bucket.calls -= 1
        bucket.bytes -= size
        return delay

    def charge(self, caller: str, size: int) -> None:
        """Take the bytes of a reply that was sent to the caller; later calls wait for them."""
        self._bucket(caller).bytes -= size

    def keep(self, caller: str, connection: str, size: int) -> Callable[[], None]:
        """Count a reply as unread until the returned function is called.

        caller, connection: whom it goes to, and on which connection. size: in bytes. Raises Exceeded for one
        too many.
        """
        line = (caller, connection)
        for key, most in ((line, MAX_UNREAD_BYTES), (caller, MAX_CALLER_UNREAD_BYTES)):
            mine = self._unread[key]
            if mine and mine + size > most:
                raise Exceeded(f"{mine} bytes of earlier replies are not read yet; read them first")
        if size > SMALL_BYTES and self._all_unread + size > MAX_ALL_UNREAD_BYTES:
            raise Exceeded(f"{self._all_unread} bytes of replies to all callers are not read yet; come again")
        for key in (line, caller):
            self._unread[key] += size
        self._all_unread += size

        def was_read() -> None:
            self._all_unread -= size
            for key in (line, caller):
                self._unread[key] -= size
                if not self._unread[key]:
                    del self._unread[key]

        return was_read

    def _bucket(self, caller: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.pop(caller, None)
        if bucket is None:
            bucket = _Bucket(self._most_calls, self._most_bytes, now)
            while len(self._buckets) >= MAX_CALLERS:
                self._buckets.popitem(last=False)
        passed, bucket.filled_s = now - bucket.filled_s, now
        bucket.calls = min(self._most_calls, bucket.calls + passed * self._rates.calls)
        bucket.bytes = min(self._most_bytes, bucket.bytes + passed * self._rates.bytes)
        self._buckets[caller] = bucket
        return bucket


log = logging.getLogger(__name__)

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""
Handler = Any
Body = Callable[[Any, Context], Awaitable[Any]]

_ALTERNATIVE_NAMES: Final = "x509_subject_alternative_name"
_COMPLAIN_EVERY_S: Final = 1.0
_OURS: Final = "/penstock.v1."


class Malformed(ValueError):
    """A request that breaks the contract; the message names field, value and remedy."""


class Absent(LookupError):
    """The requested thing does not exist, or no longer."""


class Denied(Exception):
    """A call that is not served: status, label of the metric, and text for the caller."""

    def __init__(self, code: grpc.StatusCode, label: str, text: str) -> None:
        super().__init__(text)
        self.code, self.label = code, label


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Says how the calls of a server are read, and what the errors of their handlers mean.

    rules: by the name of the call, such as "Append"; `ordinary` holds for all others.
    process: whose log has the number of an unforeseen error.
    unavailable: errors of what a handler depends on, each with its name.
    in_flight: what to enter, by name, around each call of a service of the project; calls overlap in it.
    on_malformed: called for each request that ends as INVALID_ARGUMENT.
    """

    rules: Mapping[str, CallRule] = field(default_factory=dict)
    ordinary: CallRule = CallRule()
    process: str = "server"
    unavailable: Mapping[type[Exception], str] = field(default_factory=dict)
    in_flight: Callable[[str], AbstractContextManager[None]] | None = None
    on_malformed: Callable[[], None] = lambda: None

    def rule(self, name: str) -> CallRule:
        return self.rules.get(name, self.ordinary)

    def status(self, name: str, error: Exception, request: Any) -> tuple[grpc.StatusCode, str]:
        """Return the status of a call whose handler raised `error`, and the text for its caller."""
        deadline_s = self.rule(name).deadline_s
        match error:
            case Malformed():
                self.on_malformed()
                return grpc.StatusCode.INVALID_ARGUMENT, str(error)
            case Refused():
                return grpc.StatusCode.FAILED_PRECONDITION, f"{name}: {error}"
            case NotImplementedError():
                return grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here"
            case Absent():
                return grpc.StatusCode.NOT_FOUND, str(error)
            case TimeoutError() if deadline_s is not None:
                text = f"{name}: no answer within {deadline_s:g} s; send it again"
                return grpc.StatusCode.DEADLINE_EXCEEDED, text
        for kind, what in self.unavailable.items():
            if isinstance(error, kind):
                log.warning("%s: %s does not answer: %s", name, what, error, extra=_about(request))
                return grpc.StatusCode.UNAVAILABLE, f"{name}: {what} does not answer; send it again"
        number = secrets.token_hex(4)
        log.error("%s failed", name, exc_info=error, extra={"request_id": number, **_about(request)})
        return grpc.StatusCode.INTERNAL, f"{name} failed; request id {number} in the {self.process}'s log"


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Stands between the bytes of a call and its handler. One per server, before all other interceptors."""

    def __init__(
        self,
        boundary: Boundary,
        limits: RateLimits,
        *,
        proof: Proof = Proof.NOTHING,
        run: str = "",
        tokens: AcceptedTokens | None = None,
        on_denied: Callable[[str], None] = lambda _label: None,
        calls: Calls = NO_CALLS,
    ) -> None:
        """Make a gate; raises ValueError where callers prove themselves by tokens and none are accepted."""
        if proof is Proof.TOKEN and tokens is None:
            raise ValueError("proof=TOKEN: name the accepted tokens")
        self._boundary, self._limits = boundary, limits
        self._proof, self._run, self._tokens = proof, run, tokens
        self._on_denied, self._calls = on_denied, calls
        self._guarded: dict[str, Handler] = {}
        self._complained_s = -_COMPLAIN_EVERY_S

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if self._proof is Proof.TOKEN:
            try:
                self._by_token(handler_call_details.invocation_metadata)
            except Unidentified as error:
                why = _unauthenticated(str(error))

                async def refuse(_requests: Any, context: Context) -> None:
                    await self._deny(method, context, why)

                return grpc.stream_stream_rpc_method_handler(refuse)  # it reads nothing of the message
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = self._guard(handler, method)
        return self._guarded[method]

    def _guard(self, handler: Handler, method: str) -> Handler:
        """Return a handler of the same kind, of bytes, that checks first."""
        name = method.rpartition("/")[2]
        rule = self._boundary.rule(name)
        read = partial(
            read_request, name, rule.parse or handler.request_deserializer, largest_bytes=rule.largest_bytes
        )
        serialise = None if rule.writes_bytes else handler.response_serializer
        if handler.unary_unary is not None:
            call = self._unary(method, read, handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(call, response_serializer=serialise)
        if handler.unary_stream is not None:
            stream = self._stream(method, read, handler.unary_stream, reads_stream=False)
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=serialise)
        if handler.stream_stream is not None:
            stream = self._stream(method, read, handler.stream_stream, reads_stream=True)
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=serialise)
        raise NotImplementedError(f"{method}: a stream of requests with one reply is not used here")

    def _unary(self, method: str, read: Callable[[bytes], Any], body: Body) -> Body:
        name, limits = method.rpartition("/")[2], self._limits
        deadline_s, enter = self._boundary.rule(name).deadline_s, self._boundary.in_flight
        in_flight = enter(name) if enter is not None and method.startswith(_OURS) else nullcontext()

        async def call(data: bytes, context: Context) -> Any:
            try:
                payer, delay_s = self._admit(method, context, len(data))
            except Denied as denied:
                await self._deny(method, context, denied)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            request = None
            with in_flight:
                try:
                    request = read(data)
                    if deadline_s is None:
                        reply = await body(request, context)
                    else:
                        async with asyncio.timeout(deadline_s):
                            reply = await body(request, context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001 - each has a status
                    await self._abort(context, name, error, request)
            if payer is not None:
                size = len(reply) if isinstance(reply, bytes) else reply.ByteSize()
                limits.charge(payer, size)
                await _keep(context, limits, payer, size)
            return reply

        return call

    def _stream(self, method: str, read: Callable[[bytes], Any], body: Any, *, reads_stream: bool) -> Any:
        """Return a handler that yields its replies or writes them to the context, as `body` does.

        A stream is checked when it begins; each of its messages counts against the limits.
        """
        name = method.rpartition("/")[2]

        async def begin(given: Any, context: Context) -> Any:
            try:
                payer, delay_s = self._admit(method, context, 0)
            except Denied as denied:
                await self._deny(method, context, denied)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            return self._requests(given, read, payer, context) if reads_stream else read(given)

        async def write(given: Any, context: Context) -> None:
            try:
                await body(await begin(given, context), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - each has a status
                await self._abort(context, name, error)

        async def generate(given: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for reply in body(await begin(given, context), context):
                    yield reply
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - each has a status
                await self._abort(context, name, error)

        return generate if inspect.isasyncgenfunction(body) else write

    async def _requests(
        self,
        messages: AsyncIterator[bytes],
        read: Callable[[bytes], Any],
        payer: str | None,
        context: Context,
    ) -> AsyncIterator[Any]:
        """Yield the requests of a stream, each a call under its caller's limits."""
        async for data in messages:
            if payer is not None:
                try:
                    delay_s = self._limits.reserve(payer, len(data))
                except Exceeded as error:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
            yield read(data)

    def _admit(self, method: str, context: Context, size: int) -> tuple[str | None, float]:
        """Return whose limits a call of so many bytes counts under, and the seconds it waits for its turn.

        Raises Denied. It is no coroutine: most calls wait for nothing, and each await costs a call something.
        """
        try:
            caller: Identity | None = None
            if self._proof is Proof.TOKEN:
                caller = self._by_token(context.invocation_metadata())
            elif self._proof is Proof.CERTIFICATE:
                caller = from_alternative_names(context.auth_context().get(_ALTERNATIVE_NAMES, ()))
            if caller is not None:
                self._allow(caller, method)
                CALLER.set(caller)
            # Whose limits count: the name's, else the connection's; nobody's where connections look alike.
            payer = str(caller) if caller is not None and caller.name else str(context.peer())
            if payer.startswith("unix"):
                return None, 0.0
            return payer, self._limits.reserve(payer, size)
        except Unidentified as error:
            raise _unauthenticated(str(error)) from error
        except Exceeded as error:
            raise Denied(grpc.StatusCode.RESOURCE_EXHAUSTED, "budget", str(error)) from error

    def _by_token(self, metadata: Any) -> Identity:
        shown = [value for key, value in metadata or () if key == "authorization"]
        if self._tokens is None or len(shown) != 1 or not isinstance(shown[0], str):
            raise Unidentified("send one token: `authorization: Bearer …` (security.token_file)")
        return self._tokens.identify(shown[0])

    def _allow(self, caller: Identity, method: str) -> None:
        if caller.run != self._run:
            text = f"{caller} is of run {caller.run!r}; here run {self._run!r} is served"
            raise Denied(grpc.StatusCode.PERMISSION_DENIED, "denied", text)
        if not may_call(caller.party, method, self._calls):
            text = f"{caller}: the party {caller.party} may not call {method}"
            raise Denied(grpc.StatusCode.PERMISSION_DENIED, "denied", text)

    async def _deny(self, method: str, context: Context, denied: Denied) -> NoReturn:
        self._on_denied(denied.label)
        now = time.monotonic()
        if now - self._complained_s >= _COMPLAIN_EVERY_S:
            self._complained_s = now
            fields = {"method": method, "peer": context.peer(), "reason": denied.label, "why": str(denied)}
            log.warning("call denied", extra=fields)
        await context.abort(denied.code, str(denied))
        raise AssertionError("a denied call was not aborted")

    async def _abort(self, context: Context, name: str, error: Exception, request: Any = None) -> NoReturn:
        await context.abort(*self._boundary.status(name, error, request))
        raise AssertionError("an aborted call continues")


def _unauthenticated(text: str) -> Denied:
    return Denied(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", text)


async def _keep(context: Context, limits: RateLimits, payer: str, size: int) -> None:
    """Count the reply until it has left; aborts the call of a caller that reads nothing."""
    try:
        was_read = limits.keep(payer, str(context.peer()), size)
    except Exceeded as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    else:
        context.add_done_callback(lambda _context: was_read())


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


def _about(request: Any) -> dict[str, int | str]:
    session, own = getattr(request, "session", 0), getattr(request, "request_id", "")
    return ({"session": session} if session else {}) | ({"client_request_id": own} if own else {})


# ---- Errors of calls, as a client sees them: whether to repeat the call, and the text for a message.

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
    code = code_of(error)
    return str(error) if code is None else f"{code.name}: {error.details()}"  # type: ignore[attr-defined]


def is_too_large(error: Exception) -> bool:
    return _TOO_LARGE in text_of(error)


def is_repeatable(error: Exception) -> bool:
    """Return whether a call that is safe to repeat is sent again after this error."""
    return code_of(error) in _REPEATABLE and not is_too_large(error)
