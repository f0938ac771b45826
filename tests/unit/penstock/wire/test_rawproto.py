"""A message around its large field is protobuf's, both ways."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.append import read_beside, write_around
from penstock.protocol.refusal import Unfit
from penstock.v1 import weights_pb2 as pb

NUMBER = pb.WatchLatestReply.WEIGHTS_FIELD_NUMBER
NEWS = pb.WatchLatestReply(revision=7, scalars={"epsilon": 0.5}, latest=pb.Publication(version=3))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21])
def test_protobuf_reads_what_is_written(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    whole = pb.WatchLatestReply.FromString(write_around(NEWS, NUMBER, data))
    assert whole.weights == data
    whole.ClearField("weights")
    assert whole == NEWS


def test_what_protobuf_writes_is_read_without_a_copy_of_the_field() -> None:
    written = pb.WatchLatestReply(weights=b"abc" * 99)
    written.MergeFrom(NEWS)
    data = written.SerializeToString()
    message, weights = read_beside(pb.WatchLatestReply, NUMBER, data)
    assert (message, bytes(weights)) == (NEWS, b"abc" * 99)
    assert weights.obj is data


def test_of_several_the_last_counts() -> None:
    data = write_around(pb.WatchLatestReply(), NUMBER, b"one") + write_around(NEWS, NUMBER, b"two")
    message, weights = read_beside(pb.WatchLatestReply, NUMBER, data)
    assert (message, bytes(weights)) == (NEWS, b"two")
    assert pb.WatchLatestReply.FromString(data).weights == b"two"


@given(st.binary(max_size=80))
def test_other_bytes_are_refused_as_protobuf_refuses_them(data: bytes) -> None:
    try:
        message, weights = read_beside(pb.WatchLatestReply, NUMBER, data)
    except (DecodeError, Unfit):
        return
    message.weights = bytes(weights)
    assert message == pb.WatchLatestReply.FromString(data)
