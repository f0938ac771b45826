"""The numbers that each tensor of a run's fragments may hold: its space, and what is plausible of reals.

A tensor that breaks its range is no experience, in rows that are not valid too: it meets networks and
indices before anything masks it. Integers must lie in their space. Reals must be finite; an element whose
bounds the space states may lie `SLACK` times as far from 0 as these, since many environments step a little
outside of what they state, and any other no further than `MOST`.

The learner holds fragments against them, and a policy server what its clients send: or one client could have
the session quarantined that all of a server's clients share.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, Space, leaves
from penstock.protocol.tensor import FEW, Array

SLACK: Final = 1_000.0
MOST: Final = 1e9
"""Whose square float32 holds, summed over any batch."""

_OBSERVATION, _ACTION, _STATE, _FINAL = "observation", "action", "state", "final/"


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds what one tensor may hold behind its leading axes. low, high: of one value, or of each element.

    stated: what the space says, for messages. Its methods take arrays [..., *shape] of the tensor's dtype.
    """

    low: Any
    high: Any
    is_real: bool
    stated: str

    def holds(self, array: Array) -> bool:
        """Return whether all values lie in the range."""
        if not array.size:
            return True
        values: Any = array
        if isinstance(self.high, np.ndarray):
            return bool(self.inside(array).all())
        if self.is_real:
            # NaN is in no order, so it is not below the limit either.
            if array.size <= FEW and sum(map(abs, values.ravel().tolist())) <= self.high:
                return True
            return bool(np.abs(values).max() <= self.high)
        return bool(values.min() >= self.low and values.max() <= self.high)

    def inside(self, array: Array) -> NDArray[np.bool_]:
        """Return which values lie in the range, bool of the array's shape."""
        values: Any = array
        found: NDArray[np.bool_] = (values >= self.low) & (values <= self.high)
        return found

    def check(self, name: str, array: Array) -> None:
        """Raise ValueError where a value of `array` lies outside; it says value, place and space.

        name: of the tensor, for the message.
        """
        if self.holds(array):
            return
        place = self.first_outside(array)
        value: Any = array[place]
        if self.is_real and not math.isfinite(value):
            raise ValueError(f"{name}: holds NaN or infinity; the environment or the policy diverged")
        raise ValueError(f"{name}: holds {value:g} at {list(place)}, outside {self.around(array, place)}")

    def first_outside(self, array: Array) -> tuple[int, ...]:
        """Return the place of the first value outside; there is one."""
        return tuple(int(index) for index in np.argwhere(~self.inside(array))[0])

    def around(self, array: Array, place: tuple[int, ...]) -> str:
        """Return what the element at a place may be, for messages."""
        if not self.is_real:
            return self.stated
        return f"±{np.broadcast_to(self.high, array.shape)[place]:g}, which is far from {self.stated}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Holds a range by name of the tensor.

    parts: of a mask, how many choices each part of the action has. chooses: whether no part of the action is
    a real number, so that its log-probability is that of an event and not of a density.
    """

    of: Mapping[str, Range]
    parts: Mapping[str, tuple[int, ...]]
    chooses: bool

    @classmethod
    def of_run(cls, observation: Space, action: Space, state: Space) -> "Ranges":
        """Return the ranges of every tensor of a run's fragments.

        observation, action: spaces of the environment. state: space of the policy's, `Dict(())` where it has
        none.
        """
        found: dict[str, Range | None] = {}
        for path, leaf in leaves(observation, _OBSERVATION):
            found[path] = found[f"{_FINAL}{path}"] = observed(leaf)
        choices: dict[str, tuple[int, ...]] = {}
        for path, leaf in leaves(action, _ACTION):
            # Fragments hold actions as they were drawn: choices count from 0, whatever the space begins at.
            found[path] = drawn(leaf)
            if isinstance(leaf, Discrete | MultiDiscrete):
                choices[f"mask/{path}"] = (leaf.n,) if isinstance(leaf, Discrete) else leaf.nvec
        for path, leaf in leaves(state, _STATE):
            found[path] = _remembered(leaf)
        return cls(
            of={name: one for name, one in found.items() if one is not None},
            parts=choices,
            chooses=not any(isinstance(leaf, Box) for _, leaf in leaves(action, _ACTION)),
        )


UNKNOWN: Final = Ranges(of={}, parts={}, chooses=False)
"""Of a fragment whose spaces are not known: every real number is finite."""


def observed(leaf: Leaf) -> Range | None:
    """Return the range of an observation; None where its dtype holds no other number."""
    match leaf:
        case Discrete():
            return Range(leaf.start, leaf.start + leaf.n - 1, False, f"{leaf!r}")
        case MultiDiscrete():
            return Range(0, np.asarray(leaf.nvec, np.int64) - 1, False, f"{leaf!r}")
        case MultiBinary():
            return Range(0, 1, False, f"{leaf!r}")
        case Box():
            return _box(leaf)


def _box(leaf: Box) -> Range | None:
    kind = leaf.low.dtype
    if kind == np.bool_ or not leaf.low.size:
        return None
    if np.issubdtype(kind, np.integer):
        limits = np.iinfo(kind.name)
        if (leaf.low == limits.min).all() and (leaf.high == limits.max).all():
            return None
        return Range(_one(leaf.low), _one(leaf.high), False, f"{leaf!r}")
    far = np.maximum(np.abs(leaf.low.astype(np.float64)), np.abs(leaf.high.astype(np.float64)))
    most = np.where(far <= MOST, np.maximum(far, 1.0) * SLACK, MOST)
    limit = _one(most.clip(max=_most_of(kind)).astype(kind))
    return Range(-limit, limit, True, f"{leaf!r}")


def _most_of(kind: "np.dtype[Any]") -> float:
    return min(MOST, float(np.finfo(kind).max))


def _one(bounds: Array) -> Any:
    """Return the one number that all elements are, where they are alike."""
    return bounds.item(0) if (bounds == bounds.flat[0]).all() else bounds


def drawn(leaf: Leaf) -> Range | None:
    """Return the range of an action as it was drawn; None where its dtype holds no other number."""
    if isinstance(leaf, Discrete):
        return Range(0, leaf.n - 1, False, f"{leaf.n} choices")
    if isinstance(leaf, Box) and np.issubdtype(leaf.low.dtype, np.floating):
        # What a Gaussian draws is clipped or squashed on its way to the environment.
        limit = _most_of(leaf.low.dtype)
        return Range(-limit, limit, True, "what a policy draws")
    return observed(leaf)


def _remembered(leaf: Leaf) -> Range | None:
    """Return the range of a state: zeros, with which an episode begins, belong to any."""
    found = observed(leaf)
    if found is None or found.is_real:
        return found
    return Range(np.minimum(found.low, 0), np.maximum(found.high, 0), False, found.stated)
