"""Catch (Mnih et al. 2014; bsuite, Osband et al. 2020): the smallest task that needs eyes."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Image = NDArray[np.uint8]
_BRIGHT = 255


class Catch(gymnasium.Env[Image, np.int64]):
    """A ball falls from a random column of the top row, and a paddle in the bottom row catches it.

    Actions: the paddle goes left, stays or goes right.
    Observation: uint8 [rows, columns], ball and paddle bright. The reward comes with the last step, when the
    ball is in the bottom row: 1 caught, −1 missed. The optimum is 1 from every start, since
    rows ≥ columns / 2 + 1 steps suffice; a policy that does not look catches one ball in `columns`, so that
    its returns have the mean 2 / columns − 1.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, rows: int = 10, columns: int = 10) -> None:
        self.observation_space = spaces.Box(0, _BRIGHT, (rows, columns), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._rows, self._columns = rows, columns
        self._row = self._ball = self._paddle = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Image, dict[str, Any]]:
        super().reset(seed=seed)
        self._row, self._ball = 0, int(self.np_random.integers(self._columns))
        self._paddle = self._columns // 2
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        """action: 0 left, 1 stay, 2 right."""
        self._row += 1
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self._columns - 1)
        is_over = self._row == self._rows - 1
        reward = (1.0 if self._paddle == self._ball else -1.0) if is_over else 0.0
        return self._observe(), reward, is_over, False, {}

    def _observe(self) -> Image:
        image = np.zeros((self._rows, self._columns), np.uint8)
        image[self._row, self._ball] = image[-1, self._paddle] = _BRIGHT
        return image
