"""What an Append is refused for before it is parsed."""

import pytest

from broker.service.request_outline import MAX_FIELDS, check_outline
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import fragment_pb2
from penstock.wire import fragment as fragments
from penstock.wire.limits import (
    MAX_FRAGMENTS_PER_APPEND,
    MAX_NUMBER,
    MAX_ROWS_PER_APPEND,
    MAX_SLOTS,
    MAX_TENSORS,
)
from penstock.wire.outline import Unfit
from tests.support.run.small_run import fragment


def _append(*given: fragment_pb2.Fragment) -> bytes:
    return experience.AppendRequest(session=1, fragments=given).SerializeToString()


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
    """As many fragments as one message may hold."""
    message = fragments.to_proto(fragment(1))
    check_outline(_append(*[message] * MAX_FRAGMENTS_PER_APPEND))


def test_the_widest_honest_fragment_passes() -> None:
    """Every slot that there may be, each with a span of its own, its numbers as large as they get."""
    message = fragment_pb2.Fragment()
    for slot in range(MAX_SLOTS):
        message.header.slots.add(slot_id=slot, episode_id=MAX_NUMBER, first_step=MAX_NUMBER)
        message.header.weights.add(slot=slot, start=4095, length=1, version=MAX_NUMBER, update=MAX_NUMBER)
    check_outline(_append(message))


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
    """With the field and its bound."""
    with pytest.raises(Unfit, match=why):
        check_outline(data)
