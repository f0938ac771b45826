"""Fragments as the messages of the protocol; the services read and write their bytes without these."""

import numpy as np

from penstock.protocol.append import SentFragment
from penstock.protocol.fragment import (
    Fragment,
    FragmentHeader,
    Slot,
    WeightSpan,
    build,
    header_bytes,
    header_from_proto,
)
from penstock.protocol.schema import Axes, FragmentSchema, fragment_schema
from penstock.protocol.spaces import Box, Dict, Discrete
from penstock.protocol.tensor import Array
from penstock.v1 import fragment_pb2 as pb


def to_proto(fragment: Fragment) -> pb.Fragment:
    return pb.Fragment(
        header=pb.FragmentHeader.FromString(header_bytes(fragment.header)), payload=bytes(fragment.payload)
    )


def from_proto(message: pb.Fragment) -> Fragment:
    """Return the fragment of a message; raises ValueError as `header_from_proto` does."""
    return Fragment(header_from_proto(message.header), message.payload)


def sent(fragment: Fragment) -> SentFragment:
    return SentFragment(
        pb.FragmentHeader.FromString(header_bytes(fragment.header)), memoryview(fragment.payload)
    )


RUN = "cartpole-v1-x"
OBSERVATION = Dict(
    (
        ("camera", Box(np.zeros((2, 3), np.uint8), np.full((2, 3), 255, np.uint8))),
        ("joint", Box(np.full(4, -1, np.float32), np.full(4, 1, np.float32))),
    )
)
SCHEMA = fragment_schema(OBSERVATION, Discrete(2))


def arrays_of(
    schema: FragmentSchema, steps: int, slots: int, ends: int = 1, seed: int = 0
) -> dict[str, Array]:
    leading = {
        Axes.STEP: (steps, slots),
        Axes.STEP_PLUS_ONE: (steps + 1, slots),
        Axes.SLOT: (slots,),
        Axes.END: (ends,),
    }
    random = np.random.default_rng(seed)
    return {
        rule.name: random.integers(0, 2, (*leading[rule.axes], *rule.shape)).astype(rule.dtype)
        for rule in schema.tensors
    }


def header_of(schema: FragmentSchema, steps: int, slots: int) -> FragmentHeader:
    return FragmentHeader(
        run=RUN,
        session=7,
        sequence=3,
        schema_id=schema.schema_id,
        steps=steps,
        slots=tuple(Slot(index, 11 + index, 5) for index in range(slots)),
        weights=(WeightSpan(0, 0, steps, 4, 2),),
        tensors=(),
        created_us=1_700_000_000_000_000,
        round=9,
        group_id="task-1",
        attributes=b"\x00\xff",
    )


def fragment_of(
    *, steps: int = 5, slots: int = 3, ends: int = 1, compress: tuple[str, ...] = (), seed: int = 0
) -> Fragment:
    arrays = arrays_of(SCHEMA, steps, slots, ends, seed)
    return build(header_of(SCHEMA, steps, slots), arrays, compress)
