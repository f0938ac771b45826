"""Observations, actions and distributions between messages and arrays, checked leaf by leaf.

What a client sends is refused (INVALID) with the leaf, what came and what is wanted, before anything is
computed or remembered.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.ranges import Range, drawn, observed
from penstock.protocol.refusal import Refused, invalid
from penstock.protocol.schema import choices
from penstock.protocol.spaces import Box, Leaf, MultiDiscrete, Space, leaves
from penstock.protocol.tensor import DTYPES, Array, from_tensor
from penstock.v1 import policy_pb2 as pb
from penstock.v1 import tensor_pb2

Parts = Sequence[pb.Part]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One leaf. path: as clients write it.   name: of the tensor, "observation/camera".

    range: what a learner would take; None where the dtype holds no other number.
    """

    path: str
    name: str
    leaf: Leaf
    dtype: str
    numpy_dtype: "np.dtype[np.generic]"
    shape: tuple[int, ...]
    row_bytes: int
    range: Range | None


class Layout:
    """The leaves of a space under `root`, "observation" or "action"."""

    def __init__(self, root: str, space: Space) -> None:
        self.root = root
        wanted = (_wanted(root, name, leaf) for name, leaf in leaves(space, root))
        self._wanted = {one.path: one for one in wanted}
        self._masks = {
            path: choices(wanted.leaf) for path, wanted in self._wanted.items() if choices(wanted.leaf)
        }

    def read(self, field: str, parts: Parts, batch: int) -> dict[str, Array]:
        """Arrays [max(batch, 1), *shape] by tensor name.

        Raises Refused for anything that is not the space's.
        """
        if len(parts) != len(self._wanted):
            raise invalid(f"{field}: {len(parts)} parts, the space has {self._named()}")
        arrays: dict[str, Array] = {}
        for part in parts:
            wanted = self._wanted.get(part.path)
            if wanted is None or wanted.name in arrays:
                raise invalid(f"{field}: part {part.path[:80]!r} is unknown or twice; give {self._named()}")
            arrays[wanted.name] = _read(field, part.value, wanted, batch)
        return arrays

    def read_masks(self, parts: Parts, batch: int) -> dict[str, NDArray[np.bool_]] | None:
        """Bool [max(batch, 1), n] by tensor name, true where allowed; None for no masks."""
        if not parts:
            return None
        masks: dict[str, NDArray[np.bool_]] = {}
        for part in parts:
            if part.path not in self._masks:
                known = ", ".join(map(repr, self._masks)) or "none"
                raise invalid(f"action_mask: no mask for {part.path[:80]!r}; leaves that take one: {known}")
            shape = _lead(batch, (self._masks[part.path],))
            mask = _array(f"action_mask/{part.path}", part.value, "bool", shape)
            rows: NDArray[Any] = mask.reshape(-1, shape[-1])
            if not all(piece.any(-1).all() for piece in self._choices_of(part.path, rows)):
                raise invalid(f"action_mask/{part.path}: allows nothing; allow at least one action")
            masks[self._wanted[part.path].name] = rows
        return masks

    def _choices_of(self, path: str, rows: NDArray[Any]) -> list[NDArray[Any]]:
        leaf = self._wanted[path].leaf
        return np.split(rows, np.cumsum(leaf.nvec)[:-1], -1) if isinstance(leaf, MultiDiscrete) else [rows]

    def write(self, arrays: Mapping[str, Array], batch: int) -> list[pb.Part]:
        """The parts of arrays [max(batch, 1), *shape] by tensor name."""
        return [
            _part(wanted.path, arrays[wanted.name], wanted.dtype, batch) for wanted in self._wanted.values()
        ]

    def write_described(self, described: Mapping[str, NDArray[np.floating]], batch: int) -> list[pb.Part]:
        """The parts of a distribution [max(batch, 1), size] by name, "action/probability"."""
        return [
            _part(name.removeprefix(self.root).removeprefix("/"), array.astype(np.float32), "float32", batch)
            for name, array in described.items()
        ]

    def _named(self) -> str:
        return ", ".join(map(repr, self._wanted))


def _wanted(root: str, name: str, leaf: Leaf) -> _Wanted:
    path, dtype, shape = name.removeprefix(root).removeprefix("/"), DTYPES[leaf.dtype], leaf.shape
    # Choices come as the environment takes them, real numbers as they were drawn.
    known = drawn(leaf) if root == "action" and isinstance(leaf, Box) else observed(leaf)
    row_bytes = math.prod(shape) * dtype.itemsize
    return _Wanted(path, name, leaf, leaf.dtype, dtype, shape, row_bytes, known)


def _lead(batch: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (batch, *shape) if batch else shape


def _array(field: str, message: tensor_pb2.Tensor, dtype: str, shape: tuple[int, ...]) -> Array:
    try:
        array = from_tensor(field, message)
    except ValueError as error:
        raise invalid(str(error)) from error
    if message.dtype != dtype or array.shape != shape:
        raise invalid(f"{field}: {message.dtype}{array.shape} came, {dtype}{shape} is wanted")
    return array


def _read(field: str, message: tensor_pb2.Tensor, wanted: _Wanted, batch: int) -> Array:
    rows = _as_wanted(message, wanted, batch)
    if rows is None:
        array = _array(f"{field}/{wanted.path}", message, wanted.dtype, _lead(batch, wanted.shape))
        rows = array if batch else array[np.newaxis]
    if wanted.range is not None and not wanted.range.holds(rows):
        raise _outside(f"{field}/{wanted.path}", rows, wanted.range)
    return rows


def _as_wanted(message: tensor_pb2.Tensor, wanted: _Wanted, batch: int) -> Array | None:
    """The rows of a message that is as it should be: looked at once, for this is done for every request."""
    data, rows, shape = message.data, batch or 1, wanted.shape
    if message.dtype != wanted.dtype or wanted.dtype == "bool" or message.shape != [*_lead(batch, shape)]:
        return None
    if not len(data) == wanted.row_bytes * rows > 0:
        return None
    return np.ndarray((rows, *shape), wanted.numpy_dtype, data)


def _outside(field: str, rows: Array, known: Range) -> Refused:
    place = known.first_outside(rows)
    value: Any = rows[place]
    if not math.isfinite(value):
        return invalid(f"{field}: holds NaN or infinity; send finite numbers")
    return invalid(
        f"{field}: holds {value:g}, outside {known.around(rows, place)}; send what the space holds"
    )


def _part(path: str, array: Array, dtype: str, batch: int) -> pb.Part:
    rows = array if batch else array[0]
    tensor = tensor_pb2.Tensor(dtype=dtype, shape=rows.shape, data=rows.tobytes())
    return pb.Part(path=path, value=tensor)
