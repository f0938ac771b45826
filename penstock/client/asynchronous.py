"""The client for an event loop: the same calls, shared by any number of tasks of one loop.

The contract of `penstock.client.synchronous` holds here too; cancelling a task cancels its call.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Self, TypeVar, Unpack

import grpc

from penstock.client import calls
from penstock.client.calls import Call, Codec
from penstock.client.connection import PLAINTEXT, AsyncConnection, Attempts
from penstock.client.errors import DeadlinePassed, NotAllowed, PolicyError, Unreachable, from_status
from penstock.client.values import Action, ActionBatch, ActOptions, Description, EpisodeResult, StepOptions
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials
from penstock.v1 import policy_pb2 as pb

# ---- Many requests in flight over one call: `ActStream`.

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


class AsyncPolicyClient:
    """Gives the actions of one policy to tasks of an event loop, as `PolicyClient` does to threads.

    Make it where the loop runs; it is also an async context manager.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = PLAINTEXT,
        policy: str = "default",
        deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        self._connection = AsyncConnection(address, credentials, policy, deadline_s)

    async def describe(self) -> Description:
        """Return spaces, versions and limits, as they are now."""
        return await self._connection.do(calls.describe(self._connection.policy))

    async def act(self, observation: Any, **options: Unpack[ActOptions]) -> Action:
        """Return the action for one observation, as `PolicyClient.act` does."""
        return await self._connection.ask(lambda codec: codec.act(observation, options))

    async def act_batch(self, observations: Any, **options: Unpack[ActOptions]) -> ActionBatch:
        """Return the actions for B observations, as `PolicyClient.act_batch` does."""
        return await self._connection.ask(lambda codec: codec.act_batch(observations, options))

    def act_stream(self) -> ActStream:
        """Open one call for many requests in flight; close it, or use it as a context manager."""
        return ActStream(self._connection)

    async def start_episode(self, client_key: str = "", *, learned: bool = True) -> "AsyncEpisode":
        """Begin an episode, as `PolicyClient.start_episode` does."""
        started = await self._connection.do(calls.start(self._connection.policy, client_key, learned))
        return AsyncEpisode(self._connection, started)

    async def close(self) -> None:
        """Close the connection and its streams; the server gives open episodes up after a while."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the client."""
        await self.close()


class AsyncEpisode:
    """An episode for tasks of an event loop, as `Episode` is for threads."""

    def __init__(self, connection: AsyncConnection, started: calls.Started) -> None:
        self.episode_id, self.arm, self.learned = started.episode_id, started.arm, started.learned
        self._connection = connection
        self._step = 0

    async def act(
        self, observation: Any, *, stream: ActStream | None = None, **options: Unpack[StepOptions]
    ) -> Action:
        """Return the action of the next step, as `Episode.act` does; over `stream` where one is given."""
        way = stream or self._connection
        action = await way.ask(lambda codec: codec.step(self.episode_id, self._step, observation, options))
        self._step = action.step + 1
        return action

    async def reward(self, amount: float, step: int | None = None) -> int:
        """Add to the reward of a step, as `Episode.reward` does."""
        return await self.rewards([(step, amount)])

    async def rewards(self, rewards: Iterable[tuple[int | None, float]]) -> int:
        """Add to the rewards of steps, as `Episode.rewards` does."""
        return await self._connection.do(calls.reward(self.episode_id, rewards))

    async def end(
        self,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final_observation: Any = None,
        reward: float | None = None,
    ) -> EpisodeResult:
        """End the episode, as `Episode.end` does."""
        return await self._connection.ask(
            lambda codec: codec.end(
                self.episode_id,
                terminated=terminated,
                truncated=truncated,
                final_observation=final_observation,
                reward=reward,
            )
        )

    async def abandon(self) -> EpisodeResult:
        """Abandon the episode, as `Episode.abandon` does."""
        return await self._connection.do(calls.abandon(self.episode_id))
