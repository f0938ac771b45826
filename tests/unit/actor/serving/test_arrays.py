"""What a client sends is read leaf by leaf, or refused with the leaf, what came and what is wanted."""

from typing import Any, Final

import numpy as np
import pytest

from penstock.actor.serving.requests import Layout
from penstock.protocol.refusal import Reason, Refused
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatten
from penstock.protocol.tensor import to_tensor
from penstock.v1 import policy_pb2 as pb
from penstock.v1.tensor_pb2 import Tensor

EVERY: Final = Dict((
    ("real", Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))),
    ("image", Box(np.zeros((2, 2), np.uint8), np.full((2, 2), 255, np.uint8))),
    ("one", Discrete(3, start=-1)),
    ("many", MultiDiscrete((2, 3))),
    ("bits", MultiBinary(3)),
    ("pair", Tuple((Discrete(2), Box(np.array(-1.0), np.array(1.0))))),
))  # fmt: skip
VALUE: Final = {
    "real": np.array([0.5, -2], np.float32),  # outside its bounds, as environments do
    "image": np.array([[0, 255], [7, 1]], np.uint8),
    "one": np.array(-1),
    "many": np.array([1, 2]),
    "bits": np.array([0, 1, 1], np.int8),
    "pair": (np.array(1), np.array(0.25)),
}
LAYOUT: Final = Layout("observation", EVERY)
NAMES: Final = "'real', 'image', 'one', 'many', 'bits', 'pair/0', 'pair/1'"


def sent(rows: int = 0, **changed: Any) -> list[pb.Part]:
    """VALUE as a message, `rows` times; other leaves where `changed` (pair_0: "pair/0")."""
    other = {name.replace("_", "/"): value for name, value in changed.items()}
    values = flatten(EVERY, VALUE) | other
    return [pb.Part(path=path, value=_tensor(value, rows)) for path, value in values.items()]


