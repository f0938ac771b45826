"""Fragment: T steps of N slots as one unit of transport, storage and accounting.

Header and payload are immutable values, which `check` checks.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import lz4.frame
import numpy as np
from google.protobuf.message import DecodeError

from penstock.protocol import limits
from penstock.protocol.schema import Axes, FragmentSchema, TensorRule
from penstock.protocol.tensor import DTYPES, Array, check_dtype, check_shape, check_truth, read_array
from penstock.v1 import fragment_pb2 as pb


class Kind(IntEnum):
    """The use of a fragment."""

    TRAIN = 1
    SHADOW = 2


class Slot(NamedTuple):
    """The origin of one column: environment, episode and index of its first step."""

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
    """Place and encoding of a tensor in the payload; sizes and offset in bytes."""

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
        """T·N, valid or not: the size of the fragment in every budget, in steps."""
        return self.steps * len(self.slots)

    @property
    def oldest_update(self) -> int:
        """Update count of the oldest weights that it was generated with; its staleness counts from there."""
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
_SAME: Final = [
    one.name for one in fields(FragmentHeader) if one.name not in {"kind", "slots", "weights", "tensors"}
]
"""Fields that are the same in the message."""


def _without_table(header: FragmentHeader) -> pb.FragmentHeader:
    return pb.FragmentHeader(
        **{name: getattr(header, name) for name in _SAME},
        kind=pb.Kind.ValueType(header.kind.value),
        slots=[
            pb.Slot(slot_id=s.slot_id, episode_id=s.episode_id, first_step=s.first_step) for s in header.slots
        ],
        weights=[
            pb.WeightSpan(slot=w.slot, start=w.start, length=w.length, version=w.version, update=w.update)
            for w in header.weights
        ],
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
    if (
        max(len(message.slots), len(message.weights)) > limits.MAX_SLOTS
        or len(message.tensors) > limits.MAX_TENSORS
    ):
        raise ValueError(
            f"header: {len(message.slots)} slots, {len(message.weights)} spans, {len(message.tensors)} "
            f"tensors; at most {limits.MAX_SLOTS}, {limits.MAX_SLOTS} and {limits.MAX_TENSORS}"
        )
    return FragmentHeader(
        **{name: getattr(message, name) for name in _SAME},
        kind=kind,
        slots=tuple(Slot(s.slot_id, s.episode_id, s.first_step) for s in message.slots),
        weights=tuple(WeightSpan(w.slot, w.start, w.length, w.version, w.update) for w in message.weights),
        tensors=_table(tuple(map(pb.TensorEntry.SerializeToString, message.tensors))),
    )


@lru_cache(maxsize=1024)
def _table(rows: tuple[bytes, ...]) -> tuple[TensorEntry, ...]:
    """Cached, since fragments of a run have the same few tables again and again."""
    return tuple(map(_entry, rows))


@lru_cache(maxsize=1024)
def _entry(encoded: bytes) -> TensorEntry:
    """Cached, since where some tensors are compressed the rows of the others repeat."""
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


# ---- Whether a fragment follows the run's schema; every failure names field, value and remedy.

MOST = float(np.finfo(np.float32).max)
UNBOUNDED = MappingProxyType({"reward": MOST, "log_prob": MOST})
"""Largest absolute values where a run sets no bounds: every finite number is allowed."""
TRUTH_TENSORS = ("terminated", "truncated", "valid")


def check(
    fragment: Fragment, schema: FragmentSchema, run: str, bounds: Mapping[str, float] = UNBOUNDED
) -> None:
    """Raise ValueError that names field, value and remedy unless a fragment of `run` follows the schema."""
    check_header(fragment.header, schema, run)
    check_table(fragment.header, len(fragment.payload), schema)
    check_content(fragment.header, fragment.payload, bounds)


def check_header(header: FragmentHeader, schema: FragmentSchema, run: str) -> None:
    if header.run != run:
        raise ValueError(f"header.run={header.run[:80]!r}: this broker serves {run!r}")
    limits.check_policy("header.policy", header.policy)
    if header.schema_id != schema.schema_id:
        raise ValueError(f"header.schema_id={header.schema_id[:12]}…: the run's is {schema.schema_id[:12]}…")
    if header.session < 1 or header.sequence < 1:
        raise ValueError(f"header.session={header.session}, sequence={header.sequence}: both start at 1")
    if not 1 <= header.steps <= limits.MAX_STEPS or not 1 <= len(header.slots) <= limits.MAX_SLOTS:
        raise ValueError(
            f"header: T={header.steps} and N={len(header.slots)} must be 1..{limits.MAX_STEPS} and "
            f"1..{limits.MAX_SLOTS}"
        )
    if len(header.attributes) > limits.MAX_ATTRIBUTES_BYTES:
        raise ValueError(
            f"header.attributes: {len(header.attributes)} bytes, {limits.MAX_ATTRIBUTES_BYTES} allowed"
        )
    if len(header.group_id) > limits.MAX_NAME_LENGTH:
        raise ValueError(
            f"header.group_id: {len(header.group_id)} characters, {limits.MAX_NAME_LENGTH} allowed"
        )
    for slot in header.slots:
        if max(slot.episode_id, slot.first_step) > limits.MAX_NUMBER:
            raise ValueError(f"header.slots: {slot} counts beyond 2^53")
    _check_weights(header)


def _check_weights(header: FragmentHeader) -> None:
    most = min(limits.MAX_SLOTS, header.charge)
    if not 1 <= len(header.weights) <= most:
        raise ValueError(f"header.weights: {len(header.weights)} spans, give 1 to {most}")
    for span in header.weights:
        fits = span.length >= 1 and span.start + span.length <= header.steps and span.slot < len(header.slots)
        if not 1 <= span.version <= limits.MAX_NUMBER or span.update > limits.MAX_NUMBER or not fits:
            raise ValueError(
                f"header.weights: span {span} does not fit T={header.steps}, N={len(header.slots)} "
                "or names no version"
            )


def check_table(header: FragmentHeader, payload_size: int, schema: FragmentSchema) -> None:
    """Raise ValueError unless the table holds the schema's tensors, packed without holes."""
    _check_table(header.tensors, header.steps, len(header.slots), payload_size, schema)


