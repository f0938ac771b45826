"""`Traces-v0`: a log of tasks as an environment, with three declared modes.

The modes differ in the reward of an action that is not the logged one:

    matched   The reward of another action is unknown. In a log of independent decisions a logged action is
              accepted with probability c / propensity, c the smallest propensity of the log, and earns its
              reward / c; any other earns 0. So the expected reward of every action is the true one
              (Li et al. 2011). In a log of longer episodes another action ends the episode.
    full      `metadata.outcomes` of every line has the result of every action.
    model     A reward model that is fitted on the log predicts the reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.off_policy import ridge, standardised
from penstock.workloads.goals.trace_index import (
    Encoding,
    Log,
    Result,
    RewardWeights,
    Trace,
    shared_log,
)


class TraceReplay(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Plays logged episodes in random order.

    Observation: that of `Encoding`. `info["mode"]` is the mode; `info["known"]` says whether the log has the
    result of the action.

    Args:
        trace_file: the log.
        mode: `matched`, `full` or `model`, as the module says.
        reward: weights of the reward, by the names of `RewardWeights`.
        numbers, actions: names in the order of the vectors; empty: those of the log, sorted.
        max_episode_length: episodes are cut after so many steps; 0: where the log ends.

    Raises:
        ConfigurationError: an argument that does not fit, or a log that lacks what the mode needs.
    """

    def __init__(
        self,
        trace_file: str = "",
        mode: str = "matched",
        reward: dict[str, float] | None = None,
        numbers: tuple[str, ...] = (),
        actions: tuple[str, ...] = (),
        max_episode_length: int = 0,
    ) -> None:
        if not trace_file:
            raise ConfigurationError("environment.kwargs.trace_file: is missing; name the log")
        log = shared_log(Path(trace_file))
        if mode == "matched" and log.independent:
            log = _with_propensities(log)
        self._encoding = _encoding_of(log.encoding, tuple(numbers), tuple(actions))
        self._reward = reward_function(mode, log, self._encoding, RewardWeights.of(reward or {}))
        self._episodes, self._mode, self._longest = log.episodes, mode, max_episode_length
        self.observation_space = spaces.Box(-1e12, 1e12, (self._encoding.width,), np.float32)
        self.action_space = spaces.Discrete(len(self._encoding.actions))
        self._episode: tuple[Trace, ...] = ()
        self._step = 0
        self._order: list[int] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin the next episode; each is played once before any is played again."""
        super().reset(seed=seed)
        if seed is not None or not self._order:
            self._order = self.np_random.permutation(len(self._episodes)).tolist()
        self._episode, self._step = self._episodes[self._order.pop()], 0
        return self._observe(), {"mode": self._mode}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        trace = self._episode[self._step]
        reward = self._reward(trace, self._observe(), int(action), float(self.np_random.random()))
        known, at_end = reward is not None, self._step + 1 == len(self._episode)
        if known and not at_end:
            self._step += 1
        unknown = not known and len(self._episode) > 1
        cut = unknown or (not at_end and self._step == self._longest)
        info = {"mode": self._mode, "known": known}
        return self._observe(), reward or 0.0, at_end and not unknown, cut, info

    def _observe(self) -> NDArray[np.float32]:
        before = self._episode[self._step - 1].result if self._step else None
        return self._encoding.observation(self._episode[self._step], before)


def _with_propensities(log: Log) -> Log:
    """Return the decisions that have a propensity; raises ConfigurationError where none has one."""
    known = tuple(episode for episode in log.episodes if episode[0].propensity is not None)
    if not known:
        raise ConfigurationError(
            "environment.kwargs.mode='matched': no decision has a propensity, by which logged actions are "
            "accepted; log it, or use mode='model'"
        )
    return replace(log, episodes=known)


def _encoding_of(logged: Encoding, numbers: tuple[str, ...], actions: tuple[str, ...]) -> Encoding:
    encoding = Encoding(numbers or logged.numbers, actions or logged.actions)
    for key, absent in (
        ("numbers", set(encoding.numbers) - set(logged.numbers)),
        ("actions", set(logged.actions) - set(encoding.actions)),
    ):
        if absent:
            raise ConfigurationError(
                f"environment.kwargs.{key}: {', '.join(sorted(absent))}: the log and the names differ; "
                f"it has numbers {', '.join(logged.numbers)} and actions {', '.join(logged.actions)}"
            )
    return encoding


# ---- The modes.

RewardFunction = Callable[[Trace, NDArray[np.float32], int, float], float | None]
"""(decision of the log, observation, float32 [width], action, uniform draw in [0, 1)) → reward.

None: the log does not have the result of the action, and the episode cannot continue.
"""


def reward_function(mode: str, log: Log, encoding: Encoding, weights: RewardWeights) -> RewardFunction:
    """Return the rewards of a mode; raises ConfigurationError where the log does not have what it needs."""
    match mode:
        case "matched":
            return _accepted(log, encoding, weights) if log.independent else _matched(encoding, weights)
        case "full":
            return _full(log, encoding, weights)
        case "model":
            return _modelled(log, encoding, weights)
        case _:
            raise ConfigurationError(f"environment.kwargs.mode={mode!r}: must be one of matched, full, model")


def _matched(encoding: Encoding, weights: RewardWeights) -> RewardFunction:
    def reply(trace: Trace, _seen: NDArray[np.float32], action: int, _draw: float) -> float | None:
        return weights.reward(trace.result) if encoding.action(trace.action) == action else None

    return reply


def _accepted(log: Log, encoding: Encoding, weights: RewardWeights) -> RewardFunction:
    least = min(one.propensity or 1.0 for one in log.traces)

    def reply(trace: Trace, _seen: NDArray[np.float32], action: int, draw: float) -> float | None:
        if encoding.action(trace.action) != action or draw >= least / (trace.propensity or 1.0):
            return None
        return weights.reward(trace.result) / least

    return reply


def _full(log: Log, encoding: Encoding, weights: RewardWeights) -> RewardFunction:
    if not log.independent:
        raise ConfigurationError(
            "environment.kwargs.mode='full': the log has episodes of several decisions, and not the "
            "decisions after another action; use 'matched' or 'model'"
        )
    rewards = {trace.episode: _outcomes(trace, encoding.actions, weights) for trace in log.traces}
    return lambda trace, _seen, action, _draw: rewards[trace.episode][action]


def _outcomes(trace: Trace, actions: Sequence[str], weights: RewardWeights) -> list[float]:
    outcomes: Any = trace.metadata.get("outcomes")
    try:
        return [weights.reward(Result.model_validate(outcomes[name])) for name in actions]
    except (KeyError, TypeError, ValidationError) as error:
        raise ConfigurationError(
            f"environment.kwargs.mode='full': episode {trace.episode!r}: metadata.outcomes must have the "
            f"result of each of {', '.join(actions)}: {str(error)[:200]}"
        ) from error


def _modelled(log: Log, encoding: Encoding, weights: RewardWeights) -> RewardFunction:
    seen = encoding.episodes(log.episodes).astype(np.float64)
    action = np.array([encoding.action(trace.action) for trace in log.traces])
    reward = np.array([weights.reward(trace.result) for trace in log.traces])
    inputs_of, overall = standardised(seen), float(reward.mean())
    inputs = inputs_of(seen)
    fits = [
        ridge(inputs[rows], reward[rows], overall)
        for rows in (action == one for one in range(len(encoding.actions)))
    ]

    def reply(_trace: Trace, seen: NDArray[np.float32], action: int, _draw: float) -> float:
        level, slope = fits[action]
        return level + float(slope @ inputs_of(seen.astype(np.float64)))

    return reply
