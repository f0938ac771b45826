"""Many requests in flight over one call: `ActStream`.

    act ─► waiting[request_id] = future ─► queue ─► gRPC writes in this order
                       ▲                                     │ any order
                       └────────── one task reads ◄──────────┘

A request's deadline and OVERLOADED are as for a call of its own; after silence it is not sent again, as the
order of the stream would hold the repetition behind the first. When the stream ends, for whatever reason,
every waiting and every later request gets Unreachable (NotAllowed where the server says so): open another
stream. A reply whose request is no longer waiting is dropped.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self, TypeVar, Unpack

import grpc

from penstock.client.attempts import Attempts
from penstock.client.calls import Call, Codec
from penstock.client.connection import AsyncConnection
from penstock.client.errors import DeadlinePassed, NotAllowed, PolicyError, Unreachable, from_status
from penstock.client.values import Action, ActionBatch, ActOptions
from penstock.v1 import policy_pb2 as pb

T = TypeVar("T")


class ActStream:
    """Sends many requests over one call; `AsyncPolicyClient.act_stream` makes it, in a running loop.

    It is also an async context manager.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[pb.ActRequest | None] = asyncio.Queue()
        self._waiting: dict[str, asyncio.Future[pb.ActReply]] = {}
        self._ended: str | None = None
        self._failure: type[PolicyError] = Unreachable
        self._call = connection.stub.ActStream(self._requests())
        self._reading = asyncio.create_task(self._read(), name="act-stream")

    async def act(self, observation: Any, **options: Unpack[ActOptions]) -> Action:
        """Return the action for one observation, as `AsyncPolicyClient.act` does."""
        return await self.ask(lambda codec: codec.act(observation, options))

    async def act_batch(self, observations: Any, **options: Unpack[ActOptions]) -> ActionBatch:
        """Return the actions for B observations, as `AsyncPolicyClient.act_batch` does."""
        return await self.ask(lambda codec: codec.act_batch(observations, options))

    async def ask(self, build: Callable[[Codec], Call[T]]) -> T:
        """Return the result of the Act that `build` makes with the spaces."""
        return await self._connection.ask(build, self._attempt)

    async def aclose(self) -> None:
        """Cancel the stream; requests that still wait get Unreachable."""
        self._end("closed")
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def __aenter__(self) -> Self:
        """Return the stream."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the stream."""
        await self.aclose()

    async def _attempt(self, call: Call[T], attempts: Attempts) -> T:
        if self._ended is not None:
            raise self._error()
        request_id = call.request.request_id
        reply = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(call.request)
        try:
            async with asyncio.timeout(attempts.left_s()):
                return call.result(await reply)
        except TimeoutError as error:
            raise DeadlinePassed(
                f"no reply to {request_id} from {self._connection.address} in time"
            ) from error
        finally:
            del self._waiting[request_id]

    async def _requests(self) -> AsyncIterator[pb.ActRequest]:
        while (request := await self._queue.get()) is not None:
            yield request

    async def _read(self) -> None:
        try:
            async for reply in self._call:
                future = self._waiting.get(reply.request_id)
                if future is not None and not future.done():
                    future.set_result(reply)
            self._end("the server ended it")
        except grpc.RpcError as error:
            failure = from_status(self._connection.address, error)
            self._failure = NotAllowed if isinstance(failure, NotAllowed) else Unreachable
            self._end(str(failure))
        finally:
            self._end("closed")

    def _end(self, why: str) -> None:
        """End the stream for good: cancel the call, stop its writer, fail all waiting requests."""
        if self._ended is not None:
            return
        self._ended = why
        self._call.cancel()
        self._queue.put_nowait(None)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._error())

    def _error(self) -> PolicyError:
        return self._failure(f"the stream to {self._connection.address} is over: {self._ended}")
