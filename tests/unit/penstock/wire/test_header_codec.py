from dataclasses import replace

import pytest

from penstock.protocol.fragment import (
    Kind,
    Slot,
    header_bytes,
    header_from_proto,
    parse_header,
)
from penstock.protocol.limits import MAX_SLOTS, MAX_TENSORS
from penstock.v1 import fragment_pb2 as pb
from tests.support.experience.fragment_messages import from_proto, to_proto
from tests.support.experience.whole_fragments import fragment_of


def test_a_header_survives_the_log() -> None:
    header = replace(fragment_of(compress=("reward",)).header, kind=Kind.SHADOW)
    assert header == parse_header(header_bytes(header))


def test_a_fragment_survives_the_wire() -> None:
    fragment = fragment_of()
    assert fragment == from_proto(pb.Fragment.FromString(to_proto(fragment).SerializeToString()))


def test_every_field_of_the_message_is_filled() -> None:
    message = pb.FragmentHeader.FromString(header_bytes(fragment_of().header))
    assert {field.name for field in pb.FragmentHeader.DESCRIPTOR.fields} == {
        field.name for field, _ in message.ListFields()
    }


@pytest.mark.parametrize("kind", [0, 3])
def test_a_kind_that_does_not_exist_is_refused(kind: int) -> None:
    message = pb.FragmentHeader.FromString(header_bytes(fragment_of().header))
    message.kind = pb.Kind.ValueType(kind)
    with pytest.raises(ValueError, match=rf"header\.kind={kind}: use TRAIN or SHADOW"):
        header_from_proto(message)


def test_too_many_rows_are_refused_before_they_are_read() -> None:
    message = pb.FragmentHeader.FromString(header_bytes(fragment_of().header))
    message.tensors.extend([pb.TensorEntry()] * (MAX_TENSORS + 1))
    with pytest.raises(ValueError, match=f"at most {MAX_SLOTS}, {MAX_SLOTS} and {MAX_TENSORS}"):
        header_from_proto(message)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xffx", header_bytes(fragment_of().header)[:-1]])
def test_bytes_that_are_no_header_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        parse_header(data)


def test_slots_keep_their_order() -> None:
    header = replace(fragment_of(slots=2).header, slots=(Slot(5, 1, 0), Slot(2, 9, 4)))
    assert header.slots == parse_header(header_bytes(header)).slots
