"""Fragment header as a protobuf message and as the bytes that the log stores."""

from functools import lru_cache
from typing import Final

from google.protobuf.message import DecodeError

from penstock.protocol.header import FragmentHeader, Kind, Slot, TensorEntry, WeightSpan
from penstock.protocol.limits import MAX_SLOTS, MAX_TENSORS
from penstock.v1 import fragment_pb2 as pb

_KINDS: Final = {kind.value: kind for kind in Kind}


def header_to_proto(header: FragmentHeader) -> pb.FragmentHeader:
    message = _without_table(header)
    message.MergeFromString(_table_bytes(header.tensors))
    return message


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
    """A header with a table and nothing else."""
    return pb.FragmentHeader(
        tensors=[
            pb.TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                codec=entry.codec,
                stored_size=entry.stored_size,
                raw_size=entry.raw_size,
                offset=entry.offset,
            )
            for entry in entries
        ]
    ).SerializeToString()


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
    """Inverse of `header_bytes`; raises ValueError for bytes that are no header."""
    try:
        message = pb.FragmentHeader.FromString(data)
    except DecodeError as error:
        raise ValueError(f"header: {len(data)} bytes are not a FragmentHeader ({error})") from error
    return header_from_proto(message)
