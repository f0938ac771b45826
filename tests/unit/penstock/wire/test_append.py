"""An Append's bytes are those of protobuf, both ways, and are refused before they unfold to too much."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import append
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import (
    MAX_FIELDS,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_NUMBER,
    MAX_ROWS_PER_APPEND,
    MAX_SLOTS,
    MAX_TENSORS,
)
from penstock.protocol.refusal import Unfit
from penstock.v1 import fragment_pb2
from penstock.v1.experience_pb2 import AppendRequest
from tests.support.experience.fragment_messages import to_proto
from tests.support.experience.whole_fragments import fragment_of
from tests.support.run.small_run import fragment as small_fragment

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
    given = (sent(1, size), sent(2, 3))
    written, expected = append.encode(7, 300, given), message(7, 300, *given).SerializeToString()
    assert len(written) == len(expected)
    assert AppendRequest.FromString(written).SerializeToString() == expected


def test_nothing_at_all_is_an_append_without_fragments() -> None:
    assert append.encode(0, 0, ()) == b""
    check_same(append.parse(b""), AppendRequest())


def test_a_payload_is_a_view_of_the_request() -> None:
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
    pieces = [message(0, 0, sent(index, size)).SerializeToString() for index, size in enumerate(sizes)]
    pieces += more
    order.shuffle(pieces)
    data = b"".join(pieces)
    check_same(append.parse(data), AppendRequest.FromString(data))


@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_changed_bytes_are_read_as_protobuf_reads_them_or_refused(at: int, byte: int, cut: int) -> None:
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
        return  # of an unknown field
    check_same(call, request)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(DecodeError, Unfit):
        append.parse(data)


def _append(*given: fragment_pb2.Fragment) -> bytes:
    return AppendRequest(session=1, fragments=given).SerializeToString()


def _header(**rows: int) -> fragment_pb2.Fragment:
    message = fragment_pb2.Fragment()
    for name, count in rows.items():
        for _ in range(count):
            getattr(message.header, name).add()
    return message


def _long_shape() -> fragment_pb2.Fragment:
    message = fragment_pb2.Fragment()
    message.header.tensors.add(shape=[1] * 3000)
    return message


def _many_fields(count: int) -> fragment_pb2.Fragment:
    """A header that says one number over and over."""
    message = fragment_pb2.Fragment()
    message.header.MergeFromString(b"\x98\x06\x01" * count)
    return message


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


SMALL = _header(slots=3).SerializeToString()


def test_an_honest_append_passes() -> None:
    message = to_proto(small_fragment(1))
    append.parse(_append(*[message] * MAX_FRAGMENTS_PER_APPEND))


def test_the_widest_honest_fragment_passes() -> None:
    message = fragment_pb2.Fragment()
    for slot in range(MAX_SLOTS):
        message.header.slots.add(slot_id=slot, episode_id=MAX_NUMBER, first_step=MAX_NUMBER)
        message.header.weights.add(slot=slot, start=4095, length=1, version=MAX_NUMBER, update=MAX_NUMBER)
    append.parse(_append(message))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x1a\x00" * (MAX_FRAGMENTS_PER_APPEND + 1), "fragments: more"),
        (_append(_header(slots=MAX_SLOTS + 1)), "header.slots: more than 4096"),
        (_append(_header(weights=MAX_SLOTS + 1)), "header.weights: more than 4096"),
        (_append(_header(slots=2000, tensors=MAX_TENSORS + 1)), "header.tensors: more than 64"),
        (_append(*[_header(slots=MAX_SLOTS)] * (MAX_ROWS_PER_APPEND // MAX_SLOTS + 1)), "slots, spans"),
        (
            _append(_long_shape()),
            "header.tensors: a row of",
        ),
        (b"\x1a" + varint(2 * len(SMALL)) + 2 * SMALL, "more than one header"),
        (b"\x1a\x05\x0a", "cut off"),
        (b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than 10 bytes"),
        (b"\x08\x01" * (MAX_FIELDS + 1), "more than 1024 fields"),
        (b"\x1a\x83\x10" + b"\x18\x01" * 1025 + b"\0", "more than 1024 fields"),
        (_append(_many_fields(10_000)), "more than 9280 fields"),
        (b"\x1b\x1c", "no field begins"),
        (b"\x08", "cut off"),
        (b"\x0d\x00", "cut off"),
    ],
)
def test_what_would_unfold_to_much_or_is_cut_off_is_unfit(data: bytes, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        append.parse(data)
