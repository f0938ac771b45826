"""The policy server as an injector uses it: what it would do, what was done instead, what that earned.

Each decision asks twice. The first Act has no episode: it draws an action and tells the probabilities of
all. The second is the step of the episode, with what the gate has let through and the probability of that.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.client import PolicyClient, PolicyError
from penstock.client.errors import EpisodeElsewhere, EpisodeUnknown, InvalidRequest, NotAllowed
from penstock.client.synchronous import Episode
from penstock.config.configuration_error import ConfigurationError
from penstock.protocol.spaces import Box, Discrete

_PROBABILITY: Final = "probability"
_FINAL: Final = (InvalidRequest, NotAllowed, EpisodeElsewhere, EpisodeUnknown)
"""Refusals that no repetition changes."""


class Unanswered(Exception):
    """There is no answer of a version of the policy now; nothing was done."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What the policy would do. chances: μ, float64 [A]. value: the critic's, None where it has none."""

    action: int
    chances: NDArray[np.float64]
    value: float | None
    version: int


class AskedPolicy:
    """One policy for one host; begins episodes as they are needed."""

    def __init__(self, client: PolicyClient, client_key: str, width: int, goals: tuple[str, ...]) -> None:
        """width: numbers of an observation. goals: in the order of the actions behind *nothing*."""
        self._client, self._key = client, client_key
        self._width, self._goals = width, goals
        self._episode: Episode | None = None
        self.step = 0

    @property
    def episode_id(self) -> str:
        return self._episode.episode_id if self._episode else ""

    def _check(self) -> None:
        """Raise ConfigurationError where the policy does not fit the goals; PolicyError as a client does."""
        width, goals = self._width, self._goals
        told = self._client.describe()
        seen, done = told.observation_space, told.action_space
        fits = (
            isinstance(seen, Box)
            and seen.shape == (width,)
            and isinstance(done, Discrete)
            and (done.n, done.start) == (len(goals) + 1, 0)
        )
        if not fits:
            raise ConfigurationError(
                f"--server: its policy sees {seen} and does {done}; these goals need {width} numbers and "
                f"{len(goals) + 1} actions (nothing, {', '.join(goals)}): serve a policy that was "
                "trained with them"
            )
        if told.chooses_by_value:
            raise ConfigurationError(
                "--server: its policy chooses by the values of actions (DQN), whose probabilities say how it "
                "explores, not how sure it is; serve it with --set serving.softmax_temperature=0.2, by which "
                "it draws from a softmax of its values, or one that was trained with algorithm.name=ppo"
            )

    def begin(self) -> None:
        """Begin an episode where none is open; ConfigurationError: the policy does not fit the goals."""
        if self._episode is not None:
            return
        try:
            self._check()
            self._episode, self.step = self._client.start_episode(self._key), 0
        except InvalidRequest as error:
            # It would be refused at each interval, for as long as nobody looks.
            raise ConfigurationError(f"--server: refuses what it is asked: {error!s:.300}") from error

    def suggest(self, observation: NDArray[np.float32]) -> Suggestion:
        """Ask what the policy would do at float32 [width]; raises Unanswered where a fallback answered."""
        told = self._client.act(observation, client_key=self._key, distribution=True, value=True)
        if told.fallback is not None or not told.version:
            raise Unanswered("no version of the policy answers yet; a fallback did")
        chances = np.asarray(_of_action(told.distribution), np.float64).ravel()
        value = None if told.value is None or not np.isfinite(told.value) else float(told.value)
        return Suggestion(int(told.action), chances / chances.sum(), value, told.version)

    def tell_step(
        self,
        observation: NDArray[np.float32],
        action: int,
        log_prob: float | None,
        reward: float | None = None,
    ) -> None:
        """Tell what is done. log_prob: None: not learned from. PolicyError: the episode is given up."""
        assert self._episode is not None
        try:
            self._episode.act(observation, taken_action=action, taken_log_prob=log_prob, reward=reward)
        except PolicyError:
            self.give_up()
            raise
        self.step += 1

    def tell_reward(self, episode: str, step: int, amount: float, request_id: str) -> bool:
        """Tell what a step earned, at most once. PolicyError: try again; False: it is never taken."""
        try:
            self._client.reward(episode, [(step, amount)], request_id=request_id)
        except _FINAL:
            return False
        return True

    def end(self, observation: NDArray[np.float32]) -> None:
        """Cut the episode at an observation, float32 [width]; PolicyError: it is given up."""
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.end(truncated=True, final_observation=observation)

    def give_up(self) -> None:
        """Go on with another episode; the server abandons this one when it hears no more of it."""
        self._episode = None


def _of_action(distribution: Any) -> Any:
    for name, array in distribution.items():
        if name.rpartition("/")[2] == _PROBABILITY:
            return array
    raise ConfigurationError("--server: its policy gives no probabilities; it must choose one of n")
