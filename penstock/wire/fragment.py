"""Fragment: header, tensor table and payload, as frozen dataclasses.

T steps of N slots. `build` packs arrays, `check` holds one against the run's schema, `arrays`
gives zero-copy views. The broker reads header and table and never the payload, but for `reward`
and `log_prob`, which must be finite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import lz4.frame
import numpy as np

from penstock.v1 import fragment_pb2 as pb
from penstock.wire.ids import check_id
from penstock.wire.limits import (
    MAX_ATTRIBUTES_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NAME_LENGTH,
    MAX_SLOTS,
    MAX_STEPS,
    MAX_TENSORS,
)
from penstock.wire.schema import Axes, FragmentSchema
from penstock.wire.tensor import Array, check_dtype, check_shape, read_array

FINITE_TENSORS = ("reward", "log_prob")


class Kind(IntEnum):
    """What a fragment may be used for."""

    TRAIN = 1
    SHADOW = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one column comes from: environment, episode and index of its first step."""

    slot_id: int
    episode_id: int
    first_step: int


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Rows [start, start + length) of a slot were generated with (version, update)."""

    slot: int
    start: int
    length: int
    version: int
    update: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in the payload and how."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    stored_size: int
    raw_size: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHeader:
    """Everything about a fragment but its bytes; field meanings in `fragment.proto`."""

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
    traceparent: str = ""
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
        """Oldest weight version it was generated with."""
        return min(span.version for span in self.weights)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Header and payload."""

    header: FragmentHeader
    payload: bytes

    def arrays(self) -> dict[str, Array]:
        """Every tensor by name: read-only views of the payload, decoded copies where compressed.

        Raises ValueError when a compressed tensor does not decode to the size that it declares.
        """
        return read_payload(self.header, self.payload)


def read_payload(header: FragmentHeader, payload: bytes | memoryview) -> dict[str, Array]:
    """Every tensor of a payload by name; see `Fragment.arrays`."""
    return {entry.name: _read(entry, payload) for entry in header.tensors}


def _read(entry: TensorEntry, payload: bytes | memoryview) -> Array:
    if entry.codec == "raw":
        return read_array(entry.name, payload, entry.dtype, entry.shape, entry.offset)
    stored = memoryview(payload)[entry.offset : entry.offset + entry.stored_size]
    decoder = lz4.frame.LZ4FrameDecompressor()
    try:
        raw = decoder.decompress(stored, max_length=entry.raw_size + 1)
    except RuntimeError as error:
        raise ValueError(f"{entry.name}: not an lz4 frame ({error})") from error
    if len(raw) != entry.raw_size:
        raise ValueError(f"{entry.name}: decodes to {len(raw)} bytes, {entry.raw_size} declared")
    return read_array(entry.name, raw, entry.dtype, entry.shape)


def build(header: FragmentHeader, tensors: Mapping[str, Array], compress: Sequence[str] = ()) -> Fragment:
    """Pack arrays behind one another; names in `compress` are stored as lz4 frames.

    header: with any `tensors`; they are replaced by the table of what is packed.
    """
    entries, chunks, offset = [], [], 0
    for name, array in tensors.items():
        contiguous = np.ascontiguousarray(array)
        codec = "lz4" if name in compress else "raw"
        stored: Any = contiguous.data if codec == "raw" else lz4.frame.compress(contiguous.data)
        if codec == "raw" and contiguous.nbytes == 0:
            stored = b""
        size = contiguous.nbytes if codec == "raw" else len(stored)
        entries.append(
            TensorEntry(name, array.dtype.name, array.shape, codec, size, contiguous.nbytes, offset)
        )
        chunks.append(stored)
        offset += size
    return Fragment(replace(header, tensors=tuple(entries)), b"".join(chunks))


def check(fragment: Fragment, schema: FragmentSchema, run: str) -> None:
    """Raise ValueError that names field, value and remedy unless the fragment follows the schema."""
    header = fragment.header
    if header.run != run:
        raise ValueError(f"header.run={header.run[:80]!r}: this broker serves {run!r}")
    check_id("header.policy", header.policy)
    if header.schema_id != schema.schema_id:
        raise ValueError(f"header.schema_id={header.schema_id[:12]}…: the run's is {schema.schema_id[:12]}…")
    if header.session < 1 or header.sequence < 1:
        raise ValueError(f"header.session={header.session}, sequence={header.sequence}: both start at 1")
    if not 1 <= header.steps <= MAX_STEPS or not 1 <= len(header.slots) <= MAX_SLOTS:
        raise ValueError(
            f"header: T={header.steps} and N={len(header.slots)} must be 1..{MAX_STEPS} and 1..{MAX_SLOTS}"
        )
    if len(header.attributes) > MAX_ATTRIBUTES_BYTES:
        raise ValueError(f"header.attributes: {len(header.attributes)} bytes, {MAX_ATTRIBUTES_BYTES} allowed")
    if max(len(header.group_id), len(header.traceparent)) > MAX_NAME_LENGTH:
        raise ValueError(f"header.group_id or traceparent is longer than {MAX_NAME_LENGTH}")
    _check_weights(header)
    _check_table(fragment, schema)
    for name in FINITE_TENSORS:
        array = _read(next(e for e in header.tensors if e.name == name), fragment.payload)
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: holds NaN or infinity; send finite numbers")


