"""The client for an event loop: the same calls, shared by any number of tasks of one loop.

The contract of `penstock.client.synchronous` holds here too; cancelling a task cancels its call.
"""

from collections.abc import Iterable
from typing import Any, Self, Unpack

from penstock.client import calls
from penstock.client.connection import PLAINTEXT, AsyncConnection
from penstock.client.stream import ActStream
from penstock.client.values import Action, ActionBatch, ActOptions, Description, EpisodeResult, StepOptions
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials


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
