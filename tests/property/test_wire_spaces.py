import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    flatten,
    from_proto,
    leaves,
    to_proto,
    unflatten,
    zeros,
)
from penstock.v1 import tensor_pb2 as pb

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
).filter(lambda space: len(to_proto(space).SerializeToString()) < 10_000)


@given(spaces)
def test_every_space_survives_the_wire(space: Space) -> None:
    assert space == from_proto("space", pb.Space.FromString(to_proto(space).SerializeToString()))


@given(spaces)
def test_flattening_is_undone(space: Space) -> None:
    values = {path: zeros(leaf) for path, leaf in leaves(space, "x")}
    assert flatten(space, unflatten(space, values, "x"), "x") == values


@given(st.binary(max_size=100))
def test_any_message_is_a_space_or_a_value_error(data: bytes) -> None:
    message = pb.Space()
    try:
        message.MergeFromString(data)
    except Exception:  # noqa: BLE001 - what protobuf refuses never reaches us
        return
    try:
        from_proto("space", message)
    except ValueError as error:
        assert str(error)
