"""What every call passes before anything of it is parsed: who calls, may they, and not too much.

    bytes ─► identity (certificate or token) ─► run ─► table (`access`) ─► rate limits ─► parse ─► handler
               UNAUTHENTICATED         PERMISSION_DENIED           RESOURCE_EXHAUSTED

A token is looked at before the message is even received. On plaintext callers have no identity; the rate
limits hold all the same. They hold for the caller's name; where several share a certificate or a token, or
show none, for the connection (on a unix socket connections cannot be told apart, so there is no limit).
Replies that are not read yet count by connection and by name.
The caller is `identity.CALLER` while a handler runs.
"""

import asyncio
import inspect
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final, NoReturn

import grpc

from penstock.protocol.limits import KIB, MAX_MESSAGE_BYTES, MIB
from penstock.rpc.auth import NO_CALLS, AcceptedTokens, Calls, Proof, may_call
from penstock.rpc.identity import CALLER, Identity, Unidentified, from_alternative_names

# ---- How much one caller may ask of a server: calls and bytes per second, as two token buckets.

MAX_DELAY_S: Final = 1.0
MAX_CALLERS: Final = 4096
MAX_UNREAD_BYTES: Final = 4 * MIB
"""Most bytes of replies that may be unread on a connection: the server has to keep them, more than once."""
MAX_CALLER_UNREAD_BYTES: Final = 32 * MIB
"""The same on all connections of a caller: each of the actors of a machine waits for one chunk of weights."""
MAX_ALL_UNREAD_BYTES: Final = 256 * MIB
"""The same of all callers together. Replies up to SMALL_BYTES are sent all the same."""
SMALL_BYTES: Final = 4 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Limits what each caller may ask for in a second. settings: that say so, for refusals."""

    calls: float
    bytes: float
    settings: str = "broker.max_calls_per_s, broker.max_bytes_per_s"


class Exceeded(Exception):
    """The caller has to wait longer than a call is held; the message says for what and how long."""


@dataclass(slots=True)
class _Bucket:
    """What is left; below zero when later seconds are spent already."""

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
        """Count a reply as unread until what is returned is called.

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
Admit = Callable[[Context, int], tuple[str | None, float]]
"""Says under whose limits a call of so many bytes comes, and the seconds it waits for its turn.

Raises Denied. It is no coroutine: most calls wait for nothing, and each await costs a call something.
"""
Deny = Callable[[Context, "Denied"], Awaitable[NoReturn]]
"""Aborts a call."""

_ALTERNATIVE_NAMES: Final = "x509_subject_alternative_name"
_COMPLAIN_EVERY_S: Final = 1.0


class Denied(Exception):
    """A call that is not served: status, label of the metric, and text for the caller."""

    def __init__(self, code: grpc.StatusCode, label: str, text: str) -> None:
        super().__init__(text)
        self.code, self.label = code, label


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Checks every call before anything of it is parsed. One per server, before all other interceptors."""

    def __init__(
        self,
        *,
        proof: Proof,
        run: str,
        limits: RateLimits,
        tokens: AcceptedTokens | None = None,
        on_denied: Callable[[str], None] = lambda _label: None,
        calls: Calls = NO_CALLS,
    ) -> None:
        """Make a gate; raises ValueError where callers prove themselves by tokens and none are accepted."""
        if proof is Proof.TOKEN and tokens is None:
            raise ValueError("proof=TOKEN: name the accepted tokens")
        self._proof, self._run, self._limits, self._tokens = proof, run, limits, tokens
        self._on_denied, self._calls = on_denied, calls
        self._gated: dict[str, Handler] = {}
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
        if method not in self._gated:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            deny = partial(self._deny, method)
            self._gated[method] = _gated(handler, partial(self._admit, method), deny, self._limits)
        return self._gated[method]

    def _admit(self, method: str, context: Context, size: int) -> tuple[str | None, float]:
        """Be an `Admit` for one method."""
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


def _unauthenticated(text: str) -> Denied:
    return Denied(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", text)


def _gated(handler: Handler, admit: Admit, deny: Deny, limits: RateLimits) -> Handler:
    """A handler of the same kind that checks first. Unary requests are parsed behind the check."""
    if handler.request_streaming or handler.response_streaming:
        return _gated_stream(handler, admit, deny, limits)
    parse, inner = handler.request_deserializer, handler.unary_unary

    async def call(raw: bytes, context: Context) -> Any:
        try:
            payer, delay_s = admit(context, len(raw))
        except Denied as denied:
            await deny(context, denied)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        reply = await inner(parse(raw) if parse else raw, context)
        if payer is not None:
            size = len(reply) if isinstance(reply, bytes) else reply.ByteSize()
            limits.charge(payer, size)
            await _keep(context, limits, payer, size)
        return reply

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=handler.response_serializer)


async def _keep(context: Context, limits: RateLimits, payer: str, size: int) -> None:
    """Count the reply until it has left; aborts the call of a caller that reads nothing."""
    try:
        was_read = limits.keep(payer, str(context.peer()), size)
    except Exceeded as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    else:
        context.add_done_callback(lambda _context: was_read())


async def _paid(
    messages: AsyncIterator[Any], payer: str, limits: RateLimits, context: Context
) -> AsyncIterator[Any]:
    """The messages of a stream, each a call under its caller's limits."""
    async for message in messages:
        try:
            delay_s = limits.reserve(payer, len(message) if isinstance(message, bytes) else 0)
        except Exceeded as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        yield message


def _gated_stream(handler: Handler, admit: Admit, deny: Deny, limits: RateLimits) -> Handler:
    """Streams are checked when they begin; each of their messages is paid for."""
    streams = handler.request_streaming
    request_kind = "stream" if handler.request_streaming else "unary"
    response_kind = "stream" if handler.response_streaming else "unary"
    kind = f"{request_kind}_{response_kind}"
    inner = getattr(handler, kind)

    async def checked(request: Any, context: Context) -> Any:
        try:
            payer, delay_s = admit(context, 0)
        except Denied as denied:
            await deny(context, denied)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        return request if payer is None or not streams else _paid(request, payer, limits, context)

    async def call(request: Any, context: Context) -> Any:
        return await inner(await checked(request, context), context)

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        async for reply in inner(await checked(request, context), context):
            yield reply

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        generate if inspect.isasyncgenfunction(inner) else call,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


# ---- What a call that failed says: whether to repeat it, and in which words to tell of it.

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
    """Return whether a safe call is sent again: it may not have been heard, or may be heard later."""
    return code_of(error) in _REPEATABLE and not is_too_large(error)
