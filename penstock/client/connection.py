"""One connection to one policy, for threads and for an event loop.

Where an observation, a request or a reply does not fit the spaces, the spaces are read again for the next
call: the server may serve another run now.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

import grpc

from penstock.client import calls
from penstock.client.calls import Call, Codec, checked_text
from penstock.client.errors import BadReply, DeadlinePassed, InvalidRequest, Overloaded, typed
from penstock.client.text_calls import Generation, TextPart
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_async_channel, open_channel
from penstock.rpc.gate import code_of, is_repeatable
from penstock.runtime.retry import Interrupted, full_jitter, retry, retry_async

_LEAST_S: Final = 0.001
"""An attempt begins only with at least this much time left, in seconds."""


class Attempts:
    """The attempts of one call; its time begins with this object.

    deadline_s: for all attempts together, in seconds. share: largest share of the deadline for one attempt.
    reach_s: seconds for which a call tries an unreachable server again.
    """

    def __init__(self, deadline_s: float, share: float = 0.5, reach_s: float = math.inf) -> None:
        self._deadline_s, self._longest_s = deadline_s, share * deadline_s
        self._ends_s = time.monotonic() + deadline_s
        self._reached_by_s = time.monotonic() + reach_s
        self._last: Exception | None = None

    def left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    def timeout_s(self) -> float:
        """Return the seconds for one more attempt; without time left, raise the error of the last one."""
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
        for jitter_s in full_jitter(cap_s=1.0):
            yield _retry_after_s(self._last) + jitter_s


def _retry_after_s(error: Exception | None) -> float:
    refusal = error.refusal if isinstance(error, Overloaded) else None
    return refusal.retry_after_ms / 1000 if refusal else 0.0


T = TypeVar("T")
PLAINTEXT: Final = Credentials()
"""Credentials for loopback and unix sockets, where plaintext is allowed."""
_PERHAPS_OTHER_SPACES: Final = (InvalidRequest, BadReply, ValueError)


class Connection:
    """A connection that any number of threads may use. stub: of the service that is called."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        policy: str,
        deadline_s: float,
        stub: Callable[[Any], Any],
    ) -> None:
        self.policy, self.address, self.deadline_s = checked_text("policy", policy), address, deadline_s
        self._channel = open_channel(address, credentials)
        self.stub = stub(self._channel)
        self._closed = threading.Event()
        self._learning = threading.Lock()
        self._codec: Codec | None = None

    def ask(self, build: Callable[[Codec], Call[T]]) -> T:
        """Return the result of the call that `build` makes with the spaces."""
        attempts = Attempts(self.deadline_s)
        try:
            return self.do(build(self._learned(attempts)), attempts)
        except _PERHAPS_OTHER_SPACES:
            self._codec = None
            raise

    def do(self, call: Call[T], attempts: Attempts | None = None) -> T:
        attempts = attempts or Attempts(self.deadline_s, call.share)
        with typed(self.address):
            return retry(
                lambda: self._attempt(call, attempts),
                retryable=attempts.is_worth_another,
                stop=self._closed,
                give_up_s=attempts.left_s(),
                delays=attempts.delays(),
            )

    def close(self) -> None:
        self._closed.set()
        self._channel.close()

    def _attempt(self, call: Call[T], attempts: Attempts) -> T:
        try:
            reply = getattr(self.stub, call.method)(call.request, timeout=attempts.timeout_s())
        except ValueError as error:  # how a channel says that it was closed just now
            if self._closed.is_set():
                raise Interrupted from error
            raise
        return call.result(reply)

    def _learned(self, attempts: Attempts) -> Codec:
        with self._learning:
            if self._codec is None:
                self._codec = Codec(self.policy, self.do(calls.describe(self.policy), attempts))
            return self._codec


class Way(Protocol):
    """Makes one attempt: as a single call, or over a stream."""

    async def __call__(self, call: Call[T], attempts: Attempts) -> T:
        """Return the result; raises a PolicyError, or an error that `is_worth_another` judges."""


class AsyncConnection:
    """A connection that any number of tasks of one loop may use.

    stub: of the service that is called. reach_s: as that of `Attempts`.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        policy: str,
        deadline_s: float,
        stub: Callable[[Any], Any],
        reach_s: float = math.inf,
    ) -> None:
        self.policy, self.address, self.deadline_s = checked_text("policy", policy), address, deadline_s
        self._reach_s = reach_s
        self._channel = open_async_channel(address, credentials)
        self.stub = stub(self._channel)
        self._closed = asyncio.Event()
        self._learning = asyncio.Lock()
        self._codec: Codec | None = None

    async def ask(self, build: Callable[[Codec], Call[T]], way: Way | None = None) -> T:
        """Return the result of the call that `build` makes with the spaces."""
        attempts = Attempts(self.deadline_s, reach_s=self._reach_s)
        try:
            return await self.do(build(await self._learned(attempts)), attempts, way)
        except _PERHAPS_OTHER_SPACES:
            self._codec = None
            raise

    async def do(self, call: Call[T], attempts: Attempts | None = None, way: Way | None = None) -> T:
        attempts = attempts or Attempts(self.deadline_s, call.share, self._reach_s)
        attempt = way or self._attempt
        with typed(self.address):
            return await retry_async(
                lambda: attempt(call, attempts),
                retryable=attempts.is_worth_another,
                stop=self._closed,
                give_up_s=attempts.left_s(),
                delays=attempts.delays(),
            )

    async def close(self) -> None:
        self._closed.set()
        await self._channel.close(None)

    async def _attempt(self, call: Call[T], attempts: Attempts) -> T:
        try:
            reply = await getattr(self.stub, call.method)(call.request, timeout=attempts.timeout_s())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed.is_set() and not (task and task.cancelling()):
                raise Interrupted from None  # closing the channel cancels its calls
            raise
        return call.result(reply)

    async def _learned(self, attempts: Attempts) -> Codec:
        async with self._learning:
            if self._codec is None:
                self._codec = Codec(self.policy, await self.do(calls.describe(self.policy), attempts))
            return self._codec


class GrowingAnswers:
    """A call whose answers come in parts; closing it ends them."""

    def __init__(self, connection: Connection | AsyncConnection, call: Call[Generation]) -> None:
        self._address, self._call = connection.address, call
        self._stream: Any = connection.stub.GenerateStream(call.request, timeout=connection.deadline_s)
        self.result: Generation | None = None
        """The whole answers; None until the last part has arrived."""

    def close(self) -> None:
        """End the answers."""
        self._stream.cancel()

    def _part(self, chunk: Any) -> TextPart | None:
        """Return the part of a message; None for the last message, which holds the result."""
        if chunk.HasField("reply"):
            self.result = self._call.result(chunk.reply)
            return None
        return TextPart(index=chunk.index, text=chunk.text)
