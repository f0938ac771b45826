"""Menu: the smallest task that needs action masks."""

from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

DISHES: Final = 6
MEALS: Final = 10


class Menu(gymnasium.Env[np.int64, np.int64]):
    """Ten meals of six dishes, of which a menu offers some: only `info["action_mask"]` says which.

    Observation: the mood, 0 or 1. In mood 0 dish i is worth i / 5, in mood 1 the other way round; what is not
    on the menu is worth −1. Each of the 63 menus that offer anything is as likely. The best dish on it has
    rank i on 2^i of them, so the optimum is 10 · Σ i 2^i / 63 / 5 = 8.19. Who does not know the menu gets
    0.16 at best: the dish that is worth 1 is on 32 of the 63.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(DISHES)
        self._mood = self._meal = 0
        self._menu: NDArray[np.int8] = np.ones(DISHES, np.int8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        super().reset(seed=seed)
        self._meal = 0
        return self._serve()

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        rank = int(action) if self._mood == 0 else DISHES - 1 - int(action)
        reward = rank / (DISHES - 1) if self._menu[action] else -1.0
        self._meal += 1
        mood, info = self._serve()
        return mood, reward, self._meal == MEALS, False, info

    def _serve(self) -> tuple[np.int64, dict[str, Any]]:
        self._mood = int(self.np_random.integers(2))
        offered = int(self.np_random.integers(1, 2**DISHES))
        self._menu = (offered >> np.arange(DISHES) & 1).astype(np.int8)
        return np.int64(self._mood), {"action_mask": self._menu}
