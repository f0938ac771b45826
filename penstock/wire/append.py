"""An Append as bytes: payloads are moved once, everything else is protobuf's.

    session, acked_through │ fragment: header, payload │ fragment: …
    protobuf                  tag, size, protobuf, tag, size, bytes as they are

A message that holds fragments is built by copying them and serialised by copying them again; a parser copies every
payload into its arena, and once more for whoever asks for it. The bytes here are those that protobuf would write, but
for where in a header its table stands.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.v1.experience_pb2 import AppendRequest
from penstock.v1.fragment_pb2 import Fragment as FragmentMessage
from penstock.v1.fragment_pb2 import FragmentHeader as HeaderMessage
from penstock.wire.bulk import field_head
from penstock.wire.fragment import Fragment
from penstock.wire.header_codec import header_bytes
from penstock.wire.outline import fields

_FRAGMENTS = AppendRequest.FRAGMENTS_FIELD_NUMBER
_HEADER = FragmentMessage.HEADER_FIELD_NUMBER
_PAYLOAD = FragmentMessage.PAYLOAD_FIELD_NUMBER


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
    """The bytes of an AppendRequest."""
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


def parse(data: bytes) -> AppendCall:
    """The request of these bytes, whose outline has been checked; raises DecodeError and Unfit for others."""
    own, end, sent = [], 0, []
    for number, start, begin, stop in fields(data, 0, len(data), len(data)):
        if number == _FRAGMENTS:
            own.append(data[end:start])
            end = stop
            sent.append(_parse_fragment(data, begin, stop))
    own.append(data[end:])
    request = AppendRequest.FromString(b"".join(own))
    return AppendCall(request.session, request.acked_through, sent)


def _parse_fragment(data: bytes, begin: int, end: int) -> SentFragment:
    header, payload = HeaderMessage(), memoryview(b"")
    for number, _, start, stop in fields(data, begin, end, len(data)):
        if number == _HEADER:
            header.MergeFromString(data[start:stop])
        elif number == _PAYLOAD:
            payload = memoryview(data)[start:stop]
    return SentFragment(header, payload)
