"""Fragment: T steps of N slots as one unit of transport, storage and accounting.

Header and payload are immutable values, which `penstock.protocol.conformance` checks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

import lz4.frame
import numpy as np
from google.protobuf.message import DecodeError

from penstock.protocol.limits import MAX_SLOTS, MAX_TENSORS
from penstock.protocol.tensor import DTYPES, Array, check_dtype, read_array
from penstock.v1 import fragment_pb2 as pb


class Kind(IntEnum):
    """What a fragment may be used for."""

    TRAIN = 1
    SHADOW = 2


class Slot(NamedTuple):
    """Tells where one column comes from: environment, episode and index of its first step."""

    slot_id: int
    episode_id: int
    first_step: int


class WeightSpan(NamedTuple):
    """Rows [start, start + length) of a slot were generated with (version, update)."""

    slot: int
    start: int
    length: int
    version: int
    update: int


class TensorEntry(NamedTuple):
    """Where a tensor lies in the payload and how; sizes and offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    stored_size: int
    raw_size: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHeader:
    """Description of T = `steps` steps of N = len(`slots`) slots."""

    run: str
    session: int
    sequence: int
    schema_id: str
    steps: int
    slots: tuple[Slot, ...]
    weights: tuple[WeightSpan, ...]
    tensors: tuple[TensorEntry, ...]
    policy: str = "default"
    kind: Kind = Kind.TRAIN
    created_us: int = 0
    round: int = 0
    group_id: str = ""
    attributes: bytes = b""

    @property
    def charge(self) -> int:
        """T·N, valid or not: what the fragment counts in every budget, in steps."""
        return self.steps * len(self.slots)

    @property
    def oldest_update(self) -> int:
        """Update count of the oldest weights it was generated with: what its staleness counts from."""
        return min(span.update for span in self.weights)

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.weights)

    @property
    def newest_version(self) -> int:
        return max(span.version for span in self.weights)


# ---- Payload: arrays packed behind one another, and read back as views without a copy.

RAW = "raw"
LZ4 = "lz4"
_FRAME_HEADER_BYTES = 19
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""A dtype puts its own name together each time."""


def pack(
    tensors: Mapping[str, Array], compress: Collection[str] = ()
) -> tuple[tuple[TensorEntry, ...], bytes]:
    """The tensor table and payload of arrays; names in `compress` are stored as lz4 frames."""
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
    return {entry.name: read_entry(entry, payload) for entry in header.tensors}


def read_entry(entry: TensorEntry, payload: bytes | memoryview) -> Array:
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


# ---- The header as a protobuf message and as the bytes that the log stores.

_KINDS: Final = {kind.value: kind for kind in Kind}


def _without_table(header: FragmentHeader) -> pb.FragmentHeader:
    return pb.FragmentHeader(
        run=header.run,
        policy=header.policy,
        kind=pb.Kind.ValueType(header.kind.value),
        session=header.session,
        sequence=header.sequence,
        schema_id=header.schema_id,
        created_us=header.created_us,
        steps=header.steps,
        slots=[
            pb.Slot(slot_id=s.slot_id, episode_id=s.episode_id, first_step=s.first_step) for s in header.slots
        ],
        weights=[
            pb.WeightSpan(slot=w.slot, start=w.start, length=w.length, version=w.version, update=w.update)
            for w in header.weights
        ],
        round=header.round,
        group_id=header.group_id,
        attributes=header.attributes,
    )


@lru_cache(maxsize=1024)
def _table_bytes(entries: tuple[TensorEntry, ...]) -> bytes:
    tensors = [pb.TensorEntry(**entry._asdict()) for entry in entries]
    return pb.FragmentHeader(tensors=tensors).SerializeToString()


def header_from_proto(message: pb.FragmentHeader) -> FragmentHeader:
    """Return the header of a message; raises ValueError for a kind that does not exist or too many rows."""
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise ValueError(f"header.kind={message.kind}: use TRAIN or SHADOW")
    if max(len(message.slots), len(message.weights)) > MAX_SLOTS or len(message.tensors) > MAX_TENSORS:
        raise ValueError(
            f"header: {len(message.slots)} slots, {len(message.weights)} spans, {len(message.tensors)} "
            f"tensors; at most {MAX_SLOTS}, {MAX_SLOTS} and {MAX_TENSORS}"
        )
    return FragmentHeader(
        run=message.run,
        policy=message.policy,
        kind=kind,
        session=message.session,
        sequence=message.sequence,
        schema_id=message.schema_id,
        created_us=message.created_us,
        steps=message.steps,
        slots=tuple(Slot(s.slot_id, s.episode_id, s.first_step) for s in message.slots),
        weights=tuple(WeightSpan(w.slot, w.start, w.length, w.version, w.update) for w in message.weights),
        tensors=_table(tuple(map(pb.TensorEntry.SerializeToString, message.tensors))),
        round=message.round,
        group_id=message.group_id,
        attributes=message.attributes,
    )


@lru_cache(maxsize=1024)
def _table(rows: tuple[bytes, ...]) -> tuple[TensorEntry, ...]:
    """Fragments of a run have the same few tables again and again."""
    return tuple(map(_entry, rows))


@lru_cache(maxsize=1024)
def _entry(encoded: bytes) -> TensorEntry:
    """And where tensors are compressed the same few rows of those that are not."""
    e = pb.TensorEntry.FromString(encoded)
    return TensorEntry(e.name, e.dtype, tuple(e.shape), e.codec, e.stored_size, e.raw_size, e.offset)


def header_bytes(header: FragmentHeader) -> bytes:
    """The header as the log stores it, and as it travels: its table comes last."""
    return _without_table(header).SerializeToString() + _table_bytes(header.tensors)


def parse_header(data: bytes) -> FragmentHeader:
    try:
        message = pb.FragmentHeader.FromString(data)
    except DecodeError as error:
        raise ValueError(f"header: {len(data)} bytes are not a FragmentHeader ({error})") from error
    return header_from_proto(message)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Header and payload."""

    header: FragmentHeader
    payload: bytes | memoryview

    def arrays(self) -> dict[str, Array]:
        return read_payload(self.header, self.payload)


def build(header: FragmentHeader, tensors: Mapping[str, Array], compress: Collection[str] = ()) -> Fragment:
    entries, payload = pack(tensors, compress)
    return Fragment(replace(header, tensors=entries), payload)


# ---- Where in which episodes a fragment's experience begins.

_VALID: Final = "valid"

Beginning = tuple[int, int, int]
"""Slot, episode, index of the first step in it."""


def beginnings(fragment: Fragment) -> tuple[Beginning, ...]:
    """Return one beginning for each slot with a valid step.

    A slot whose steps only reset its environment is left out: the fragment after it begins at the same step.
    Raises ValueError when the payload does not hold what the table describes.
    """
    named = tuple((slot.slot_id, slot.episode_id, slot.first_step) for slot in fragment.header.slots)
    entry = next((entry for entry in fragment.header.tensors if entry.name == _VALID), None)
    if entry is None:
        return named
    valid = read_entry(entry, fragment.payload)
    return tuple(name for column, name in enumerate(named) if valid[:, column].any())
