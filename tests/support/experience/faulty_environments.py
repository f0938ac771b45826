"""Environments for actors that something goes wrong with; importing registers them."""

import threading
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces


class NotANumber(gymnasium.Env[Any, Any]):
    """Its rewards are NaN after the tenth step."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, **_: Any) -> None:
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return np.zeros(2, np.float32), float("nan") if self._steps > 10 else 1.0, False, False, {}


class NotANumberAtItsEnd(NotANumber):
    """Its episodes have five steps; the reward of the last one is NaN."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        over = self._steps == 5
        return np.zeros(2, np.float32), float("nan") if over else 1.0, over, False, {}


GOES_ON: Final = threading.Event()
"""Set by a test when the environment that stands still is to come back."""


class StandsStill(NotANumber):
    """Its seventh step after a reset waits until it `GOES_ON`.

    Its observations count the steps since then.
    """

    observation_space = spaces.Box(0, 1e6, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self._steps == 7:
            GOES_ON.wait()
        return np.full(2, self._steps, np.float32), 1.0, False, False, {}


gymnasium.register("NotANumber-v0", NotANumber)
gymnasium.register("NotANumberAtItsEnd-v0", NotANumberAtItsEnd)
gymnasium.register("StandsStill-v0", StandsStill)
