"""Action masks of an environment: which actions it allows next, by the path of the action.

They come under one key, of the observation where that is a Dict that has it, else of `infos` in the form of
Gymnasium's vector environments. The value is one flat mask of all choices, or has the parts of the action
space.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.config.sections import EnvironmentSection, RewardWrapper
from penstock.config.workload import load
from penstock.protocol.schema import mask_rules
from penstock.protocol.spaces import Dict, Space, Tuple, parts
from penstock.protocol.tensor import Array
from penstock.runtime.exit import Fatal

Rows = dict[str, Any]
"""Arrays [N, ...] by path, masks among them."""


class Masks:
    """Reads the masks of N slots; each is bool [N, n] under `mask/PATH`, true where allowed."""

    def __init__(self, key: str, action_space: Space, slots: int) -> None:
        self._key, self._space, self._slots = key, action_space, slots
        self._sizes = {rule.name: rule.shape[0] for rule in mask_rules(action_space)}
        self._total = sum(self._sizes.values())
        self._steps = np.zeros(slots, np.int64)

    def read(self, observation: Any, infos: dict[str, Any]) -> Rows:
        """Return the masks that came with an observation, bool [N, n] by name.

        Where none came nothing is allowed. observation, infos: of N slots, as a vector environment returns
        them. Raises ConfigurationError for another form.
        """
        is_part = isinstance(observation, dict) and self._key in observation
        given = observation[self._key] if is_part else infos.get(self._key)
        flat = np.zeros((self._slots, self._total), np.bool_)
        if given is not None:
            came = self._read(given, self._slots)
            if came.shape[1] != self._total:
                raise ConfigurationError(
                    f"environment.mask_key={self._key!r}: masks of {came.shape[1]} choices came, the action "
                    f"space has {self._total}; give one value for each choice"
                )
            flat[:] = came
        return self._parted(flat)

    def last(self, final: Any, infos: dict[str, Any], slots: NDArray[np.intp]) -> Rows:
        """Return the masks of K last observations, bool [K, n] by name.

        final: object array [N] of single observations. infos: of these. slots: int [K], whose episodes ended.
        """
        given = final[slots[0]]
        if not isinstance(given, dict) or self._key not in given:
            return {name: mask[slots] for name, mask in self.read(None, infos).items()}
        flat = np.concatenate([self._read(final[slot][self._key], 1) for slot in slots])
        return self._parted(flat)

    def _read(self, given: Any, slots: int) -> NDArray[np.bool_]:
        try:
            return _joined(self._space, given, slots)
        except ValueError as error:
            raise Fatal(f"environment.mask_key={self._key!r}: {error}") from error

    def _parted(self, flat: NDArray[np.bool_]) -> Rows:
        cuts = np.split(flat, np.cumsum(list(self._sizes.values()))[:-1], 1)
        return dict(zip(self._sizes, cuts, strict=True))

    def free(self, rows: Rows, slots: NDArray[np.intp]) -> None:
        """Allow everything, in place, in the slots int [K] whose action will be ignored."""
        for name in self._sizes:
            rows[name][slots] = True

    def keep(self, first: Rows, before: Rows, begins: NDArray[np.bool_]) -> None:
        """Put the masks of `before` into `first` in slots in which no episode begins; begins: bool [N]."""
        for name in self._sizes:
            first[name][~begins] = before[name][~begins]

    def check(self, rows: Rows, begins: NDArray[np.bool_] | None) -> None:
        """Count a step; raises Fatal that names slot and step where nothing is allowed.

        rows: bool [N, n] by name. begins: bool [N], slots in which an episode begins; None: in none.
        """
        self._steps += 1
        if begins is not None:
            self._steps[begins] = 0
        for name in self._sizes:
            allows = rows[name].any(1)
            if not allows.all():
                slot = int(allows.argmin())
                raise Fatal(
                    f"environment.mask_key={self._key!r}: {name} of slot {slot} allows nothing, or was not "
                    f"given, at step {self._steps[slot]} of its episode; the environment must allow at least "
                    "one action"
                )


def flat_mask(space: Space, given: Any) -> NDArray[np.bool_]:
    """Return a mask of one slot, in any form, as bool [choices] in the order of the space.

    Raises ValueError where a value is neither 0 nor 1.
    """
    flat: NDArray[np.bool_] = _joined(space, given, 1)[0]
    return flat


def _joined(space: Space, given: Any, slots: int) -> NDArray[np.bool_]:
    """A mask of N slots as [N, choices], in the order of the space; leaves that take no mask have none."""
    if isinstance(given, np.ndarray) and given.dtype == object:
        # What Gymnasium makes of tuples: one for each slot, None where a slot gave nothing.
        rows = [np.zeros((1, 0), np.bool_) if one is None else _joined(space, one, 1) for one in given]
        width = max(row.shape[1] for row in rows)
        return np.concatenate([row if row.shape[1] else np.zeros((1, width), np.bool_) for row in rows])
    if isinstance(space, Dict | Tuple) and isinstance(given, dict | tuple):
        named = (
            given if isinstance(given, dict) else dict(zip(map(str, range(len(given))), given, strict=True))
        )
        pieces = [
            _joined(part, named[name], slots)
            for name, part in parts(space)
            if named.get(name) is not None and mask_rules(part)
        ]
        return np.concatenate([np.zeros((slots, 0), np.bool_), *pieces], 1)
    if isinstance(given, tuple | list):
        return np.concatenate([_joined(space, one, slots) for one in given], 1)
    return _truth(np.asarray(given)).reshape(slots, -1)


def _truth(mask: Array) -> NDArray[np.bool_]:
    allowed: NDArray[np.bool_] = mask == 1
    wrong = ~(allowed | (mask == 0))
    if wrong.any():
        # A mask that is added to logits has 0 where an action is allowed.
        raise ValueError(f"a mask holds {mask[wrong][0]}; use 1 where an action is allowed, else 0")
    return allowed


# ---- What the learner is given as reward: the wrappers of `environment.reward` over what the environment
# paid.

Tensors = Mapping[str, Array]
Rewards = NDArray[np.float64]
Potential = Callable[[Mapping[str, Array]], Array]

_OBSERVATION: Final = "observation"
_FINAL: Final = "final/"
_MOST: Final = float(np.finfo(np.float32).max)


class PotentialError(Fatal):
    """A potential that does not give one finite number per observation."""


class LearnerReward:
    """Called with the tensors of a fragment, gives its `reward`: float32 [T, N], 0 where not valid."""

    def __init__(self, wrappers: tuple[RewardWrapper, ...]) -> None:
        self._stages = [_stage(wrapper) for wrapper in wrappers]

    def __call__(self, tensors: Tensors) -> NDArray[np.float32]:
        rewards: Rewards = tensors["reward"].astype(np.float64)
        for stage in self._stages:
            rewards = stage(rewards, tensors)
        # What float32 cannot hold would end the session as not finite.
        return np.where(tensors["valid"], np.clip(rewards, -_MOST, _MOST), 0.0).astype(np.float32)


def learner_reward(section: EnvironmentSection) -> LearnerReward | None:
    """Return the wrappers, None without any; imports potentials: check first that they are allowed."""
    return LearnerReward(section.reward) if section.reward else None


def potentials(section: EnvironmentSection) -> tuple[str, ...]:
    return tuple(one.shape for one in section.reward if one.shape is not None)


def _stage(wrapper: RewardWrapper) -> Callable[[Rewards, Tensors], Rewards]:
    if wrapper.clip is not None:
        low, high = wrapper.clip
        return lambda rewards, _tensors: np.clip(rewards, low, high)
    if wrapper.scale is not None:
        factor = wrapper.scale
        return lambda rewards, _tensors: rewards * factor
    assert wrapper.shape is not None
    assert wrapper.discount is not None, "the learner has filled it in"
    discount, potential = wrapper.discount, partial(_potentials, wrapper.shape, load(wrapper.shape))
    return lambda rewards, tensors: rewards + shaping(tensors, potential, discount)


def shaping(tensors: Tensors, potential: Callable[[Tensors], Rewards], discount: float) -> Rewards:
    """F = γΦ(s') − Φ(s), [T, N] (Ng, Harada and Russell 1999, eq. 2); Φ(s') = 0 where the episode terminated.

    s' of a step that ended an episode is its true last observation, not the first of the next.
    """
    observed = {name: array for name, array in tensors.items() if name.partition("/")[0] == _OBSERVATION}
    steps, slots = tensors["reward"].shape
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in observed.items()}
    potentials = potential(flat).reshape(steps + 1, slots)
    following = potentials[1:].copy()
    if len(tensors["final/slot"]):
        last = potential({name: tensors[f"{_FINAL}{name}"] for name in observed})
        if len(last):
            following[tensors["final/step"], tensors["final/slot"]] = last
    following[tensors["terminated"].astype(bool)] = 0.0
    shaped: Rewards = discount * following - potentials[:-1]
    return shaped


def _potentials(name: str, function: Potential, observation: Tensors) -> Rewards:
    count = len(next(iter(observation.values())))
    found = np.asarray(function(observation), np.float64)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise PotentialError(
            f"environment.reward: {name} gave {found.dtype}{list(found.shape)} for {count} observations; "
            "a potential gives one finite number for each"
        )
    return found
