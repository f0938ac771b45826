"""What the learner is given as reward: the wrappers of `environment.reward` over what the environment paid.

Applied to a whole fragment when it is cut, so that a step costs no more. Returns of episodes and evaluations
are counted from the environment's own rewards and know nothing of this.

A potential is a function `module:function` of observations by path, `{"observation": [M, *shape]}`, raw, that
gives M numbers. It must depend on nothing else: shaping by it then changes no optimal policy.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.sections.environment import EnvironmentSection, RewardWrapper
from penstock.config.workload import load
from penstock.protocol.tensor import Array
from penstock.runtime.exit import Fatal

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
        """Raises PotentialError, which names the function."""
        rewards: Rewards = tensors["reward"].astype(np.float64)
        for stage in self._stages:
            rewards = stage(rewards, tensors)
        # What float32 cannot hold would end the session as not finite.
        return np.where(tensors["valid"], np.clip(rewards, -_MOST, _MOST), 0.0).astype(np.float32)


def learner_reward(section: EnvironmentSection) -> LearnerReward | None:
    """Return the wrappers of a section; None where it has none.

    Imports the modules of potentials: check first that they are allowed. Raises ConfigurationError.
    """
    return LearnerReward(section.reward) if section.reward else None


def potentials(section: EnvironmentSection) -> tuple[str, ...]:
    """Return the functions that the wrappers import, as `module:function`."""
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
