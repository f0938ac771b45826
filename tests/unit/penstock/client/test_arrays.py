"""Observations become parts, and parts become actions."""

from typing import Any

import numpy as np
import pytest

from penstock.client.calls import from_parts, rows_of, to_mask_parts, to_parts
from penstock.protocol import spaces
from penstock.protocol.tensor import from_tensor, to_tensor
from penstock.v1 import policy_pb2 as pb

POSITION = spaces.Box(np.full(3, -1, np.float32), np.full(3, 1, np.float32))
CAMERA = spaces.Box(np.zeros((2, 2), np.uint8), np.full((2, 2), 255, np.uint8))
ARM = spaces.Dict((("grip", spaces.Discrete(3, start=-1)), ("bits", spaces.MultiBinary(2))))
NESTED = spaces.Dict(
    (("camera", CAMERA), ("body", spaces.Tuple((POSITION, spaces.Discrete(4)))), ("arm", ARM))
)
VALUE = {
    "camera": [[0, 255], [1, 2]],
    "body": ([0.5, -0.5, 0.0], 3),
    "arm": {"grip": -1, "bits": np.array([True, False])},
}


def arrays(parts: list[pb.Part]) -> dict[str, np.ndarray[Any, Any]]:
    """What the parts hold."""
    return {part.path: from_tensor(part.path, part.value) for part in parts}


def test_a_nested_value_becomes_one_part_per_leaf_in_the_dtype_of_its_space() -> None:
    parts = arrays(to_parts("observation", NESTED, VALUE))
    assert {path: (array.dtype.name, array.shape) for path, array in parts.items()} == {
        "camera": ("uint8", (2, 2)),
        "body/0": ("float32", (3,)),
        "body/1": ("int64", ()),
        "arm/grip": ("int64", ()),
        "arm/bits": ("int8", (2,)),
    }
    assert parts["camera"].tolist() == [[0, 255], [1, 2]]
    assert parts["arm/bits"].tolist() == [1, 0]


def test_a_value_comes_back_in_the_form_of_its_space() -> None:
    back = from_parts("action", NESTED, to_parts("action", NESTED, VALUE))
    assert (back["body"][1], back["arm"]["grip"]) == (3, -1)
    assert isinstance(back["arm"]["grip"], int)
    assert isinstance(back["body"], tuple)
    back["camera"][0, 0] = 9


def test_a_batch_has_a_leading_axis_in_every_leaf() -> None:
    space = spaces.Tuple((POSITION, spaces.Discrete(4)))
    value = (np.zeros((5, 3)), [0, 1, 2, 3, 0])
    assert rows_of("observation", space, value) == 5
    parts = to_parts("observation", space, value, 5)
    assert {path: array.shape for path, array in arrays(parts).items()} == {"0": (5, 3), "1": (5,)}
    assert from_parts("action", space, parts, 5)[1].tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (POSITION, [0, 0], r"^observation: the shape is \(2,\), the space asks for \(3,\)"),
        (POSITION, ["a", "b", "c"], r"^observation: <U1 cannot become float32"),
        (POSITION, None, r"^observation: the shape is \(\)"),
        (spaces.Discrete(2), 0.5, "^observation: float64 cannot become int64"),
        (NESTED, VALUE | {"camera": np.full((2, 2), 256)}, "^observation/camera: int64 cannot become uint8"),
        (NESTED, VALUE | {"camera": np.full((2, 2), -1)}, "^observation/camera: int64 cannot become uint8"),
        (NESTED, VALUE | {"camera": [[1], [1, 2]]}, "^observation/camera: setting an array element"),
        (NESTED, VALUE | {"body": ([0, 0, 0],)}, "^observation: IndexError.*observation/body/1"),
        (NESTED, {"camera": VALUE["camera"]}, "^observation: KeyError.'body'.*observation/arm/grip"),
        (NESTED, 3, "^observation: TypeError"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_leaf(
    space: spaces.Space, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        to_parts("observation", space, value)


def test_a_batch_without_rows_or_with_uneven_ones_is_refused() -> None:
    space = spaces.Tuple((POSITION, spaces.Discrete(4)))
    with pytest.raises(ValueError, match=r"observation/0: a batch needs a leading axis"):
        rows_of("observation", space, (1.0, 2))
    with pytest.raises(ValueError, match=r"observation/0: a batch needs .* not \(0, 3\)"):
        rows_of("observation", space, (np.zeros((0, 3)), []))
    with pytest.raises(ValueError, match=r"observation/1: the shape is \(4,\), the space asks for \(5,\)"):
        to_parts("observation", space, (np.zeros((5, 3)), [0] * 4), 5)
    with pytest.raises(ValueError, match="without parts"):
        rows_of("observation", spaces.Dict(()), {})


def test_masks_are_for_discrete_parts_only() -> None:
    bare = to_mask_parts(spaces.Discrete(3), [1, 0, 1])
    assert arrays(bare)[""].tolist() == [True, False, True]
    assert arrays(to_mask_parts(ARM, {"grip": np.ones((2, 3), bool)}, 2))["grip"].shape == (2, 3)
    with pytest.raises(ValueError, match=r"\['bits'\] are no choices .* those are \['grip'\]"):
        to_mask_parts(ARM, {"bits": [True, True]})
    with pytest.raises(ValueError, match=r"mask/grip: the shape is \(2,\)"):
        to_mask_parts(ARM, {"grip": [True, True]})


def test_a_reply_with_other_parts_than_the_space_is_refused() -> None:
    with pytest.raises(ValueError, match=r"action: the parts are \[\], not \[''\]"):
        from_parts("action", POSITION, [])
    with pytest.raises(ValueError, match=r"action: the shape is \(2,\)"):
        from_parts("action", POSITION, [pb.Part(value=to_tensor(np.zeros(2, np.float32)))])
