"""numpy arrays as bytes: a dtype allow-list, and every size checked before anything is allocated.

All bytes are row-major and little-endian. Reads are views of the bytes, never copies.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MAX_RANK
from penstock.v1 import tensor_pb2 as pb

Array = NDArray[np.generic]

DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    name: np.dtype(name)
    for name in (
        "bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64",
    )
}  # fmt: skip

FEW: Final = 32
"""Numbers that Python adds up sooner than numpy looks at them."""

FEW_BYTES: Final = 1024
"""Bytes that Python looks through sooner than numpy."""

if sys.byteorder != "little":
    raise ImportError("penstock speaks little-endian arrays and this machine is big-endian")


def all_finite(array: Array) -> bool:
    if array.size <= FEW:
        # Only finite numbers have a finite sum; where one overflows each is asked.
        numbers: list[Any] = array.ravel().tolist()
        if math.isfinite(sum(numbers)):
            return True
    return bool(np.isfinite(array).all())


def check_dtype(field: str, name: str) -> np.dtype[np.generic]:
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"{field}: dtype {name[:32]!r} is not one of {', '.join(DTYPES)}") from None


def check_shape(field: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple; raises ValueError for a rank or a product that no message may have."""
    if len(shape) > MAX_RANK:
        raise ValueError(f"{field}: rank {len(shape)} is above {MAX_RANK}")
    # Of an empty array, too: numpy makes none whose other axes are too large.
    count = math.prod(shape) or math.prod(length or 1 for length in shape)
    if any(length < 0 for length in shape) or count > MAX_MESSAGE_BYTES:
        raise ValueError(f"{field}: shape {tuple(shape)} has a negative or too large axis")
    return tuple(int(length) for length in shape)


def check_truth(field: str, data: bytes | memoryview, offset: int, count: int) -> None:
    if count <= FEW_BYTES:
        holds = not bytes(data[offset : offset + count]).translate(None, b"\0\1")
    else:
        holds = bool(np.frombuffer(data, np.uint8, count, offset).max() <= 1)
    if not holds:
        raise ValueError(f"{field}: holds a bool that is neither 0 nor 1")


def read_array(
    field: str, data: bytes | memoryview, dtype: str, shape: Sequence[int], offset: int = 0
) -> Array:
    """A read-only view of `data` from `offset`."""
    kind, checked = check_dtype(field, dtype), check_shape(field, shape)
    count = math.prod(checked)
    if offset < 0 or offset + count * kind.itemsize > len(data):
        raise ValueError(
            f"{field}: {count * kind.itemsize} bytes at {offset} are needed, {len(data)} are there"
        )
    if count == 0:
        return np.empty(checked, kind)
    if dtype == "bool":
        check_truth(field, data, offset, count)
    return np.frombuffer(data, kind, count, offset).reshape(checked)


def to_tensor(array: Array) -> pb.Tensor:
    """Return the message of an array; raises ValueError when its dtype is not allowed."""
    check_dtype("array", array.dtype.name)
    contiguous = np.ascontiguousarray(array)
    return pb.Tensor(dtype=array.dtype.name, shape=array.shape, data=contiguous.tobytes())


def from_tensor(field: str, message: pb.Tensor) -> Array:
    """Return a read-only view of the message's data, in its shape and dtype; raises ValueError by `field`."""
    array = read_array(field, message.data, message.dtype, message.shape)
    if array.nbytes != len(message.data):
        raise ValueError(f"{field}: {len(message.data)} bytes for {array.nbytes} of content")
    return array
