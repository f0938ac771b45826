"""`Prompts-v0`: an environment in which five mutations improve a prompt."""

import math
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.prompts.embeddings import WIDTH
from penstock.workloads.prompts.features import MUTATION_TYPES, mutate, offered
from penstock.workloads.prompts.task_parts import parts_of

gymnasium.register("Prompts-v0", f"{__name__}:PromptTask")

LENGTH: Final = 5
"""Steps of an episode."""

Observation = NDArray[np.float32]


class PromptTask(gymnasium.Env[Observation, np.int64]):
    """An episode begins with a prompt, and each action mutates its text. It ends after five steps.

    Observation: the embedding of the text, float32 [1536]. `info` has the text as `prompt`, and the offered
    mutations as `action_mask`, int8 [5]: none that would make a long prompt longer. The mask is applied where
    `environment.mask_key = "action_mask"`.

    Args:
        prompts: `builtin`, or `chatterbot` (extra `data`).
        split: `train`, or `test`: prompts on other subjects.
        embedding: `hashing`, or `http`: those of a server.
        reward: `quality`, or `ratings`: people's ratings over HTTP; such a task has no actors.
        reward_source: a source of scores instead of `reward`: `module:function`, `http(s)://…`,
            `grpc://HOST:PORT`, `unix:/path`.
        human_check_every: a person checks one of so many scores of that source, over HTTP; 0: none.
        embedding_url, embedding_model, embedding_key_file: of the server, its model and the key, for `http`.

    Raises:
        ConfigurationError: an invalid argument, which it names.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, **task: Any) -> None:
        self._parts = parts_of(task)
        self.observation_space = spaces.Box(-1.0, 1.0, (WIDTH,), np.float32)
        self.action_space = spaces.Discrete(len(MUTATION_TYPES))
        self._start = self._prompt = ""
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._start, _ = self._parts.source.draw(self.np_random)
        self._prompt, self._step = self._start, 0
        return self._observe()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """action: number of a mutation. The fifth step terminates the episode."""
        before, self._prompt = self._prompt, mutate(self._prompt, int(action))
        earned = self._earned(before)
        self._step += 1
        observation, info = self._observe()
        return observation, earned, self._step == LENGTH, False, info

    def _earned(self, before: str) -> float:
        reward = self._parts.reward
        if reward is not None and not self._parts.needs_people:
            return reward.of(self._start, before, self._prompt)
        if self._step:
            raise ConfigurationError(
                "environment.kwargs: an actor has no people who rate its prompts or check its rewards; they "
                "do so over HTTP (`penstock gateway prompts`), without actors"
            )
        # The evaluator of a run without actors takes this one step, to check the environment.
        return math.nan

    def close(self) -> None:
        self._parts.close()

    def _observe(self) -> tuple[Observation, dict[str, Any]]:
        info = {"prompt": self._prompt, "action_mask": np.array(offered(self._prompt), np.int8)}
        return self._parts.embedder.embed([self._prompt])[0], info
