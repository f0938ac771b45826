"""A courier on a grid: the smallest task that needs every part of a Dict observation."""

from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SIDE: Final = 5
STEP_COST: Final = 0.1
_DEPOTS: Final = np.array([(0, 0), (0, SIDE - 1), (SIDE - 1, 0), (SIDE - 1, SIDE - 1)])
_MOVES: Final = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])

Observation = dict[str, Any]


class Courier(gymnasium.Env[Observation, np.int64]):
    """A courier on a random field of five by five must reach the depot that it was told.

    The depot is one of the four corners.
    Observation: "position" float32 [2], row and column from 0 to 4; "depot" one of 4. Every step costs 0.1,
    the depot pays 1 and ends the episode. The optimum from a field d steps away is 1 − 0.1 d; over all 24
    starts of each depot the mean of d is 25/6, so that of the optimal return is 7/12.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self) -> None:
        position = spaces.Box(0, SIDE - 1, (2,), np.float32)
        self.observation_space = spaces.Dict(position=position, depot=spaces.Discrete(len(_DEPOTS)))
        self.action_space = spaces.Discrete(len(_MOVES))
        self._depot = 0
        self._position: NDArray[np.int64] = np.zeros(2, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._depot = int(self.np_random.integers(len(_DEPOTS)))
        self._position = _DEPOTS[self._depot]
        while self._has_arrived():
            self._position = self.np_random.integers(SIDE, size=2)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """action: 0 up, 1 down, 2 left, 3 right; a wall keeps the courier where it is."""
        self._position = np.clip(self._position + _MOVES[action], 0, SIDE - 1)
        is_over = self._has_arrived()
        return self._observe(), float(is_over) - STEP_COST, is_over, False, {}

    def _has_arrived(self) -> bool:
        return bool((self._position == _DEPOTS[self._depot]).all())

    def _observe(self) -> Observation:
        return {"position": self._position.astype(np.float32), "depot": np.int64(self._depot)}
