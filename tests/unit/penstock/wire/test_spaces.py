from typing import Any

import numpy as np
import pytest

from penstock.protocol.spaces import (
    MAX_DEPTH,
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

BOX = Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))
NESTED = Dict((("a", Tuple((Discrete(3, -1), BOX))), ("b", MultiBinary(4))))
SPACES: dict[str, Space] = {
    "box": BOX,
    "image": Box(np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)),
    "discrete": Discrete(3, -1),
    "multi discrete": MultiDiscrete((2, 5)),
    "multi binary": MultiBinary(4),
    "nested": NESTED,
    "empty dict": Dict(()),
    "empty tuple": Tuple(()),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_a_space_survives_the_wire(space: Space) -> None:
    assert space == from_proto("space", pb.Space.FromString(to_proto(space).SerializeToString()))


def test_boxes_are_equal_by_dtype_shape_and_bounds() -> None:
    assert Box(np.zeros(2, np.float32), np.ones(2, np.float32)) == Box(
        np.zeros(2, np.float32), np.ones(2, np.float32)
    )
    assert Box(np.zeros(2, np.float32), np.ones(2, np.float32)) != Box(np.zeros(2), np.ones(2))
    assert Box(np.zeros(2), np.ones(2)) != Box(np.zeros(2), np.full(2, 2.0))


def test_leaves_are_named_by_their_path() -> None:
    assert [path for path, _ in leaves(NESTED, "observation")] == [
        "observation/a/0",
        "observation/a/1",
        "observation/b",
    ]
    assert [path for path, _ in leaves(BOX, "observation")] == ["observation"]


def test_a_value_is_flattened_and_put_together_again() -> None:
    value: dict[str, Any] = {"a": (1, np.array([0.5, 2.0])), "b": np.array([0, 1, 0, 1])}
    flat = flatten(NESTED, value, "x")
    assert list(flat) == ["x/a/0", "x/a/1", "x/b"]
    back = unflatten(NESTED, flat, "x")
    assert back["a"][0] == 1
    assert back["a"][1] is value["a"][1]
    assert back["b"] is value["b"]


def test_zeros_have_the_shape_and_dtype_of_the_leaf() -> None:
    array = zeros(BOX, (5, 3))
    assert array.shape == (5, 3, 2)
    assert array.dtype == np.float32


def test_bounds_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="Box: low is"):
        Box(np.zeros(2), np.ones(3))


def deep(levels: int) -> pb.Space:
    """A tuple in a tuple in a tuple."""
    message = pb.Space(discrete=pb.Space.Discrete(n=2))
    for _ in range(levels):
        message = pb.Space(tuple=pb.Space.Tuple(spaces=[message]))
    return message


FAULTS: dict[str, tuple[pb.Space, str]] = {
    "no kind": (pb.Space(), "action_space: the space has no kind"),
    "no value": (pb.Space(discrete=pb.Space.Discrete(n=0)), r"Discrete\(n=0\) has no value"),
    "keys missing": (
        pb.Space(dict=pb.Space.Dict(keys=["a"], spaces=[])),
        "1 keys for 0 spaces",
    ),
    "too deep": (deep(MAX_DEPTH + 2), f"nests deeper than {MAX_DEPTH}"),
    "bounds without bytes": (
        pb.Space(box=pb.Space.Box(low=pb.Tensor(dtype="float32", shape=[2]))),
        "action_space.low: 8 bytes at 0 are needed",
    ),
}


@pytest.mark.parametrize(("message", "error"), FAULTS.values(), ids=FAULTS.keys())
def test_a_malformed_space_is_refused_by_name(message: pb.Space, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        from_proto("action_space", message)
