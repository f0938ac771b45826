"""An Append's bytes are those of protobuf, both ways."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.v1.experience_pb2 import AppendRequest
from penstock.wire import append
from penstock.wire.fragment import Fragment, to_proto
from penstock.wire.outline import Unfit
from tests.support.experience.whole_fragments import fragment_of

HEADER = fragment_of().header
UNKNOWN = (b"\x78\x05", b"\x7a\x03abc", b"\x79" + bytes(8), b"\x7d" + bytes(4))
"""Fields that a newer actor might send, of every kind."""


def sent(sequence: int, size: int) -> Fragment:
    """A fragment of that many bytes."""
    return Fragment(replace(HEADER, sequence=sequence), bytes(range(256)) * (size // 256) + bytes(size % 256))


def message(session: int, acked_through: int, *given: Fragment) -> AppendRequest:
    """As protobuf has it."""
    fragments = [to_proto(fragment) for fragment in given]
    return AppendRequest(session=session, acked_through=acked_through, fragments=fragments)


def check_same(call: append.AppendCall, request: AppendRequest) -> None:
    """Whether both say the same."""
    assert (call.session, call.acked_through) == (request.session, request.acked_through)
    assert [(one.header, bytes(one.payload)) for one in call.fragments] == [
        (one.header, one.payload) for one in request.fragments
    ]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21])
def test_what_is_written_is_what_protobuf_writes(size: int) -> None:
    """Sizes of every number of digits; only a table may stand elsewhere in its header."""
    given = (sent(1, size), sent(2, 3))
    written, expected = append.encode(7, 300, given), message(7, 300, *given).SerializeToString()
    assert len(written) == len(expected)
    assert AppendRequest.FromString(written).SerializeToString() == expected


def test_nothing_at_all_is_an_append_without_fragments() -> None:
    """Fields with their first value are not on the wire."""
    assert append.encode(0, 0, ()) == b""
    check_same(append.parse(b""), AppendRequest())


def test_a_payload_is_a_view_of_the_request() -> None:
    """It is not copied before it goes to Redis."""
    data = append.encode(1, 0, [sent(1, 1000)])
    (fragment,) = append.parse(data).fragments
    assert fragment.payload.obj is data


@given(
    sizes=st.lists(st.integers(0, 300), max_size=4),
    more=st.lists(st.sampled_from([*UNKNOWN, b"\x08\x09", b"\x10\x80\x01"]), max_size=4),
    order=st.randoms(),
)
def test_fields_in_any_order_and_more_than_once_are_read_as_protobuf_reads_them(
    sizes: list[int], more: list[bytes], order: random.Random
) -> None:
    """The last number counts, fragments keep their order, what is unknown is passed over."""
    pieces = [message(0, 0, sent(index, size)).SerializeToString() for index, size in enumerate(sizes)]
    pieces += more
    order.shuffle(pieces)
    data = b"".join(pieces)
    check_same(append.parse(data), AppendRequest.FromString(data))


@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_changed_bytes_are_read_as_protobuf_reads_them_or_refused(at: int, byte: int, cut: int) -> None:
    """One byte, or the end."""
    data = bytearray(append.encode(3, 1, [sent(2, 20), sent(3, 0)]))
    data[at % len(data)] = byte
    changed = bytes(data[: max(1, len(data) - cut % len(data))])
    try:
        call = append.parse(changed)
    except (DecodeError, Unfit):
        return
    try:
        request = AppendRequest.FromString(changed)
    except DecodeError:
        return  # of a field that nobody knows
    check_same(call, request)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """By nothing else than what the boundary expects."""
    with suppress(DecodeError, Unfit):
        append.parse(data)