def _tensor(value: Any, rows: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return to_tensor(np.stack([value] * rows) if rows else np.asarray(value))


def refused(parts: list[pb.Part], batch: int = 0) -> str:
    """Why."""
    with pytest.raises(Refused) as error:
        LAYOUT.read("observation", parts, batch)
    assert error.value.refusal.reason is Reason.INVALID
    return error.value.refusal.detail


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_every_kind_of_leaf_is_read_and_written_back(batch: int) -> None:
    parts = sent(batch)
    arrays = LAYOUT.read("observation", parts, batch)
    for name, value in flatten(EVERY, VALUE, "observation").items():
        np.testing.assert_array_equal(arrays[name], np.stack([value] * max(batch, 1)))
        assert arrays[name].dtype == np.asarray(value).dtype
    assert LAYOUT.write(arrays, batch) == parts


@pytest.mark.parametrize(
    ("leaf", "value", "said"),
    [
        ("real", np.zeros(2), "observation/real: float64(2,) came, float32(2,) is wanted"),
        ("real", np.zeros(3, np.float32), "observation/real: float32(3,) came, float32(2,) is wanted"),
        ("real", np.zeros((1, 2), np.float32), "float32(1, 2) came, float32(2,) is wanted"),
        ("real", np.array([0, np.nan], np.float32), "observation/real: holds NaN or infinity"),
        ("real", np.array([-np.inf, 0], np.float32), "observation/real: holds NaN or infinity"),
        (
            "real",
            np.array([0, -1001], np.float32),
            "observation/real: holds -1001, outside ±1000",
        ),
        ("real", Tensor(dtype="float32", shape=[2], data=bytes(7)), "8 bytes at 0 are needed, 7 are there"),
        ("real", Tensor(dtype="float32", shape=[2], data=bytes(9)), "9 bytes for 8 of content"),
        ("real", Tensor(dtype="object", shape=[2], data=bytes(8)), "observation/real: dtype 'object'"),
        ("real", Tensor(dtype="float32", shape=[1] * 9, data=bytes(4)), "observation/real: rank 9"),
        ("real", Tensor(dtype="float32", shape=[2**40], data=b""), "too large axis"),
        ("real", Tensor(), "observation/real: dtype ''"),
        ("image", np.zeros((2, 2), np.int8), "observation/image: int8(2, 2) came, uint8(2, 2) is wanted"),
        ("one", np.array(-2), "observation/one: holds -2, outside Discrete(n=3, start=-1"),
        ("one", np.array(2), "observation/one: holds 2, outside Discrete(n=3, start=-1"),
        ("one", np.array(1.0), "observation/one: float64() came, int64() is wanted"),
        ("many", np.array([1, 3]), "observation/many: holds 3, outside MultiDiscrete(nvec=(2, 3)"),
        ("many", np.array([2, 0]), "observation/many: holds 2"),
        ("bits", np.array([0, 2, 0], np.int8), "observation/bits: holds 2, outside MultiBinary(n=3"),
        ("pair_0", np.array(2), "observation/pair/0: holds 2"),
        ("pair_1", np.array(np.inf), "observation/pair/1: holds NaN or infinity"),
    ],
)
def test_a_wrong_leaf_is_named_with_what_is_wanted(leaf: str, value: Any, said: str) -> None:
    assert said in refused(sent(**{leaf: value}))


def test_every_part_must_be_there_once() -> None:
    parts = sent()
    assert f"6 parts, the space has {NAMES}" in refused(parts[1:])
    assert f"'real' is unknown or twice; give {NAMES}" in refused([parts[0], *parts[:-1]])
    parts[0].path = "depth"
    assert f"'depth' is unknown or twice; give {NAMES}" in refused(parts)
    parts[0].path = "x" * 10_000
    assert len(refused(parts)) < 300


@pytest.mark.parametrize("batch", [2, 4])
def test_rows_must_be_as_many_as_the_batch_says(batch: int) -> None:
    assert f"float32(3, 2) came, float32({batch}, 2) is wanted" in refused(sent(3), batch)


def test_one_bad_row_of_a_batch_is_enough() -> None:
    parts = sent(3)
    parts[2].value.CopyFrom(to_tensor(np.array([0, 1, 7])))
    assert "observation/one: holds 7" in refused(parts, 3)


# ---------------------------------------------------------------- masks

ACTIONS: Final = Layout(
    "action",
    Dict((("move", Discrete(3, start=5)), ("force", MultiDiscrete((2, 2))), ("hold", MultiBinary(2)))),
)


def mask(path: str = "move", value: Any = (True, False, True)) -> list[pb.Part]:
    """One mask."""
    return [pb.Part(path=path, value=to_tensor(np.asarray(value)))]


def test_masks_are_read_by_the_name_of_their_action() -> None:
    assert ACTIONS.read_masks([], 0) == {}
    single = ACTIONS.read_masks(mask(), 0)
    assert single is not None
    assert single["action/move"].tolist() == [[True, False, True]]
    rows = [[True, False, False], [False, True, True]]
    several = ACTIONS.read_masks(mask(value=rows), 2)
    assert several is not None
    assert several["action/move"].tolist() == rows
    choices = ACTIONS.read_masks(mask("force", [True, False, False, True]), 0)
    assert choices is not None
    assert choices["action/force"].tolist() == [[True, False, False, True]]


@pytest.mark.parametrize(
    ("parts", "batch", "said"),
    [
        (mask("hold"), 0, "no mask for 'hold'; leaves that take one: 'move', 'force'"),
        (mask("jump"), 0, "no mask for 'jump'; leaves that take one: 'move', 'force'"),
        (mask("force"), 0, "action_mask/force: bool(3,) came, bool(4,) is wanted"),
        (mask("force", [True, False, False, False]), 0, "action_mask/force: allows nothing"),
        (mask(value=[True, False]), 0, "action_mask/move: bool(2,) came, bool(3,) is wanted"),
        (mask(value=[1, 0, 1]), 0, "action_mask/move: int64(3,) came, bool(3,) is wanted"),
        (mask(), 2, "action_mask/move: bool(3,) came, bool(2, 3) is wanted"),
        (mask(value=[False] * 3), 0, "action_mask/move: allows nothing"),
        (mask(value=[[True] * 3, [False] * 3]), 2, "action_mask/move: allows nothing"),
        (
            [pb.Part(path="move", value=Tensor(dtype="bool", shape=[3], data=b"\1\2\0"))],
            0,
            "holds a bool that is neither 0 nor 1",
        ),
    ],
)
def test_a_wrong_mask_is_named_with_what_is_wanted(parts: list[pb.Part], batch: int, said: str) -> None:
    with pytest.raises(Refused) as error:
        ACTIONS.read_masks(parts, batch)
    assert said in error.value.refusal.detail
    assert error.value.refusal.reason is Reason.INVALID


def test_a_space_without_choices_takes_no_mask() -> None:
    with pytest.raises(Refused, match="leaves that take one: none"):
        Layout("action", MultiBinary(2)).read_masks(mask(""), 0)