def _check_weights(header: FragmentHeader) -> None:
    if not 1 <= len(header.weights) <= MAX_SLOTS:
        raise ValueError(f"header.weights: {len(header.weights)} spans, at least one is needed")
    for span in header.weights:
        if span.version < 1 or span.start + span.length > header.steps or span.length < 1:
            raise ValueError(f"header.weights: span {span} does not fit T={header.steps}")


def _check_table(fragment: Fragment, schema: FragmentSchema) -> None:
    header = fragment.header
    names = [entry.name for entry in header.tensors]
    if len(names) > MAX_TENSORS or len(set(names)) != len(names) or set(names) != set(schema.by_name):
        missing, foreign = set(schema.by_name) - set(names), set(names) - set(schema.by_name)
        raise ValueError(f"tensors: missing {sorted(missing)}, not in the schema {sorted(foreign)[:4]}")
    steps, slots = header.steps, len(header.slots)
    leading = {Axes.STEP: (steps, slots), Axes.STEP_PLUS_ONE: (steps + 1, slots), Axes.SLOT: (slots,)}
    ends: int | None = None
    offset = 0
    for entry in header.tensors:
        rule = schema.by_name[entry.name]
        if entry.dtype != rule.dtype:
            raise ValueError(f"{entry.name}: dtype {entry.dtype}, the schema says {rule.dtype}")
        shape = check_shape(entry.name, entry.shape)
        if rule.axes is Axes.END and shape:
            ends = shape[0] if ends is None else ends
            expected: tuple[int, ...] = (ends, *rule.shape)
        else:
            expected = (*leading.get(rule.axes, ()), *rule.shape)
        if shape != expected:
            raise ValueError(f"{entry.name}: shape {shape}, the schema says {expected}")
        raw = int(np.prod(shape, dtype=np.int64)) * check_dtype(entry.name, entry.dtype).itemsize
        if entry.raw_size != raw or entry.codec not in ("raw", "lz4") or entry.raw_size > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"{entry.name}: raw_size {entry.raw_size} with codec {entry.codec[:16]!r}, {raw} expected"
            )
        if entry.codec == "raw" and entry.stored_size != raw:
            raise ValueError(f"{entry.name}: stored_size {entry.stored_size}, {raw} expected")
        if entry.offset != offset:
            raise ValueError(f"{entry.name}: offset {entry.offset}, {offset} expected")
        offset += entry.stored_size
    if offset != len(fragment.payload):
        raise ValueError(f"payload: {len(fragment.payload)} bytes, the table describes {offset}")
    if ends is not None and ends > steps * slots:
        raise ValueError(f"final: {ends} ended episodes in {steps * slots} steps")


def header_to_proto(header: FragmentHeader) -> pb.FragmentHeader:
    """The message of a header."""
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
        tensors=[
            pb.TensorEntry(
                name=e.name,
                dtype=e.dtype,
                shape=e.shape,
                codec=e.codec,
                stored_size=e.stored_size,
                raw_size=e.raw_size,
                offset=e.offset,
            )
            for e in header.tensors
        ],
        round=header.round,
        traceparent=header.traceparent,
        group_id=header.group_id,
        attributes=header.attributes,
    )


def header_from_proto(message: pb.FragmentHeader) -> FragmentHeader:
    """The header of a message; raises ValueError for a kind that does not exist or too many rows."""
    if message.kind not in (1, 2):
        raise ValueError(f"header.kind={message.kind}: use TRAIN or SHADOW")
    if max(len(message.slots), len(message.weights)) > MAX_SLOTS or len(message.tensors) > MAX_TENSORS:
        raise ValueError(
            f"header: {len(message.slots)} slots, {len(message.weights)} spans, {len(message.tensors)} tensors; "
            f"at most {MAX_SLOTS}, {MAX_SLOTS} and {MAX_TENSORS}"
        )
    return FragmentHeader(
        run=message.run,
        policy=message.policy,
        kind=Kind(message.kind),
        session=message.session,
        sequence=message.sequence,
        schema_id=message.schema_id,
        created_us=message.created_us,
        steps=message.steps,
        slots=tuple(Slot(s.slot_id, s.episode_id, s.first_step) for s in message.slots),
        weights=tuple(WeightSpan(w.slot, w.start, w.length, w.version, w.update) for w in message.weights),
        tensors=tuple(
            TensorEntry(e.name, e.dtype, tuple(e.shape), e.codec, e.stored_size, e.raw_size, e.offset)
            for e in message.tensors
        ),
        round=message.round,
        traceparent=message.traceparent,
        group_id=message.group_id,
        attributes=message.attributes,
    )


def header_bytes(header: FragmentHeader) -> bytes:
    """The header as the log stores it."""
    return header_to_proto(header).SerializeToString()


def parse_header(data: bytes) -> FragmentHeader:
    """Inverse of `header_bytes`."""
    return header_from_proto(pb.FragmentHeader.FromString(data))


def to_proto(fragment: Fragment) -> pb.Fragment:
    """The message of a fragment."""
    return pb.Fragment(header=header_to_proto(fragment.header), payload=fragment.payload)


def from_proto(message: pb.Fragment) -> Fragment:
    """The fragment of a message, unchecked but for its header's kind and counts."""
    return Fragment(header_from_proto(message.header), message.payload)
