"""Small environments with a known optimum, for tests of what a policy can see and remember.

A run names one as `Catch-v0`.
"""

from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

gymnasium.register("Catch-v0", f"{__name__}:Catch", reward_threshold=0.95)
gymnasium.register("Courier-v0", f"{__name__}:Courier", reward_threshold=0.5, max_episode_steps=20)
gymnasium.register("Recall-v0", f"{__name__}:Recall", reward_threshold=0.95)
gymnasium.register("Menu-v0", f"{__name__}:Menu", reward_threshold=7.78)

Image = NDArray[np.uint8]
_BRIGHT: Final = 255


class Catch(gymnasium.Env[Image, np.int64]):
    """The smallest task that needs eyes (Mnih et al. 2014; bsuite, Osband et al. 2020).

    A ball falls from a random column of the top row, and a paddle in the bottom row catches it.

    Actions: the paddle goes left, stays or goes right.
    Observation: uint8 [rows, columns], ball and paddle bright. The reward comes with the last step, when the
    ball is in the bottom row: 1 caught, −1 missed. The optimum is 1 from every start, since
    rows ≥ columns / 2 + 1 steps suffice; a policy that does not look catches one ball in `columns`, so that
    its returns have the mean 2 / columns − 1.
    """

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


SIDE: Final = 5
STEP_COST: Final = 0.1
_DEPOTS: Final = np.array([(0, 0), (0, SIDE - 1), (SIDE - 1, 0), (SIDE - 1, SIDE - 1)])
_MOVES: Final = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])


class Courier(gymnasium.Env[dict[str, Any], np.int64]):
    """The smallest task that needs every part of a Dict observation.

    A courier on a random field of five by five must reach the depot of its order, one of the corners.

    Observation: "position" float32 [2], row and column from 0 to 4; "depot" one of 4. Every step costs 0.1,
    the depot pays 1 and ends the episode. The optimum from a field d steps away is 1 − 0.1 d; over all 24
    starts of each depot the mean of d is 25/6, so that of the optimal return is 7/12.
    """

    def __init__(self) -> None:
        position = spaces.Box(0, SIDE - 1, (2,), np.float32)
        self.observation_space = spaces.Dict(position=position, depot=spaces.Discrete(len(_DEPOTS)))
        self.action_space = spaces.Discrete(len(_MOVES))
        self._depot = 0
        self._position: NDArray[np.int64] = np.zeros(2, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._depot = int(self.np_random.integers(len(_DEPOTS)))
        self._position = _DEPOTS[self._depot]
        while self._has_arrived():
            self._position = self.np_random.integers(SIDE, size=2)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """action: 0 up, 1 down, 2 left, 3 right; a wall keeps the courier where it is."""
        self._position = np.clip(self._position + _MOVES[action], 0, SIDE - 1)
        is_over = self._has_arrived()
        return self._observe(), float(is_over) - STEP_COST, is_over, False, {}

    def _has_arrived(self) -> bool:
        return bool((self._position == _DEPOTS[self._depot]).all())

    def _observe(self) -> dict[str, Any]:
        return {"position": self._position.astype(np.float32), "depot": np.int64(self._depot)}


Vector = NDArray[np.float32]


class Recall(gymnasium.Env[Vector, np.int64]):
    """The smallest task that needs a memory (after the T-maze of Bakker 2002).

    A cue, one of `cues`, is shown once. The question for it comes after `delay` steps at most, and half as
    many at least.

    Observation: float32 [cues + 1], the cue as a one-hot code in the first step only, and 1 in the last place
    for the question. Only the action of the last step counts: 1 for the cue, 0 else. The optimum is 1; a
    policy that cannot remember gets 1 / cues, since the question looks the same after every cue.
    """

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
        """action: the answer to the question; it has no effect before."""
        if self._left == 0:
            return self._observe(), float(action == self._cue), True, False, {}
        self._left -= 1
        return self._observe(self._cues if self._left == 0 else None), 0.0, False, False, {}

    def _observe(self, shown: int | None = None) -> Vector:
        observation = np.zeros(self._cues + 1, np.float32)
        if shown is not None:
            observation[shown] = 1
        return observation


DISHES: Final = 6
MEALS: Final = 10


class Menu(gymnasium.Env[np.int64, np.int64]):
    """The smallest task that needs action masks.

    Ten meals of six dishes, of which a menu offers those of `info["action_mask"]`.

    Observation: the mood, 0 or 1. In mood 0 dish i is worth i / 5, in mood 1 the other way round; what is not
    on the menu is worth −1. Each of the 63 menus that offer anything is as likely. The best dish on it has
    rank i on 2^i of them, so the optimum is 10 · Σ i 2^i / 63 / 5 = 8.19. Who does not know the menu gets
    0.16 at best: the dish that is worth 1 is on 32 of the 63.
    """

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
