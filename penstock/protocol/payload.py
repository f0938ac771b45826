"""Payload: arrays packed behind one another, and read back as views without a copy.

A tensor is stored raw or as one lz4 frame; sizes are checked before anything is decoded.
"""

from collections.abc import Collection, Mapping
from typing import Any

import lz4.frame
import numpy as np

from penstock.protocol.header import FragmentHeader, TensorEntry
from penstock.protocol.tensor import DTYPES, Array, check_dtype, read_array

RAW = "raw"
LZ4 = "lz4"
_FRAME_HEADER_BYTES = 19
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""A dtype puts its own name together each time."""


def pack(
    tensors: Mapping[str, Array], compress: Collection[str] = ()
) -> tuple[tuple[TensorEntry, ...], bytes]:
    """The tensor table and payload of arrays; names in `compress` are stored as lz4 frames.

    Raises ValueError when a dtype is not allowed.
    """
    entries: list[TensorEntry] = []
    chunks: list[Any] = []
    offset = 0
    for name, array in tensors.items():
        dtype = _NAMES.get(array.dtype) or check_dtype(name, array.dtype.name).name
        codec = LZ4 if name in compress else RAW
        stored, size = _store(array, codec)
        entries.append(TensorEntry(name, dtype, array.shape, codec, size, array.nbytes, offset))
        chunks.append(stored)
        offset += size
    return tuple(entries), b"".join(chunks)


def _store(array: Array, codec: str) -> tuple[Any, int]:
    # A view of an array without elements cannot be joined, and the view of a raw one needs no copy.
    raw = np.ascontiguousarray(array).data if array.size else b""
    if codec == RAW:
        return raw, array.nbytes
    frame = lz4.frame.compress(raw)
    return frame, len(frame)


def read_payload(header: FragmentHeader, payload: bytes | memoryview) -> dict[str, Array]:
    """Return every tensor by name, in the shape and dtype of the table.

    They are read-only views of `payload`, decoded copies where compressed. Raises ValueError when the payload
    does not hold what the table describes.
    """
    return {entry.name: read_entry(entry, payload) for entry in header.tensors}


def read_entry(entry: TensorEntry, payload: bytes | memoryview) -> Array:
    """One tensor of a payload; see `read_payload`."""
    if entry.codec == RAW:
        return read_array(entry.name, payload, entry.dtype, entry.shape, entry.offset)
    if entry.codec != LZ4:
        raise ValueError(f"{entry.name}: codec {entry.codec[:16]!r} is not one of {RAW}, {LZ4}")
    raw = _decode(entry, memoryview(payload)[entry.offset : entry.offset + entry.stored_size])
    return read_array(entry.name, raw, entry.dtype, entry.shape)


def check_frame(entry: TensorEntry, payload: bytes | memoryview) -> None:
    """Raise ValueError unless a compressed entry begins as an lz4 frame that promises `raw_size` bytes."""
    stored = memoryview(payload)[entry.offset : entry.offset + min(entry.stored_size, _FRAME_HEADER_BYTES)]
    try:
        promised = lz4.frame.get_frame_info(stored)["content_size"]
    except RuntimeError as error:
        raise ValueError(f"{entry.name}: not an lz4 frame ({error})") from error
    if promised != entry.raw_size:
        raise ValueError(f"{entry.name}: its frame promises {promised} bytes, {entry.raw_size} declared")


def _decode(entry: TensorEntry, stored: memoryview) -> bytes:
    decoder = lz4.frame.LZ4FrameDecompressor()
    try:
        # One byte more than declared is enough to see a frame that would decode to more.
        raw: bytes = decoder.decompress(stored, max_length=entry.raw_size + 1)
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{entry.name}: not an lz4 frame ({error})") from error
    if len(raw) != entry.raw_size:
        raise ValueError(f"{entry.name}: decodes to {len(raw)} bytes, {entry.raw_size} declared")
    return raw
