from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.fragment import Fragment, check, parse_header
from penstock.protocol.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    flatten,
    leaves,
    unflatten,
    zeros,
)
from penstock.protocol.spaces import from_proto as spaces_from_proto
from penstock.protocol.spaces import to_proto as spaces_to_proto
from penstock.protocol.tensor import DTYPES, from_tensor, read_array, to_tensor
from penstock.v1 import fragment_pb2 as pb
from penstock.v1 import tensor_pb2
from tests.support.experience.fragment_messages import (
    RUN,
    SCHEMA,
    arrays_of,
    fragment_of,
    from_proto,
    to_proto,
)

NAMES = sorted(SCHEMA.by_name)


@pytest.mark.promise("learner-reads-exactly-actor")
@given(
    steps=st.integers(1, 9),
    slots=st.integers(1, 5),
    ends=st.integers(0, 5),
    compress=st.sets(st.sampled_from(NAMES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_fragment_crosses_the_wire_unchanged(
    steps: int, slots: int, ends: int, compress: set[str], seed: int
) -> None:
    ends = min(ends, steps * slots)
    sent = fragment_of(steps=steps, slots=slots, ends=ends, compress=tuple(compress), seed=seed)
    got = from_proto(pb.Fragment.FromString(to_proto(sent).SerializeToString()))
    check(got, SCHEMA, RUN)
    assert got == sent
    expected, arrived = arrays_of(SCHEMA, steps, slots, ends, seed), got.arrays()
    assert list(expected) == list(arrived)
    for name, array in expected.items():
        assert array.dtype == arrived[name].dtype
        np.testing.assert_array_equal(array, arrived[name])


numbers = st.integers(0, 2**63) | st.sampled_from([0, 1, 59, 60, 61, 2**31, 2**32, 2**62])
ENTRY_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(NAMES) | st.text(max_size=20),
    "dtype": st.sampled_from([*DTYPES, "object", ""]),
    "shape": st.lists(numbers, max_size=10).map(tuple),
    "codec": st.sampled_from(["raw", "lz4", "zip", ""]),
    "stored_size": numbers,
    "raw_size": numbers,
    "offset": numbers,
}


@pytest.mark.promise("table-reads-outside-payload")
@given(data=st.data())
def test_a_changed_table_is_refused_or_stays_within_its_payload(data: st.DataObject) -> None:
    fragment = fragment_of(compress=("observation/camera",))
    index = data.draw(st.integers(0, len(fragment.header.tensors) - 1))
    field = data.draw(st.sampled_from(sorted(ENTRY_FIELDS)))
    changed = fragment.header.tensors[index]._replace(**{field: data.draw(ENTRY_FIELDS[field])})
    tensors = (*fragment.header.tensors[:index], changed, *fragment.header.tensors[index + 1 :])
    hostile = Fragment(replace(fragment.header, tensors=tensors), fragment.payload)
    try:
        check(hostile, SCHEMA, RUN)
        arrays = hostile.arrays()
    except ValueError:
        return
    assert {e.name: e.shape for e in tensors} == {name: array.shape for name, array in arrays.items()}


@given(
    position=st.floats(0, 1, exclude_max=True),
    value=st.integers(1, 255),
    compress=st.sampled_from([(), tuple(NAMES)]),
)
def test_a_flipped_payload_byte_is_refused_or_changes_only_its_place(
    position: float, value: int, compress: tuple[str, ...]
) -> None:
    fragment = fragment_of(compress=compress)
    payload = bytearray(fragment.payload)
    payload[int(position * len(payload))] ^= value
    damaged = replace(fragment, payload=bytes(payload))
    try:
        check(damaged, SCHEMA, RUN)
        arrays = damaged.arrays()
    except ValueError:
        return
    assert [array.shape for array in arrays.values()] == [e.shape for e in fragment.header.tensors]


@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_value_error(data: bytes) -> None:
    try:
        parse_header(data)
    except ValueError as error:
        assert str(error).startswith("header")


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 5), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_array_is_read_back_from_a_tensor(dtype: str, shape: list[int], seed: int) -> None:
    size = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
    raw = np.random.default_rng(seed).bytes(size)
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    array = read_array("x", raw, dtype, shape)
    assert from_tensor("x", to_tensor(array)).tobytes() == raw


@given(shape=st.lists(st.integers(-(2**63), 2**63), max_size=9), offset=st.integers(-(2**63), 2**63))
def test_no_shape_or_offset_reads_outside_the_bytes(shape: list[int], offset: int) -> None:
    data = bytes(64)
    try:
        array = read_array("x", data, "float32", shape, offset)
    except ValueError:
        return
    assert array.shape == tuple(shape)
    assert array.size == 0 or 0 <= offset <= offset + array.nbytes <= len(data)


boxes = st.builds(
    lambda shape, dtype: Box(np.zeros(shape, dtype), np.ones(shape, dtype)),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["float32", "float64", "uint8", "int64"]),
)
bare = (
    boxes
    | st.builds(Discrete, st.integers(1, 9), st.integers(-5, 5))
    | st.builds(MultiDiscrete, st.lists(st.integers(1, 9), max_size=3).map(tuple))
    | st.builds(MultiBinary, st.integers(1, 9))
)
keys = st.text("abc_", min_size=1, max_size=3)
spaces = st.recursive(
    bare,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3).map(lambda parts: Dict(tuple(parts.items())))
        | st.lists(inner, max_size=3).map(lambda parts: Tuple(tuple(parts)))
    ),
    max_leaves=6,
).filter(lambda space: len(spaces_to_proto(space).SerializeToString()) < 10_000)


@given(spaces)
def test_every_space_is_read_back_from_the_wire(space: Space) -> None:
    assert space == spaces_from_proto(
        "space", tensor_pb2.Space.FromString(spaces_to_proto(space).SerializeToString())
    )


@given(spaces)
def test_flattening_is_undone(space: Space) -> None:
    values = {path: zeros(leaf) for path, leaf in leaves(space, "x")}
    assert flatten(space, unflatten(space, values, "x"), "x") == values


@given(st.binary(max_size=100))
def test_any_message_gives_a_space_or_a_value_error(data: bytes) -> None:
    message = tensor_pb2.Space()
    try:
        message.MergeFromString(data)
    except Exception:  # noqa: BLE001 - what protobuf refuses never reaches us
        return
    try:
        spaces_from_proto("space", message)
    except ValueError as error:
        assert str(error)
