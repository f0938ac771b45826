"""Limits of steps, and lives, over a vector environment that resets rows of `options["reset_mask"]` alone."""

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

Vector = VectorEnv[Any, Any, Any]
Wrapper = VectorWrapper[Any, Any, Any, Any, Any]
Result = tuple[Any, Any, Any, Any, dict[str, Any]]


class StepLimit(Wrapper):
    """Truncates an episode after `limit` steps, also where it terminates with the last of them."""

    def __init__(self, env: Vector, limit: int) -> None:
        super().__init__(env)
        self._limit = limit
        self._steps = np.zeros(env.num_envs, np.int64)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps[chosen(options, self.num_envs)] = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Result:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        self._steps += 1
        return observation, reward, terminated, truncated | (self._steps >= self._limit), infos


class EpisodicLife(Wrapper):
    """A lost life, of `infos["lives"]` int [N], terminates the episode only (Mnih et al. 2015)."""

    def __init__(self, env: Vector) -> None:
        super().__init__(env)
        self._lives = np.zeros(env.num_envs, np.int64)
        self._is_over = np.ones(env.num_envs, np.bool_)
        self._shown: tuple[Any, dict[str, Any]] = (None, {})

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new games, in those of `reset_mask` only where one is over."""
        begins = chosen(options, self.num_envs)
        if options is not None and "reset_mask" in options:
            begins = begins & self._is_over
            if not begins.any():
                return self._shown
            options = {**options, "reset_mask": begins}
        observation, infos = self.env.reset(seed=seed, options=options)
        self._lives[begins] = infos["lives"][begins]
        return observation, infos

    def step(self, actions: Any) -> Result:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        lives = infos["lives"]
        self._is_over = terminated | truncated
        is_lost = (lives < self._lives) & (lives > 0)
        self._lives[:] = lives
        self._shown = observation, infos
        return observation, reward, terminated | is_lost, truncated, infos


def chosen(options: dict[str, Any] | None, count: int) -> NDArray[np.bool_]:
    """Return which of `count` environments a reset is of, bool [count]: those of `reset_mask`, else all."""
    if options is None or "reset_mask" not in options:
        return np.ones(count, np.bool_)
    return np.array(options["reset_mask"], np.bool_)