@lru_cache(maxsize=1024)
def _check_table(
    table: tuple[TensorEntry, ...], steps: int, slots: int, payload_size: int, schema: FragmentSchema
) -> None:
    _check_names([entry.name for entry in table], schema)
    offset = decoded = 0
    ends: int | None = None
    for entry in table:
        rule = schema.by_name.get(entry.name) or schema.optional[entry.name]
        if rule.axes is Axes.END:
            ends = _count_ends(entry, ends)
        _check_entry(entry, rule, (*rule.axes.leading(steps, slots, ends or 0), *rule.shape))
        if entry.offset != offset:
            raise ValueError(f"{entry.name}: offset {entry.offset}, {offset} expected")
        offset += entry.stored_size
        decoded += entry.raw_size
    if decoded > limits.MAX_MESSAGE_BYTES:
        raise ValueError(
            f"payload: decodes to {decoded} bytes, {limits.MAX_MESSAGE_BYTES} allowed; send fewer steps"
        )
    if offset != payload_size:
        raise ValueError(f"payload: {payload_size} bytes, the table describes {offset}")
    if ends is not None and ends > steps * slots:
        raise ValueError(f"final: {ends} ended episodes in {steps * slots} steps")


def _check_names(names: Sequence[str], schema: FragmentSchema) -> None:
    wanted, given = schema.by_name.keys(), set(names)
    known = wanted | schema.optional.keys()
    if len(names) == len(given) <= limits.MAX_TENSORS and wanted <= given <= known:
        return
    missing, foreign = sorted(wanted - given), sorted(given - known)
    raise ValueError(
        f"tensors: {len(names)} rows, missing {missing[:4]}, not in the schema "
        f"{[n[:80] for n in foreign[:4]]}; give each tensor of the schema once"
    )


def _count_ends(entry: TensorEntry, ends: int | None) -> int:
    if ends is not None:
        return ends
    if not entry.shape:
        raise ValueError(f"{entry.name}: shape (), one row per ended episode expected")
    return entry.shape[0]


def _check_entry(entry: TensorEntry, rule: TensorRule, shape: tuple[int, ...]) -> None:
    if entry.dtype != rule.dtype:
        raise ValueError(f"{entry.name}: dtype {entry.dtype[:32]}, the schema says {rule.dtype}")
    if entry.shape != shape:
        # `check_shape` first: an absurd rank must not be printed in full.
        raise ValueError(
            f"{entry.name}: shape {check_shape(entry.name, entry.shape)}, the schema says {shape}"
        )
    raw = math.prod(shape) * DTYPES[rule.dtype].itemsize
    if entry.raw_size != raw or raw > limits.MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{entry.name}: raw_size {entry.raw_size}, {raw} expected and {limits.MAX_MESSAGE_BYTES} allowed"
        )
    if entry.codec == RAW and entry.stored_size != raw:
        raise ValueError(f"{entry.name}: stored_size {entry.stored_size}, {raw} expected")
    if entry.codec not in (RAW, LZ4):
        raise ValueError(f"{entry.name}: codec {entry.codec[:16]!r} is not one of {RAW}, {LZ4}")


def check_content(
    header: FragmentHeader, payload: bytes | memoryview, bounds: Mapping[str, float] = UNBOUNDED
) -> None:
    """Raise ValueError for bad numbers, truth values and frames of a payload; call after `check_table`."""
    for entry in header.tensors:
        if entry.name in bounds:
            _check_bound(entry.name, _numbers(entry, payload), bounds[entry.name])
        elif entry.name in TRUTH_TENSORS:
            if entry.codec == RAW:
                check_truth(entry.name, payload, entry.offset, entry.raw_size)
            else:
                read_entry(entry, payload)
        elif entry.codec == LZ4:
            check_frame(entry, payload)


def _check_bound(name: str, numbers: Any, bound: float) -> None:
    largest = np.abs(numbers).max()
    # NaN is in no order, so it is not below the bound either.
    if largest <= bound:
        return
    if not np.isfinite(largest):
        raise ValueError(f"{name}: holds NaN or infinity; send finite numbers")
    raise ValueError(
        f"{name}: holds ±{largest:g}, and broker.max_{name}={bound:g}; where that is what the environment or "
        "the policy gives, raise it"
    )


def _numbers(entry: TensorEntry, payload: bytes | memoryview) -> Array:
    if entry.codec != RAW:
        return read_entry(entry, payload)
    kind = DTYPES[entry.dtype]
    return np.frombuffer(payload, kind, entry.raw_size // kind.itemsize, entry.offset)
