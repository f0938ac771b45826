"""`Traces-v0`: a log of tasks as an environment."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.traces.answers import Encoding, answers
from penstock.workloads.goals.traces.trace_index import Log, shared_log
from penstock.workloads.goals.traces.trace_line import RewardWeights, Trace


class TraceReplay(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Plays logged episodes in random order; an episode is a logged one and never goes across two.

    Observation: as `penstock.workloads.goals.traces.answers` says. `info["mode"]` marks every step with the
    mode; `info["known"]` says whether the log knew what became of the action.

    Args:
        trace_file: the log.
        mode: `matched`, `full` or `model`; `penstock.workloads.goals.traces.answers` says what they mean.
        reward: weights of the reward, by the names of `RewardWeights`.
        numbers, actions: names in the order of the vectors; empty: those of the log, sorted.
        max_episode_length: episodes are cut after so many steps; 0: where the log ends.

    Raises:
        ConfigurationError: an argument that does not fit, or a log that lacks what the mode needs.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

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
        self._encoding = encoding_of(log, tuple(numbers), tuple(actions))
        self._answers = answers(mode, log, self._encoding, RewardWeights.of(reward or {}))
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
        reply = self._answers(trace, self._observe(), int(action), float(self.np_random.random()))
        at_end = self._step + 1 == len(self._episode)
        if not at_end and reply.known:
            self._step += 1
        unknown = not reply.known and len(self._episode) > 1
        cut = unknown or (not at_end and self._step == self._longest)
        return (
            self._observe(),
            reply.reward,
            at_end and not unknown,
            cut,
            {"mode": self._mode, "known": reply.known},
        )

    def _observe(self) -> NDArray[np.float32]:
        before = self._episode[self._step - 1].result if self._step else None
        return self._encoding.observation(self._episode[self._step], before)


def encoding_of(log: Log, numbers: tuple[str, ...], actions: tuple[str, ...]) -> Encoding:
    encoding = Encoding(numbers or log.numbers, actions or log.actions)
    for key, absent in (
        ("numbers", set(encoding.numbers) - set(log.numbers)),
        ("actions", set(log.actions) - set(encoding.actions)),
    ):
        if absent:
            raise ConfigurationError(
                f"environment.kwargs.{key}: {', '.join(sorted(absent))}: the log and the names differ; "
                f"it has numbers {', '.join(log.numbers)} and actions {', '.join(log.actions)}"
            )
    return encoding
