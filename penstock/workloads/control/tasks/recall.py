"""Recall: the smallest task that needs a memory (after the T-maze of Bakker 2002)."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Vector = NDArray[np.float32]


class Recall(gymnasium.Env[Vector, np.int64]):
    """A cue, one of `cues`, is shown once.

    After `delay` steps at most, and half as many at least, it is asked for.

    Observation: float32 [cues + 1], the cue as a one-hot code in the first step only, and 1 at the end when
    it is asked for. Only the action of the last step counts: 1 for the cue, 0 else. The optimum is 1; a
    policy that cannot remember gets 1 / cues, for the question looks the same after every cue.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, cues: int = 4, delay: int = 12) -> None:
        self.observation_space = spaces.Box(0, 1, (cues + 1,), np.float32)
        self.action_space = spaces.Discrete(cues)
        self._cues, self._delay = cues, delay
        self._cue = self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        self._cue = int(self.np_random.integers(self._cues))
        self._left = int(self.np_random.integers(self._delay // 2, self._delay + 1))
        return self._observe(self._cue), {}

    def step(self, action: np.int64) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        """action: the cue, where it is asked for; else it does not matter."""
        if self._left == 0:
            return self._observe(), float(action == self._cue), True, False, {}
        self._left -= 1
        return self._observe(self._cues if self._left == 0 else None), 0.0, False, False, {}

    def _observe(self, shown: int | None = None) -> Vector:
        observation = np.zeros(self._cues + 1, np.float32)
        if shown is not None:
            observation[shown] = 1
        return observation
