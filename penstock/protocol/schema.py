"""Fragment schema: the tensors that every fragment of a run carries, and the check that one does."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MESSAGE_OVERHEAD_BYTES, SLOT_BYTES
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, Space, leaves
from penstock.protocol.tensor import DTYPES, FEW, Array, check_dtype, check_shape
from penstock.v1 import specification_pb2 as pb


class Axes(IntEnum):
    """Leading axes of a tensor."""

    STEP = 1
    """[T, N, ...]"""
    STEP_PLUS_ONE = 2
    """[T+1, N, ...]"""
    SLOT = 3
    """[N, ...]"""
    END = 4
    """[K, ...], one row per episode that ended inside; K is the same for all such tensors."""

    def leading(self, steps: int, slots: int, ends: int) -> tuple[int, ...]:
        """Return the lengths of these axes for T steps of N slots in which K episodes end."""
        match self:
            case Axes.STEP:
                return steps, slots
            case Axes.STEP_PLUS_ONE:
                return steps + 1, slots
            case Axes.SLOT:
                return (slots,)
            case Axes.END:
                return (ends,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """One tensor: dtype and shape behind the leading axes."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    axes: Axes = Axes.STEP

    def bytes_per_row(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class FragmentSchema:
    """The rules by name. `schema_id` is the SHA-256 of their canonical form, hexadecimal."""

    tensors: tuple[TensorRule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(sorted(self.tensors, key=lambda rule: rule.name)))
        names = [rule.name for rule in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"schema: a tensor is declared twice in {names}")

    def __hash__(self) -> int:
        return hash(self.schema_id)

    @cached_property
    def schema_id(self) -> str:
        return hashlib.sha256(self.to_proto().SerializeToString(deterministic=True)).hexdigest()

    @cached_property
    def by_name(self) -> dict[str, TensorRule]:
        return {rule.name: rule for rule in self.tensors}

    @cached_property
    def optional(self) -> dict[str, "TensorRule"]:
        """The rules of optional tensors of a fragment, by name: masks of last observations.

        `final/mask/PATH` holds the mask of the true last observation, in rows as `final/PATH`. A row that
        allows nothing means that the mask is not known.
        """
        return {
            f"final/{rule.name}": TensorRule(
                name=f"final/{rule.name}", dtype=rule.dtype, shape=rule.shape, axes=Axes.END
            )
            for rule in self.under("mask")
        }

    def under(self, prefix: str) -> tuple[TensorRule, ...]:
        """Return the rules named `prefix` or below it, such as all of "observation"."""
        return tuple(r for r in self.tensors if r.name == prefix or r.name.startswith(f"{prefix}/"))

    def fragment_bytes(self, steps: int, slots: int, ends: int) -> int:
        """Return the payload bytes of a fragment of T steps and N slots in which K episodes end."""
        rows = {axes: math.prod(axes.leading(steps, slots, ends)) for axes in Axes}
        return sum(rule.bytes_per_row() * rows[rule.axes] for rule in self.tensors)

    def most_ends(self, steps: int, slots: int) -> int:
        """Return how many episodes may end in T steps of N slots in one message; can be negative."""
        rules = (*self.tensors, *self.optional.values())
        row = sum(rule.bytes_per_row() for rule in rules if rule.axes is Axes.END)
        return (payload_room(slots) - self.fragment_bytes(steps, slots, 0)) // max(row, 1)

    def to_proto(self) -> pb.FragmentSchema:
        return pb.FragmentSchema(
            tensors=[
                pb.TensorRule(
                    name=rule.name,
                    dtype=rule.dtype,
                    shape=rule.shape,
                    axes=pb.Axes.ValueType(rule.axes.value),
                )
                for rule in self.tensors
            ]
        )

    @classmethod
    def from_proto(cls, message: pb.FragmentSchema) -> "FragmentSchema":
        rules = []
        for rule in message.tensors:
            check_dtype(f"schema.{rule.name}", rule.dtype)
            shape = check_shape(f"schema.{rule.name}", rule.shape)
            if rule.axes not in {axes.value for axes in Axes}:
                raise ValueError(
                    f"schema.{rule.name}: axes {rule.axes} is not one of {[a.name for a in Axes]}"
                )
            rules.append(TensorRule(name=rule.name, dtype=rule.dtype, shape=shape, axes=Axes(rule.axes)))
        return cls(tuple(rules))


def payload_room(slots: int) -> int:
    """Return the most payload bytes of a fragment of N slots that fits into a message alone."""
    return MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES - SLOT_BYTES * slots


def choices(leaf: Leaf) -> int:
    """Return the length of an action leaf's mask; 0: it takes none."""
    match leaf:
        case Discrete():
            return leaf.n
        case MultiDiscrete():
            return sum(leaf.nvec)
        case _:
            return 0


def mask_rules(action: Space) -> tuple[TensorRule, ...]:
    """Return the rule of `mask/ACTION/PATH` for every leaf that takes a mask."""
    return tuple(
        TensorRule(name=f"mask/{path}", dtype="bool", shape=(choices(leaf),), axes=Axes.STEP_PLUS_ONE)
        for path, leaf in leaves(action, "action")
        if choices(leaf)
    )


def state_rules(state: Space) -> tuple[TensorRule, ...]:
    """Return the rules of `state/PATH` before the first step, and of `begins`: a row begins an episode."""
    rules = [
        TensorRule(name=path, dtype=leaf.dtype, shape=leaf.shape, axes=Axes.SLOT)
        for path, leaf in leaves(state, "state")
    ]
    begins = TensorRule(name="begins", dtype="bool", axes=Axes.STEP_PLUS_ONE)
    return (*rules, begins) if rules else ()


def fragment_schema(observation: Space, action: Space, extra: tuple[TensorRule, ...] = ()) -> FragmentSchema:
    """Return the schema of fixed-size observations and actions, plus the workload's `extra` tensors.

    `final/observation/...`, `final/slot` and `final/step` hold the true last observation of every
    episode that ended inside: row k belongs to slot `final/slot[k]` and ended with step `final/step[k]`.
    """
    rules = [
        TensorRule(name="reward", dtype="float32"),
        TensorRule(name="terminated", dtype="bool"),
        TensorRule(name="truncated", dtype="bool"),
        TensorRule(name="valid", dtype="bool"),
        TensorRule(name="log_prob", dtype="float32"),
        TensorRule(name="final/slot", dtype="int32", axes=Axes.END),
        TensorRule(name="final/step", dtype="int32", axes=Axes.END),
    ]
    for path, leaf in leaves(observation, "observation"):
        rules.append(TensorRule(name=path, dtype=leaf.dtype, shape=leaf.shape, axes=Axes.STEP_PLUS_ONE))
        rules.append(TensorRule(name=f"final/{path}", dtype=leaf.dtype, shape=leaf.shape, axes=Axes.END))
    for path, leaf in leaves(action, "action"):
        rules.append(TensorRule(name=path, dtype=leaf.dtype, shape=leaf.shape))
    return FragmentSchema((*rules, *extra))


# ---- The numbers that each tensor of a run's fragments may hold: its space, and what is plausible of
# reals.

SLACK: Final = 1_000.0
MOST: Final = 1e9
"""Whose square float32 holds, summed over any batch."""

_OBSERVATION, _ACTION, _STATE, _FINAL = "observation", "action", "state", "final/"


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of one tensor behind its leading axes. low, high: of one value, or of each element.

    stated: the space as text, for messages. Its methods take arrays [..., *shape] of the tensor's dtype.
    """

    low: Any
    high: Any
    is_real: bool
    stated: str

    def holds(self, array: Array) -> bool:
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
        values: Any = array
        found: NDArray[np.bool_] = (values >= self.low) & (values <= self.high)
        return found

    def check(self, name: str, array: Array) -> None:
        """Raise ValueError where a value of `array` lies outside; it says value, place and space."""
        if self.holds(array):
            return
        place = self.first_outside(array)
        value: Any = array[place]
        if self.is_real and not math.isfinite(value):
            raise ValueError(f"{name}: holds NaN or infinity; the environment or the policy diverged")
        raise ValueError(f"{name}: holds {value:g} at {list(place)}, outside {self.around(array, place)}")

    def first_outside(self, array: Array) -> tuple[int, ...]:
        return tuple(int(index) for index in np.argwhere(~self.inside(array))[0])

    def around(self, array: Array, place: tuple[int, ...]) -> str:
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
"""The ranges where the spaces are not known: every finite number is allowed."""


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
