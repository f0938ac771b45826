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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import Message

from penstock.protocol import limits
from penstock.protocol.fragment import Fragment, header_bytes
from penstock.protocol.refusal import Unfit
from penstock.v1.experience_pb2 import AppendRequest
from penstock.v1.fragment_pb2 import Fragment as FragmentMessage
from penstock.v1.fragment_pb2 import FragmentHeader as HeaderMessage

# ---- Protobuf's wire format, walked and written by hand where a parser would copy or unfold too much.

M = TypeVar("M", bound=Message)

_MAX_VARINT: Final = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MORE: Final = 0x80
"""Set in each byte of a number but the last."""


def fields(data: bytes, at: int, end: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each string, sub-message or bytes field of the message in data[at:end].

    Each is its number, where its tag begins, and the first byte and the end of its content, as indices of
    `data`. Fields of other kinds are passed over.
    Raises Unfit for more than `most` fields of any kind, and for bytes that are no message.
    """
    seen = 0
    while at < end:
        seen += 1
        if seen > most:
            raise Unfit(f"byte {at}: a message of more than {most} fields; send less at once")
        start = at
        # Numbers below 128 are nearly all there are: they are read without a call.
        tag = data[at]
        at += 1
        if tag & _MORE:
            tag, at = _varint(data, start, end)
        kind = tag & 7
        if kind == _BYTES:
            if at < end and data[at] < _MORE:
                begin = at + 1
                at = begin + data[at]
            else:
                size, begin = _varint(data, at, end)
                at = begin + size
        elif kind == _VARINT:
            begin = at
            if at < end and data[at] < _MORE:
                at += 1
            else:
                _, at = _varint(data, at, end)
        elif kind in (_FIXED32, _FIXED64):
            begin, at = at, at + (4 if kind == _FIXED32 else 8)
        else:
            raise Unfit(f"byte {at}: no field begins like this; check the protocol version")
        if at > end:
            raise Unfit(f"byte {begin}: a field is cut off")
        if kind == _BYTES:
            yield tag >> 3, start, begin, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        if at >= end:
            raise Unfit(f"byte {at}: a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, at
    raise Unfit(f"byte {at}: a number has more than {_MAX_VARINT} bytes")


def field_head(number: int, size: int) -> bytes:
    """Return tag and size, as they stand before the content of a field of `size` bytes; number: 1 to 15."""
    written = bytearray((number << 3 | _BYTES,))
    while size >= _MORE:
        written.append(size & 0x7F | _MORE)
        size >>= 7
    written.append(size)
    return bytes(written)


def write_around(message: Message, number: int, data: bytes | memoryview) -> bytes:
    """Return the bytes of the message with `data` as its field `number`, which it must not have yet."""
    own = message.SerializeToString()
    return b"".join((own, field_head(number, len(data)), data)) if data else own


def read_beside(kind: type[M], number: int, data: bytes) -> tuple[M, memoryview]:
    """Return the message in `data` without its field `number`, and a view of that field's last occurrence."""
    own, end, found = [], 0, memoryview(b"")
    for field, start, begin, stop in fields(data, 0, len(data), len(data)):
        if field == number:
            own.append(data[end:start])
            end, found = stop, memoryview(data)[begin:stop]
    own.append(data[end:])
    message = kind()
    message.ParseFromString(b"".join(own))
    return message, found


_FRAGMENTS: Final = AppendRequest.FRAGMENTS_FIELD_NUMBER
_HEADER: Final = FragmentMessage.HEADER_FIELD_NUMBER
_PAYLOAD: Final = FragmentMessage.PAYLOAD_FIELD_NUMBER
_ROWS: Final = {
    HeaderMessage.SLOTS_FIELD_NUMBER: ("slots", limits.MAX_SLOTS),
    HeaderMessage.WEIGHTS_FIELD_NUMBER: ("weights", limits.MAX_SLOTS),
    HeaderMessage.TENSORS_FIELD_NUMBER: ("tensors", limits.MAX_TENSORS),
}
_MAX_HEADER_FIELDS: Final = sum(most for _, most in _ROWS.values()) + limits.MAX_FIELDS


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


_Place = tuple[slice, slice]
"""Where in a request header and payload of a fragment lie."""


def parse(data: bytes) -> AppendCall:
    """Return the request of these bytes; raises Unfit before anything is parsed, DecodeError."""
    own, end, rows = [], 0, 0
    places: list[_Place] = []
    for number, start, begin, stop in fields(data, 0, len(data), limits.MAX_FIELDS):
        if number != _FRAGMENTS:
            continue
        own.append(data[end:start])
        end = stop
        if len(places) == limits.MAX_FRAGMENTS_PER_APPEND:
            raise Unfit(
                f"fragments: more in one Append than {limits.MAX_FRAGMENTS_PER_APPEND}; send less at once"
            )
        place = _find_parts(data, begin, stop)
        places.append(place)
        rows += _count_rows(data, place[0])
        if rows > limits.MAX_ROWS_PER_APPEND:
            raise Unfit(
                f"fragments: more than {limits.MAX_ROWS_PER_APPEND} slots, spans and tensors in one Append; "
                "send less at once"
            )
    own.append(data[end:])
    request, view = AppendRequest.FromString(b"".join(own)), memoryview(data)
    sent = [SentFragment(HeaderMessage.FromString(data[header]), view[payload]) for header, payload in places]
    return AppendCall(request.session, request.acked_through, sent)


def _find_parts(data: bytes, begin: int, end: int) -> _Place:
    header = payload = _ABSENT
    for number, _, start, stop in fields(data, begin, end, limits.MAX_FIELDS):
        if number == _HEADER:
            if header is not _ABSENT:
                # A parser merges them: many small ones would make one without bound.
                raise Unfit("fragments: a fragment with more than one header")
            header = slice(start, stop)
        elif number == _PAYLOAD:
            payload = slice(start, stop)
    return header, payload


def _count_rows(data: bytes, header: slice) -> int:
    """Strings and sub-messages of a header, 0 for a small one."""
    if header.stop - header.start <= limits.MAX_UNCOUNTED_BYTES:
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
        if stop - start > limits.MAX_ROW_BYTES:
            raise Unfit(f"header.{name}: a row of {stop - start} bytes, at most {limits.MAX_ROW_BYTES}")
    return sum(counts.values()) + others
