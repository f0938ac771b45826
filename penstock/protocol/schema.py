"""Fragment schema: the tensors that every fragment of a run carries, and the check that one does."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MESSAGE_OVERHEAD_BYTES, SLOT_BYTES
from penstock.protocol.spaces import Discrete, Leaf, MultiDiscrete, Space, leaves
from penstock.protocol.tensor import DTYPES, check_dtype, check_shape
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """One tensor: dtype and shape behind the leading axes."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    axes: Axes = Axes.STEP

    def bytes_per_row(self) -> int:
        """Return the size of one row in bytes."""
        size = DTYPES[self.dtype].itemsize
        for length in self.shape:
            size *= length
        return size


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
        """Digest that a fragment's header repeats."""
        return hashlib.sha256(self.to_proto().SerializeToString(deterministic=True)).hexdigest()

    @cached_property
    def by_name(self) -> dict[str, TensorRule]:
        """The rules by tensor name."""
        return {rule.name: rule for rule in self.tensors}

    @cached_property
    def optional(self) -> dict[str, "TensorRule"]:
        """The rules of tensors that a fragment may hold beside these, by name: masks of last observations.

        `final/mask/PATH` says what the true last observation allowed, in rows as `final/PATH`. A row that
        allows nothing says that this is not known.
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
        rows = {
            Axes.STEP: steps * slots,
            Axes.STEP_PLUS_ONE: (steps + 1) * slots,
            Axes.SLOT: slots,
            Axes.END: ends,
        }
        return sum(rule.bytes_per_row() * rows[rule.axes] for rule in self.tensors)

    def most_ends(self, steps: int, slots: int) -> int:
        """Return how many episodes may end in T steps of N slots before a message holds it no longer.

        The number can be negative.
        """
        rules = (*self.tensors, *self.optional.values())
        row = sum(rule.bytes_per_row() for rule in rules if rule.axes is Axes.END)
        return (payload_room(slots) - self.fragment_bytes(steps, slots, 0)) // max(row, 1)

    def to_proto(self) -> pb.FragmentSchema:
        """Return the message."""
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
        """Return the schema of a message.

        Raises ValueError that names the tensor for an unknown dtype or axes.
        """
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
    """Return the length of an action leaf's mask; 0: it takes none.

    The values of several choices stand behind one another.
    """
    match leaf:
        case Discrete():
            return leaf.n
        case MultiDiscrete():
            return sum(leaf.nvec)
        case _:
            return 0


def mask_rules(action: Space) -> tuple[TensorRule, ...]:
    """Return the rule of `mask/ACTION/PATH` for every leaf that takes a mask.

    Each is bool, true where allowed, and covers the observation after the step too.
    """
    return tuple(
        TensorRule(name=f"mask/{path}", dtype="bool", shape=(choices(leaf),), axes=Axes.STEP_PLUS_ONE)
        for path, leaf in leaves(action, "action")
        if choices(leaf)
    )


def state_rules(state: Space) -> tuple[TensorRule, ...]:
    """Return the rules of `state/PATH` before the first step, and of `begins`.

    The latter says that a row is the first of an episode.

    None for no state.
    """
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
