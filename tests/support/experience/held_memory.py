"""An endless task whose observations lie in memory that it uses again, in one of many ways.

The first state earns −30, all others 1; an episode is cut after six steps.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

TASK = "tests.support.experience.held_memory:Held-v0"
LENGTH, DISCOUNT = 6, 0.9
FIRST, LATER = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
LATER_VALUE = 1 / (1 - DISCOUNT)
FIRST_VALUE = -30 + DISCOUNT * LATER_VALUE
_BOX = spaces.Box(0, 1, (2,), np.float32)
_Held = dict[str, Any]


def new(_: _Held, x: Any) -> Any:
    return {"x": x.copy()}


def one_array(held: _Held, x: Any) -> Any:
    array = held.setdefault("x", np.zeros_like(x))
    array[:] = x
    return array


def one_slice(held: _Held, x: Any) -> Any:
    buffer = held.setdefault("buffer", np.zeros((3, 4), np.float32))
    buffer[1, 1:3] = x
    return buffer[1, 1:3]


def one_dict(held: _Held, x: Any) -> Any:
    held["x"] = x.copy()
    return held


def one_dict_of_one_array(held: _Held, x: Any) -> Any:
    one_array(held, x)
    return held


def one_list(held: _Held, x: Any) -> Any:
    """In place of a tuple; a new array is put into it."""
    parts = held.setdefault("parts", [None])
    parts[0] = x.copy()
    return parts


def one_tuple(held: _Held, x: Any) -> Any:
    return held.setdefault("parts", (one_array(held, x),))


def one_dict_in_a_tuple(held: _Held, x: Any) -> Any:
    return (one_dict(held, x),)


def one_dict_with_the_mask(held: _Held, x: Any) -> Any:
    held.setdefault("mask", np.zeros(2, np.int8))[:] = x > 0
    return one_dict(held, x)


def one_array_of_all(_: _Held, x: Any) -> Any:
    _ALL[:] = x
    return _ALL


def one_dict_of_all(_: _Held, x: Any) -> Any:
    _ALL_DICT["x"] = x.copy()
    return _ALL_DICT


_ALL, _ALL_DICT = np.zeros(2, np.float32), dict[str, Any]()
_DICT, _TUPLE = spaces.Dict(x=_BOX), spaces.Tuple((_BOX,))
WAYS: dict[str, tuple[spaces.Space[Any], Callable[[_Held, Any], Any]]] = {
    "new": (_DICT, new),
    "one_array": (_BOX, one_array),
    "one_slice": (_BOX, one_slice),
    "one_dict": (_DICT, one_dict),
    "one_dict_of_one_array": (_DICT, one_dict_of_one_array),
    "one_list": (_TUPLE, one_list),
    "one_tuple": (_TUPLE, one_tuple),
    "one_dict_in_a_tuple": (spaces.Tuple((_DICT,)), one_dict_in_a_tuple),
    "one_array_of_all": (_BOX, one_array_of_all),
    "one_dict_of_all": (_DICT, one_dict_of_all),
    "one_dict_with_the_mask": (spaces.Dict(x=_BOX, mask=spaces.MultiBinary(2)), one_dict_with_the_mask),
}


class Held(gymnasium.Env[Any, Any]):
    """Observes which of FIRST and LATER its state is, by a way of WAYS; each of them allows one action.

    mask: what holds all masks of `info`, "array" or "list". strict: the other action raises.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    action_space = spaces.Discrete(2)

    def __init__(self, way: str = "new", mask: str = "array", *, strict: bool = False) -> None:
        self.observation_space, self._show = WAYS[way]
        self._held: _Held = {}
        self._info: dict[str, Any] = {"mask": [0, 0] if mask == "list" else np.zeros(2, np.int8)}
        self._strict = strict
        self.calls: list[Any] = []
        self.observes = LATER
        """What it shows of every step."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.calls.append(("reset", options))
        return self._observe(FIRST)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.calls.append(("step", action))
        if self._strict and not self._info["mask"][action]:
            raise ValueError(f"action {action} is not allowed")
        reward = -30.0 if self._info["mask"][0] else 1.0
        observation, info = self._observe(self.observes)
        return observation, reward, False, False, info

    def _observe(self, state: Any) -> tuple[Any, dict[str, Any]]:
        self._info["mask"][:] = (state > 0).astype(int)
        return self._show(self._held, state), self._info


gymnasium.register("Held-v0", f"{__name__}:Held", max_episode_steps=LENGTH)
