import random
from contextlib import suppress
from dataclasses import fields, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import Arm, Fallback
from penstock.protocol import append
from penstock.protocol.append import read_beside, write_around
from penstock.protocol.fragment import (
    Fragment,
    Kind,
    Slot,
    header_bytes,
    header_from_proto,
    parse_header,
)
from penstock.protocol.limits import (
    MAX_FIELDS,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_ID_LENGTH,
    MAX_NUMBER,
    MAX_ROWS_PER_APPEND,
    MAX_SLOTS,
    MAX_TENSORS,
    check_id,
    to_id,
)
from penstock.protocol.messages import Credit, Durability, Episode, Publication, Report, Role, RunState
from penstock.protocol.refusal import Reason, Refusal, Unfit
from penstock.protocol.schema import Axes, FragmentSchema, TensorRule, fragment_schema, payload_room
from penstock.protocol.spaces import Box, Dict, Discrete
from penstock.protocol.specification import Probe, RunSpecification
from penstock.v1 import experience_pb2, policy_pb2, refusal_pb2, specification_pb2, weights_pb2
from penstock.v1 import fragment_pb2 as pb
from penstock.v1.experience_pb2 import AppendRequest
from tests.support.experience.fragment_messages import (
    OBSERVATION,
    RUN,
    SCHEMA,
    fragment_of,
    to_proto,
)
from tests.support.run.small_run import fragment as small_fragment

UNKNOWN = (b"\x78\x05", b"\x7a\x03abc", b"\x79" + bytes(8), b"\x7d" + bytes(4))
"""Fields that a newer actor might send, of every kind."""


def sent(sequence: int, size: int) -> Fragment:
    return Fragment(
        replace(fragment_of().header, sequence=sequence),
        bytes(range(256)) * (size // 256) + bytes(size % 256),
    )


def message(session: int, acked_through: int, *given: Fragment) -> AppendRequest:
    fragments = [to_proto(fragment) for fragment in given]
    return AppendRequest(session=session, acked_through=acked_through, fragments=fragments)


def check_same(call: append.AppendCall, request: AppendRequest) -> None:
    assert (call.session, call.acked_through) == (request.session, request.acked_through)
    assert [(one.header, bytes(one.payload)) for one in call.fragments] == [
        (one.header, one.payload) for one in request.fragments
    ]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21])
def test_the_bytes_are_those_that_protobuf_writes(size: int) -> None:
    given = (sent(1, size), sent(2, 3))
    written, expected = append.encode(7, 300, given), message(7, 300, *given).SerializeToString()
    assert len(written) == len(expected)
    assert AppendRequest.FromString(written).SerializeToString() == expected
    assert append.parse(written).fragments[0].payload.obj is written
    assert append.encode(0, 0, ()) == b""


