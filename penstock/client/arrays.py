"""Convert observations and actions to parts of a message, and back.

A value is cast to the dtype of its space where numpy calls that the same kind (float64 to float32, integers
to floats) and, between integers, where every number survives; otherwise ValueError names the leaf, as it does
for a wrong shape or a missing part.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from penstock.protocol.schema import choices
from penstock.protocol.spaces import Discrete, Leaf, MultiBinary, Space, flatten, leaves, unflatten
from penstock.protocol.tensor import Array, from_tensor, to_tensor
from penstock.v1 import policy_pb2 as pb

_INTEGERS: Final = "biu"
"""Kinds of the dtypes that hold whole numbers."""


def rows_of(field: str, space: Space, value: Any) -> int:
    """Return the number B of rows of a batch in the form of `space`.

    Raises ValueError where there is no leading axis, or an empty one.
    """
    for path, part in _flat(field, space, value).items():
        array = _array(path, part)
        if not array.ndim or not len(array):
            raise ValueError(f"{path}: a batch needs a leading axis with at least one row, not {array.shape}")
        return len(array)
    raise ValueError(f"{field}: a space without parts has no batches")


def to_parts(field: str, space: Space, value: Any, rows: int = 0) -> list[pb.Part]:
    """Return a part for every leaf of a value; raises ValueError for a value that is not of the space.

    field: name of the value, for messages. rows: length of the leading axis of each leaf, 0 for none.
    """
    flat = _flat(field, space, value)
    return [
        pb.Part(path=path, value=to_tensor(_cast(name, leaf, part, rows)))
        for (path, leaf), (name, part) in zip(leaves(space), flat.items(), strict=True)
    ]


def to_mask_parts(space: Space, mask: Any, rows: int = 0) -> list[pb.Part]:
    """Return the parts that say which choices of an action are allowed.

    mask: one mask for a bare space of choices, or masks by path. Raises ValueError for any other.
    """
    masks: Mapping[str, Any] = mask if isinstance(mask, Mapping) else {"": mask}
    wanted = {path: MultiBinary(choices(leaf), "bool") for path, leaf in leaves(space) if choices(leaf)}
    if not masks.keys() <= wanted.keys():
        raise ValueError(
            f"mask: {sorted(masks.keys() - wanted.keys())} are no choices of the action space; "
            f"those are {sorted(wanted)}"
        )
    return [
        pb.Part(path=path, value=to_tensor(_cast(_join("mask", path), wanted[path], part, rows)))
        for path, part in masks.items()
    ]


def to_plain_parts(values: Mapping[str, Array]) -> list[pb.Part]:
    """Return a part for each array, by path, in the array's own dtype and shape."""
    return [pb.Part(path=path, value=to_tensor(np.asarray(value))) for path, value in values.items()]


def from_parts(field: str, space: Space, parts: Iterable[pb.Part], rows: int = 0) -> Any:
    """Return a value in the form of `space`, writable; a Discrete leaf without rows is an int.

    Raises ValueError when a part is missing, foreign or of another shape.
    """
    arrays = from_plain_parts(field, parts)
    expected = dict(leaves(space))
    if arrays.keys() != expected.keys():
        raise ValueError(f"{field}: the parts are {sorted(arrays)}, not {sorted(expected)}")
    values = {path: _native(_join(field, path), leaf, arrays[path], rows) for path, leaf in expected.items()}
    return unflatten(space, values)


def from_plain_parts(field: str, parts: Iterable[pb.Part]) -> dict[str, Array]:
    """Return arrays by path, writable."""
    return {part.path: from_tensor(_join(field, part.path), part.value).copy() for part in parts}


def _flat(field: str, space: Space, value: Any) -> dict[str, Any]:
    try:
        return flatten(space, value, field)
    except (LookupError, TypeError) as error:
        paths = ", ".join(path for path, _ in leaves(space, field))
        raise ValueError(f"{field}: {error!r}; the space has {paths}") from error


def _array(name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _cast(name: str, leaf: Leaf, value: Any, rows: int) -> Array:
    array, dtype = _array(name, value), np.dtype(leaf.dtype)
    shape = (rows, *leaf.shape) if rows else leaf.shape
    if array.shape != shape:
        raise ValueError(f"{name}: the shape is {array.shape}, the space asks for {shape}")
    if not _is_safe(array, dtype):
        raise ValueError(f"{name}: {array.dtype} cannot become {dtype} without loss; convert it first")
    return array.astype(dtype, copy=False)


def _is_safe(array: Array, dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind in _INTEGERS and dtype.kind in _INTEGERS:
        return array.dtype == dtype or bool(np.array_equal(array.astype(dtype), array))
    return np.can_cast(array.dtype, dtype, "same_kind")


def _native(name: str, leaf: Leaf, array: Array, rows: int) -> Any:
    shape = (rows, *leaf.shape) if rows else leaf.shape
    if array.shape != shape:
        raise ValueError(f"{name}: the shape is {array.shape}, the space asks for {shape}")
    return array.item() if isinstance(leaf, Discrete) and not rows else array


def _join(field: str, path: str) -> str:
    return f"{field}/{path}" if path else field
