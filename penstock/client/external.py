"""Play an environment in this process with a policy in a server.

An episode that the server no longer has (it was restarted, or another one answers) is abandoned, and another
begun from a fresh reset: the steps of the abandoned episode are counted nowhere.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Protocol

from penstock.client.errors import EpisodeElsewhere, EpisodeUnknown, PolicyError
from penstock.client.synchronous import Episode, PolicyClient

_MOST_ABANDONED: Final = 3
"""Most episodes abandoned in a row; then the error goes to the caller."""


class Environment(Protocol):
    """The methods of an environment, as Gymnasium and others have them."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, Any]:
        """Return the first observation, and any further value."""

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, Any]:
        """Return observation, reward, terminated, truncated, and any further value."""


class ExternalEnvironment:
    """Plays episodes with one client."""

    def __init__(
        self, client: PolicyClient, *, client_key: str = "", learned: bool = True, deterministic: bool = False
    ) -> None:
        self._client, self._client_key = client, client_key
        self._learned, self._deterministic = learned, deterministic

    def run(self, environment: Environment, episodes: int, *, seed: int | None = None) -> Iterator[float]:
        """Yield the return of each episode, as it ends. `seed`: of the first reset.

        Raises PolicyError where the server cannot be used, and any error that the environment raises.
        """
        played, abandoned = 0, 0
        observation, _ = environment.reset() if seed is None else environment.reset(seed=seed)
        while played < episodes:
            try:
                total_return = self._play(environment, observation)
            except (EpisodeUnknown, EpisodeElsewhere):
                abandoned += 1
                if abandoned >= _MOST_ABANDONED:
                    raise
            else:
                played, abandoned = played + 1, 0
                yield total_return
            if played < episodes:
                observation, _ = environment.reset()

    def _play(self, environment: Environment, observation: Any) -> float:
        """Play one episode from its first observation to its end.

        Returns its return as the server added it up.
        """
        episode = self._client.start_episode(self._client_key, learned=self._learned)
        try:
            return self._play_to_the_end(environment, episode, observation)
        except PolicyError:
            raise
        except BaseException:
            # The environment failed: its last step teaches nothing, and the server need not wait for more.
            with suppress(PolicyError):
                episode.abandon()
            raise

    def _play_to_the_end(self, environment: Environment, episode: Episode, observation: Any) -> float:
        reward, terminated, truncated = None, False, False
        while not (terminated or truncated):
            action = episode.act(observation, reward=reward, deterministic=self._deterministic)
            observation, earned, terminated, truncated, _ = environment.step(action.action)
            reward = float(earned)
        result = episode.end(
            terminated=bool(terminated),
            truncated=bool(truncated),
            final_observation=observation,
            reward=reward,
        )
        return result.total_return
