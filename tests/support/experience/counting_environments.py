"""Environments whose every observation says where it comes from, and what a learner must be told of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.protocol import spaces as wire

OBSERVATION = wire.Box(np.full(3, -1e6, np.float32), np.full(3, 1e6, np.float32))
NESTED = wire.Dict((("count", OBSERVATION), ("pair", wire.Tuple((wire.Discrete(1000), OBSERVATION)))))
LENGTHS = (3, 1, 4, 2)
"""The n-th episode of slot s ends after LENGTHS[(n + s) % 4] steps; odd episodes are truncated."""


class Counting(gymnasium.Env[Any, Any]):
    """Observes (slot, episode, step); the reward of step k is 100 · episode + k + 1."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    action_space = spaces.Discrete(2)

    def __init__(self, slot: int, *, nested: bool = False) -> None:
        box = spaces.Box(-1e6, 1e6, (3,), np.float32)
        pair = spaces.Tuple((spaces.Discrete(1000), box))
        self.observation_space: Any = spaces.Dict(count=box, pair=pair) if nested else box
        self._slot, self._nested = slot, nested
        self._episode, self._step = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode; a seed begins with the first."""
        super().reset(seed=seed)
        self._episode = 0 if seed is not None else self._episode + 1
        self._step = 0
        return self._observe(), {"note": 1.0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count; the action changes nothing."""
        self._step += 1
        over = self._step == LENGTHS[(self._episode + self._slot) % len(LENGTHS)]
        truncated = over and self._episode % 2 == 1
        reward = 100.0 * self._episode + self._step
        return self._observe(), reward, over and not truncated, truncated, {"note": 2.0}

    def _observe(self) -> Any:
        count = np.array((self._slot, self._episode, self._step), np.float32)
        if not self._nested:
            return count
        return {"count": count, "pair": (np.int64(self._step), count + 0.5)}


def vector(mode: AutoresetMode, slots: int, *, nested: bool = False) -> SyncVectorEnv[Any, Any]:
    factories = [lambda slot=slot: Counting(slot, nested=nested) for slot in range(slots)]
    return SyncVectorEnv(factories, copy=False, autoreset_mode=mode)


@dataclass(frozen=True, slots=True)
class Transition:
    """What one step of experience is.

    Observed (episode, step), reward, end, next observed (episode, step).
    """

    observed: tuple[int, int]
    reward: float
    terminated: bool
    truncated: bool
    following: tuple[int, int]


def transitions(slot: int) -> Iterator[Transition]:
    episode = 0
    while True:
        length = LENGTHS[(episode + slot) % len(LENGTHS)]
        for step in range(length):
            over, odd = step + 1 == length, episode % 2 == 1
            reward = 100.0 * episode + step + 1
            yield Transition((episode, step), reward, over and not odd, over and odd, (episode, step + 1))
        episode += 1
