"""An Append as bytes: payloads are moved once, everything else is protobuf's.

    session, acked_through │ fragment: header, payload │ fragment: …
    protobuf                  tag, size, protobuf, tag, size, bytes as they are

A message that holds fragments is built by copying them and serialised by copying them again; a parser copies
every payload into its arena, and once more for each reader. The bytes here are those that protobuf would
write, but for where in a header its table stands.

A parser would also make an object of every empty sub-message: 8 MiB of them unfold to more than 200 MiB. So
the bytes are walked first, once, and nothing is made of them until the whole request is known to be within
its bounds: what it nests is counted, and what no actor ever sends (rows of a header above 1 KiB, groups) is
refused. Payloads are stepped over, headers up to MAX_UNCOUNTED_BYTES too: the usual Append costs some steps
per fragment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.protocol.fragment import Fragment
from penstock.protocol.header_codec import header_bytes
from penstock.protocol.limits import (
    MAX_FIELDS,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_ROW_BYTES,
    MAX_ROWS_PER_APPEND,
    MAX_SLOTS,
    MAX_TENSORS,
    MAX_UNCOUNTED_BYTES,
)
from penstock.protocol.rawproto import Unfit, field_head, fields
from penstock.v1.experience_pb2 import AppendRequest
from penstock.v1.fragment_pb2 import Fragment as FragmentMessage
from penstock.v1.fragment_pb2 import FragmentHeader as HeaderMessage

_FRAGMENTS: Final = AppendRequest.FRAGMENTS_FIELD_NUMBER
_HEADER: Final = FragmentMessage.HEADER_FIELD_NUMBER
_PAYLOAD: Final = FragmentMessage.PAYLOAD_FIELD_NUMBER
_ROWS: Final = {
    HeaderMessage.SLOTS_FIELD_NUMBER: ("slots", MAX_SLOTS),
    HeaderMessage.WEIGHTS_FIELD_NUMBER: ("weights", MAX_SLOTS),
    HeaderMessage.TENSORS_FIELD_NUMBER: ("tensors", MAX_TENSORS),
}
_MAX_HEADER_FIELDS: Final = sum(most for _, most in _ROWS.values()) + MAX_FIELDS


@dataclass(slots=True, eq=False)
class SentFragment:
    """A fragment as it came. payload: a view of the request's bytes."""

    header: HeaderMessage
    payload: memoryview


@dataclass(slots=True, eq=False)
class AppendCall:
    """A request, read."""

    session: int
    acked_through: int
    fragments: Sequence[SentFragment]


def encode(session: int, acked_through: int, fragments: Iterable[Fragment]) -> bytes:
    """Return the bytes of an AppendRequest.

    session: its number. acked_through: the last sequence that the actor knows acknowledged. fragments: in
    order of sequence.
    """
    own = AppendRequest(session=session, acked_through=acked_through)
    pieces: list[bytes | memoryview] = [own.SerializeToString()]
    for fragment in fragments:
        header = header_bytes(fragment.header)
        payload = fragment.payload
        before = field_head(_HEADER, len(header)) + header
        if payload:
            before += field_head(_PAYLOAD, len(payload))
        pieces += (field_head(_FRAGMENTS, len(before) + len(payload)), before, payload)
    return b"".join(pieces)


_ABSENT: Final = slice(0, 0)


class _Place(NamedTuple):
    """Where in a request the parts of a fragment lie."""

    header: slice
    payload: slice


def parse(data: bytes) -> AppendCall:
    """Return the request of these bytes.

    Raises Unfit for more fragments, rows or fields than a request may have, and for bytes that are cut off,
    before anything is parsed; DecodeError for a header or a request that protobuf does not read.
    """
    own, end, rows = [], 0, 0
    places: list[_Place] = []
    for number, start, begin, stop in fields(data, 0, len(data), MAX_FIELDS):
        if number != _FRAGMENTS:
            continue
        own.append(data[end:start])
        end = stop
        if len(places) == MAX_FRAGMENTS_PER_APPEND:
            raise Unfit(f"fragments: more in one Append than {MAX_FRAGMENTS_PER_APPEND}; send less at once")
        place = _find_parts(data, begin, stop)
        places.append(place)
        rows += _count_rows(data, place.header)
        if rows > MAX_ROWS_PER_APPEND:
            raise Unfit(
                f"fragments: more than {MAX_ROWS_PER_APPEND} slots, spans and tensors in one Append; "
                "send less at once"
            )
    own.append(data[end:])
    request, view = AppendRequest.FromString(b"".join(own)), memoryview(data)
    sent = [SentFragment(HeaderMessage.FromString(data[at.header]), view[at.payload]) for at in places]
    return AppendCall(request.session, request.acked_through, sent)


def _find_parts(data: bytes, begin: int, end: int) -> _Place:
    header = payload = _ABSENT
    for number, _, start, stop in fields(data, begin, end, MAX_FIELDS):
        if number == _HEADER:
            if header is not _ABSENT:
                # A parser merges them: many small ones would make one without bound.
                raise Unfit("fragments: a fragment with more than one header")
            header = slice(start, stop)
        elif number == _PAYLOAD:
            payload = slice(start, stop)
    return _Place(header, payload)


def _count_rows(data: bytes, header: slice) -> int:
    """Strings and sub-messages of a header, 0 for a small one."""
    if header.stop - header.start <= MAX_UNCOUNTED_BYTES:
        return 0
    counts = dict.fromkeys(_ROWS, 0)
    others = 0
    for number, _, start, stop in fields(data, header.start, header.stop, _MAX_HEADER_FIELDS):
        if number not in counts:
            others += 1
            continue
        counts[number] += 1
        name, most = _ROWS[number]
        if counts[number] > most:
            raise Unfit(f"header.{name}: more than {most}")
        if stop - start > MAX_ROW_BYTES:
            raise Unfit(f"header.{name}: a row of {stop - start} bytes, at most {MAX_ROW_BYTES}")
    return sum(counts.values()) + others
