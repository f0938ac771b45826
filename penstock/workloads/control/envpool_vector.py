"""EnvPool's environments as one vector of N whose resets are left to the caller.

By itself EnvPool resets with the step after an end, which would be a row without experience, and says of an
episode that terminates with the last step of its limit that it was truncated. So its limit lies beyond the
one that is meant, `StepLimit` truncates, and ended environments are reset at once. EnvPool fixes seeds when
environments are made: a reset with seeds makes them anew. Each step gives arrays of its own, which no later
one writes into.
"""

from typing import Any, Final

import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from penstock.config.settings import EnvironmentSection
from penstock.workloads.control import atari
from penstock.workloads.control.envpool_tasks import (
    longest,
    module,
    options_of,
    spaces,
    task_of,
    without_warnings_of_bounds,
)
from penstock.workloads.control.vector_rules import StepLimit, Vector, chosen

_SEED_BITS: Final = 2**31 - 1


def make(section: EnvironmentSection, count: int) -> Vector:
    """Return `count` environments as one; they are made by the first `reset`.

    Raises ConfigurationError where EnvPool is absent, does not have the id, or does not take an argument.
    """
    observation, action = spaces(section)
    pool: Vector = Pool(task_of(section), count, options_of(section), observation, action)
    if atari.is_atari(section.id):
        return atari.with_rules(section, pool)
    limit = longest(section)
    return pool if limit is None else StepLimit(pool, limit)


class Pool(VectorEnv[Any, Any, Any]):
    """EnvPool's own environments under Gymnasium's autoreset mode DISABLED."""

    metadata: dict[str, Any] = {  # noqa: RUF012 - Gymnasium declares it so
        "autoreset_mode": AutoresetMode.DISABLED,
        "seeds": "each",
    }

    def __init__(
        self,
        task: str,
        count: int,
        options: dict[str, Any],
        observation: gym_spaces.Space[Any],
        action: gym_spaces.Space[Any],
    ) -> None:
        self.num_envs = count
        self._task, self._options = task, options
        self._pool: Any = None
        self._shown: Any = None
        self.single_observation_space, self.single_action_space = observation, action
        self.observation_space = batch_space(observation, count)
        self.action_space = batch_space(action, count)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Make all anew from `seed`, one for each; or reset those of `reset_mask`, and give all rows.

        Infos of rows that were not reset are zeros.
        """
        if options is None or "reset_mask" not in options:
            self._begin(seed)
            with without_warnings_of_bounds():
                shown, infos = self._pool.reset()
            self._shown = _told(self.single_observation_space, shown)
            return self._shown, infos
        slots = chosen(options, self.num_envs).nonzero()[0].astype(np.int32)
        first, infos = self._pool.reset(slots)
        told = _told(self.single_observation_space, first)
        self._shown = _replaced(self._shown, told, slots)
        arrays = {key: rows for key, rows in infos.items() if isinstance(rows, np.ndarray)}
        return self._shown, {key: _among(rows, slots, self.num_envs) for key, rows in arrays.items()}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Make one step of each."""
        shown, reward, terminated, truncated, infos = self._pool.step(np.asarray(actions))
        self._shown = _told(self.single_observation_space, shown)
        return self._shown, reward, terminated, truncated, infos

    def close(self, **_: Any) -> None:
        """End the threads."""
        self._pool = None

    def _begin(self, seed: Any) -> None:
        if seed is None:
            seed = np.random.SeedSequence().generate_state(self.num_envs)
        elif np.ndim(seed) == 0:
            seed = range(int(seed), int(seed) + self.num_envs)
        # What it takes as a seed is int32, and its games read a negative one as the time of day.
        seeds = [int(one) & _SEED_BITS for one in seed]
        self._pool = None  # the threads of the one before end first
        self._pool = module().make_gymnasium(self._task, num_envs=self.num_envs, seed=seeds, **self._options)


def _told(space: gym_spaces.Space[Any], rows: Any) -> Any:
    """Return rows [N, ...] of observations in the shape and dtype of their space."""
    if isinstance(space, gym_spaces.Dict):
        return {key: _told(part, rows[key]) for key, part in space.items()}
    return rows.astype(space.dtype, copy=False).reshape(len(rows), *(space.shape or ()))


def _replaced(rows: Any, first: Any, slots: NDArray[np.int32]) -> Any:
    if isinstance(rows, dict):
        return {key: _replaced(part, first[key], slots) for key, part in rows.items()}
    changed = rows.copy()
    changed[slots] = first
    return changed


def _among(rows: Any, slots: NDArray[np.int32], count: int) -> Any:
    every = np.zeros((count, *rows.shape[1:]), rows.dtype)
    every[slots] = rows
    return every
