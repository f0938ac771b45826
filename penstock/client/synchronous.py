"""The client for code without an event loop: one connection, used by any number of threads.

Every call returns or raises within `deadline_s`: a PolicyError (`penstock.client.errors`), or ValueError for
a value that the spaces do not allow. Closing the client ends the calls of other threads with Unreachable.
"""

from collections.abc import Iterable
from typing import Any, Self, Unpack

from penstock.client import calls
from penstock.client.connection import PLAINTEXT, Connection
from penstock.client.values import Action, ActionBatch, ActOptions, Description, EpisodeResult, StepOptions
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials


class PolicyClient:
    """Gives the actions of one policy; see the package for an example. Also a context manager.

    It connects when it is first used.

    Args:
        address: HOST:PORT or unix:/path; plaintext beyond loopback only with `Credentials(insecure=True)`.
        credentials: certificates and token; default: none, for loopback and unix sockets.
        policy: name of the policy.
        deadline_s: of every call, with all its repetitions, in seconds.

    Raises:
        ValueError: the address is malformed, or plaintext was not asked for.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = PLAINTEXT,
        policy: str = "default",
        deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        self._connection = Connection(address, credentials, policy, deadline_s)

    def describe(self) -> Description:
        """Return spaces, versions and limits, as they are now."""
        return self._connection.do(calls.describe(self._connection.policy))

    def act(self, observation: Any, **options: Unpack[ActOptions]) -> Action:
        """Return the action for one observation, in the form of the action space: array, dict or tuple.

        Options: `client_key`, `deterministic`, `seed`, `version`, `distribution`, `value`, `mask`, `state`;
        see ActOptions.
        """
        return self._connection.ask(lambda codec: codec.act(observation, options))

    def act_batch(self, observations: Any, **options: Unpack[ActOptions]) -> ActionBatch:
        """Return the actions for B observations, each leaf with a leading axis of B; options as for `act`."""
        return self._connection.ask(lambda codec: codec.act_batch(observations, options))

    def start_episode(self, client_key: str = "", *, learned: bool = True) -> "Episode":
        """Begin an episode; with `learned=False` the system does not learn from it."""
        return Episode(
            self._connection, self._connection.do(calls.start(self._connection.policy, client_key, learned))
        )

    def reward(self, episode_id: str, rewards: Iterable[tuple[int | None, float]], *, request_id: str) -> int:
        """Add to the rewards of an episode that another process may have begun, as (step, amount).

        request_id: the caller's own; under the same one nothing is added twice, even by another process.
        Returns how many rewards were too late to be learned from.
        """
        return self._connection.do(calls.reward(episode_id, rewards, request_id))

    def close(self) -> None:
        """Close the connection; the server gives open episodes up after a while."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the client."""
        self.close()


class Episode:
    """An episode that has begun, for one caller, one step at a time.

    Its methods raise EpisodeUnknown or EpisodeElsewhere where it cannot go on. After DeadlinePassed or
    Unreachable it is unknown whether the step arrived: `act` then asks for the same step again, and
    InvalidRequest says that it did.
    """

    def __init__(self, connection: Connection, started: calls.Started) -> None:
        self.episode_id, self.arm, self.learned = started.episode_id, started.arm, started.learned
        self._connection = connection
        self._step = 0

    def act(self, observation: Any, **options: Unpack[StepOptions]) -> Action:
        """Return the action of the next step.

        Options: `reward` (of the step before), `taken_action`, `taken_log_prob`, `deterministic`, `seed`,
        `distribution`, `value`, `mask`; see StepOptions.
        """
        action = self._connection.ask(
            lambda codec: codec.step(self.episode_id, self._step, observation, options)
        )
        self._step = action.step + 1
        return action

    def reward(self, amount: float, step: int | None = None) -> int:
        """Add to the reward of a step, None: the newest.

        Returns 1 when it was too late to be learned from, else 0.
        """
        return self.rewards([(step, amount)])

    def rewards(self, rewards: Iterable[tuple[int | None, float]]) -> int:
        """Add to the rewards of steps, as (step, amount).

        Returns how many of them were too late to be learned from.
        """
        return self._connection.do(calls.reward(self.episode_id, rewards))

    def end(
        self,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final_observation: Any = None,
        reward: float | None = None,
    ) -> EpisodeResult:
        """End the episode: it terminated, or it was truncated from outside.

        Then `final_observation` is needed.

        `reward`: of the last step.
        """
        return self._connection.ask(
            lambda codec: codec.end(
                self.episode_id,
                terminated=terminated,
                truncated=truncated,
                final_observation=final_observation,
                reward=reward,
            )
        )

    def abandon(self) -> EpisodeResult:
        """End the episode without the outcome of its last step; the steps before it are learned from."""
        return self._connection.do(calls.abandon(self.episode_id))