@given(
    sizes=st.lists(st.integers(0, 300), max_size=4),
    more=st.lists(st.sampled_from([*UNKNOWN, b"\x08\x09", b"\x10\x80\x01"]), max_size=4),
    order=st.randoms(),
)
def test_fields_in_any_order_and_repeated_are_read_like_protobuf(
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


def _append(*given: pb.Fragment) -> bytes:
    return AppendRequest(session=1, fragments=given).SerializeToString()


def _header(**rows: int) -> pb.Fragment:
    message = pb.Fragment()
    for name, count in rows.items():
        for _ in range(count):
            getattr(message.header, name).add()
    return message


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


SMALL = _header(slots=3).SerializeToString()


def test_an_honest_append_passes_however_wide_it_is() -> None:
    append.parse(_append(*[to_proto(small_fragment(1))] * MAX_FRAGMENTS_PER_APPEND))
    message = pb.Fragment()
    for slot in range(MAX_SLOTS):
        message.header.slots.add(slot_id=slot, episode_id=MAX_NUMBER, first_step=MAX_NUMBER)
        message.header.weights.add(slot=slot, start=4095, length=1, version=MAX_NUMBER, update=MAX_NUMBER)
    append.parse(_append(message))


LONG_SHAPE = pb.Fragment()
LONG_SHAPE.header.tensors.add(shape=[1] * 3000)
MANY_FIELDS = pb.Fragment()
MANY_FIELDS.header.MergeFromString(b"\x98\x06\x01" * 10_000)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x1a\x00" * (MAX_FRAGMENTS_PER_APPEND + 1), "fragments: more"),
        (_append(_header(slots=MAX_SLOTS + 1)), "header.slots: more than 4096"),
        (_append(_header(weights=MAX_SLOTS + 1)), "header.weights: more than 4096"),
        (_append(_header(slots=2000, tensors=MAX_TENSORS + 1)), "header.tensors: more than 64"),
        (_append(*[_header(slots=MAX_SLOTS)] * (MAX_ROWS_PER_APPEND // MAX_SLOTS + 1)), "slots, spans"),
        (_append(LONG_SHAPE), "header.tensors: a row of"),
        (b"\x1a" + varint(2 * len(SMALL)) + 2 * SMALL, "more than one header"),
        (b"\x1a\x05\x0a", "cut off"),
        (b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than 10 bytes"),
        (b"\x08\x01" * (MAX_FIELDS + 1), "more than 1024 fields"),
        (b"\x1a\x83\x10" + b"\x18\x01" * 1025 + b"\0", "more than 1024 fields"),
        (_append(MANY_FIELDS), "more than 9280 fields"),
        (b"\x1b\x1c", "no field begins"),
        (b"\x08", "cut off"),
        (b"\x0d\x00", "cut off"),
    ],
)
def test_messages_that_expand_too_much_or_are_cut_off_are_unfit(data: bytes, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        append.parse(data)


HEADER: Final = fragment_of(compress=("reward",)).header
SPECIFICATION: Final = RunSpecification(
    run=RUN,
    seed=2**62,
    environment_json='{"id":"CartPole-v1"}',
    policy_json='{"hidden_sizes":[64]}',
    actor_json='{"count":2}',
    evaluation_json='{"episodes":100}',
    workload="control",
    observation_space=OBSERVATION,
    action_space=Discrete(2),
    schema=SCHEMA,
    probe=Probe({"observation/joint": np.ones((3, 4), np.float32)}, {"action": np.zeros(3, np.int64)}),
    unroll_length=32,
    lock_step=True,
    session_timeout_ms=30_000,
    stale_after=8,
    update_steps=2048,
    max_reward=1e6,
    max_log_prob=1e4,
    final_masks=True,
)
EPISODE: Final = Episode(
    slot_id=3, episode_id=2**40, episode_return=-1.5, length=200, terminated=True, version=9
)
REPORT: Final = Report(
    session=4, sequence=2, evaluation=True, deterministic=True, episodes=(EPISODE, EPISODE)
)
CREDIT: Final = Credit(begin_through=5, min_version=3, round=2)
PUBLICATION: Final = Publication(version=7, update=6, sha256="ab", size=99)
REFUSAL: Final = Refusal(reason=Reason.GAP, detail="hole", retry_after_ms=20, expected=4)
SHADOW: Final = replace(HEADER, kind=Kind.SHADOW, slots=(Slot(5, 1, 0), Slot(2, 9, 4)))


@pytest.mark.parametrize(
    ("sent", "arrived"),
    [
        (SHADOW, parse_header(header_bytes(SHADOW))),
        (REPORT, Report.decode(REPORT.encode())),
        (CREDIT, Credit.from_proto(CREDIT.to_proto())),
        (PUBLICATION, Publication.from_proto(PUBLICATION.to_proto())),
        (REFUSAL, Refusal.from_proto(REFUSAL.to_proto())),
        (None, Refusal.from_proto(refusal_pb2.Refusal())),
        (SCHEMA, FragmentSchema.from_proto(SCHEMA.to_proto())),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_sent_arrives_as_it_was(sent: object, arrived: object) -> None:
    assert arrived == sent


def test_a_specification_is_read_back_from_redis() -> None:
    back = RunSpecification.decode(SPECIFICATION.encode())
    assert back.encode() == SPECIFICATION.encode()
    for field in fields(RunSpecification):
        if field.name != "probe":
            assert getattr(SPECIFICATION, field.name) == getattr(back, field.name)
    np.testing.assert_array_equal(
        SPECIFICATION.probe.observation["observation/joint"], back.probe.observation["observation/joint"]
    )
    np.testing.assert_array_equal(SPECIFICATION.probe.action["action"], back.probe.action["action"])
    with pytest.raises(ValueError, match="run='No Id' is not an id"):
        RunSpecification.decode(replace(SPECIFICATION, run="No Id").encode())


@pytest.mark.parametrize(
    "message", [pb.FragmentHeader.FromString(header_bytes(HEADER)), SPECIFICATION.to_proto()]
)
def test_every_field_of_a_message_is_filled(message: Message) -> None:
    assert set(message.DESCRIPTOR.fields_by_name) == {field.name for field, _ in message.ListFields()}


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Reason, refusal_pb2.Reason, "REASON_"),
        (Role, experience_pb2.Role, "ROLE_"),
        (Durability, experience_pb2.Durability, "DURABILITY_"),
        (RunState, weights_pb2.RunState, "RUN_STATE_"),
        (Arm, policy_pb2.Arm, "ARM_"),
        (Fallback, policy_pb2.Fallback, "FALLBACK_"),
    ],
)
def test_enumerations_are_those_of_the_protocol(ours: type[IntEnum], theirs: Any, prefix: str) -> None:
    wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
    assert {member.name: member.value for member in ours} == wire


@pytest.mark.parametrize("kind", [0, 3])
def test_a_kind_that_does_not_exist_is_refused(kind: int) -> None:
    message = pb.FragmentHeader.FromString(header_bytes(fragment_of().header))
    message.kind = pb.Kind.ValueType(kind)
    with pytest.raises(ValueError, match=rf"header\.kind={kind}: use TRAIN or SHADOW"):
        header_from_proto(message)


def test_too_many_rows_are_refused_before_they_are_read() -> None:
    message = pb.FragmentHeader(kind=pb.KIND_TRAIN, tensors=[pb.TensorEntry()] * (MAX_TENSORS + 1))
    with pytest.raises(ValueError, match=f"at most {MAX_SLOTS}, {MAX_SLOTS} and {MAX_TENSORS}"):
        header_from_proto(message)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xffx", header_bytes(fragment_of().header)[:-1]])
def test_bytes_that_are_not_a_header_give_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        parse_header(data)


@pytest.mark.parametrize(
    "value", ["", "-a", "a-", "A", "a_b", "a b", "ä", "a\n", "A" * 2**20, "a" * (MAX_ID_LENGTH + 1)]
)
def test_an_invalid_id_is_refused_with_field_value_and_remedy(value: str) -> None:
    with pytest.raises(ValueError, match=r"run=.* is not an id: use 1 to 64 of a-z, 0-9 and '-'") as told:
        check_id("run", value)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CartPole-v1", "cartpole-v1"),
        ("ALE/Pong-v5", "ale-pong-v5"),
        ("--", "x"),
        ("x" * 99, "x" * 48),
        ("a", "a"),
    ],
)
def test_any_text_becomes_an_id(text: str, expected: str) -> None:
    assert expected == check_id("run", to_id(text))


NUMBER = weights_pb2.WatchLatestReply.WEIGHTS_FIELD_NUMBER
NEWS = weights_pb2.WatchLatestReply(
    revision=7, scalars={"epsilon": 0.5}, latest=weights_pb2.Publication(version=3)
)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21])
def test_protobuf_reads_the_written_bytes(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    whole = weights_pb2.WatchLatestReply.FromString(write_around(NEWS, NUMBER, data))
    assert whole.weights == data
    whole.ClearField("weights")
    assert whole == NEWS


def test_what_protobuf_writes_is_read_without_a_copy_and_of_several_fields_the_last() -> None:
    written = weights_pb2.WatchLatestReply(weights=b"abc" * 99)
    written.MergeFrom(NEWS)
    data = written.SerializeToString()
    message, weights = read_beside(weights_pb2.WatchLatestReply, NUMBER, data)
    assert (message, bytes(weights)) == (NEWS, b"abc" * 99)
    assert weights.obj is data
    twice = write_around(weights_pb2.WatchLatestReply(), NUMBER, b"one") + write_around(NEWS, NUMBER, b"two")
    message, weights = read_beside(weights_pb2.WatchLatestReply, NUMBER, twice)
    assert (message, bytes(weights)) == (NEWS, b"two")


@given(st.binary(max_size=80))
def test_other_bytes_are_refused_like_protobuf(data: bytes) -> None:
    try:
        message, weights = read_beside(weights_pb2.WatchLatestReply, NUMBER, data)
    except (DecodeError, Unfit):
        return
    message.weights = bytes(weights)
    assert message == weights_pb2.WatchLatestReply.FromString(data)


def test_the_id_changes_with_any_rule_and_not_with_their_order() -> None:
    base = TensorRule(name="extra/x", dtype="float32", shape=(2,))
    others = [
        TensorRule(name="extra/y", dtype="float32", shape=(2,)),
        TensorRule(name="extra/x", dtype="float64", shape=(2,)),
        TensorRule(name="extra/x", dtype="float32", shape=(3,)),
        TensorRule(name="extra/x", dtype="float32", shape=(2,), axes=Axes.SLOT),
    ]
    ids = {FragmentSchema((rule,)).schema_id for rule in [base, *others]}
    assert len(ids) == 5
    assert FragmentSchema(SCHEMA.tensors[::-1]).schema_id == SCHEMA.schema_id


def test_a_tensor_declared_twice_is_refused() -> None:
    rule = TensorRule(name="reward", dtype="float32")
    with pytest.raises(ValueError, match="declared twice"):
        FragmentSchema((rule, rule))


def test_each_part_of_an_observation_is_a_tensor_with_its_final_row() -> None:
    space = Dict((("a", Box(np.zeros(2, np.float32), np.ones(2, np.float32))), ("b", Discrete(3))))
    schema = fragment_schema(space, Discrete(2), (TensorRule(name="extra/note", dtype="int32"),))
    assert sorted(schema.by_name) == [
        "action", "extra/note", "final/observation/a", "final/observation/b", "final/slot", "final/step",
        "log_prob", "observation/a", "observation/b", "reward", "terminated", "truncated", "valid",
    ]  # fmt: skip
    assert schema.by_name["observation/a"].axes is Axes.STEP_PLUS_ONE
    assert schema.by_name["final/observation/a"].axes is Axes.END
    assert [rule.name for rule in schema.under("observation")] == ["observation/a", "observation/b"]


def test_the_number_of_ends_in_a_message_is_limited_by_their_observations() -> None:
    large = Box(np.zeros((256, 256, 3), np.uint8), np.full((256, 256, 3), 255, np.uint8))
    schema = fragment_schema(large, Discrete(2))
    most = schema.most_ends(8, 4)
    assert schema.fragment_bytes(8, 4, most) <= payload_room(4) < schema.fragment_bytes(8, 4, most + 1)
    assert schema.most_ends(100, 4) < 0
    assert SCHEMA.fragment_bytes(5, 3, 3) == len(fragment_of(steps=5, slots=3, ends=3).payload)


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (
            specification_pb2.TensorRule(name="x", dtype="object", axes=specification_pb2.AXES_STEP),
            "schema.x: dtype 'object'",
        ),
        (
            specification_pb2.TensorRule(
                name="x", dtype="int8", shape=[1] * 9, axes=specification_pb2.AXES_STEP
            ),
            "schema.x: rank 9",
        ),
        (specification_pb2.TensorRule(name="x", dtype="int8"), "schema.x: axes 0"),
    ],
)
def test_a_malformed_rule_is_refused_by_name(rule: specification_pb2.TensorRule, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        FragmentSchema.from_proto(specification_pb2.FragmentSchema(tensors=[rule]))
