import random
from contextlib import suppress
from dataclasses import fields, replace

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

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
from penstock.protocol.refusal import Reason, Refusal, Refused, Unfit
from penstock.protocol.schema import Axes, FragmentSchema, TensorRule, fragment_schema, payload_room
from penstock.protocol.spaces import Box, Dict, Discrete
from penstock.protocol.specification import Probe, RunSpecification
from penstock.v1 import experience_pb2, fragment_pb2, refusal_pb2, specification_pb2, weights_pb2
from penstock.v1 import fragment_pb2 as pb
from penstock.v1 import specification_pb2 as v1_v1_pb
from penstock.v1 import weights_pb2 as v1_pb
from penstock.v1.experience_pb2 import AppendRequest
from tests.support.experience.fragment_messages import (
    OBSERVATION,
    RUN,
    SCHEMA,
    fragment_of,
    from_proto,
    to_proto,
)
from tests.support.run.small_run import fragment as small_fragment

# ---- An Append's bytes are those of protobuf, both ways, and are refused before they unfold to too much.


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


@pytest.mark.parametrize("value", ["a", "0", "cartpole-v1-x", "a" * MAX_ID_LENGTH])
def test_an_id_is_returned_as_it_is(value: str) -> None:
    assert value == check_id("run", value)


@pytest.mark.parametrize("value", ["", "-a", "a-", "A", "a_b", "a b", "ä", "a\n", "a" * (MAX_ID_LENGTH + 1)])
def test_what_is_no_id_is_refused_with_field_value_and_remedy(value: str) -> None:
    with pytest.raises(ValueError, match=r"run=.* is not an id: use 1 to 64 of a-z, 0-9 and '-'"):
        check_id("run", value)


def test_a_huge_value_is_not_repeated_in_full() -> None:
    with pytest.raises(ValueError, match="is not an id") as caught:
        check_id("run", "A" * 2**20)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [("CartPole-v1", "cartpole-v1"), ("ALE/Pong-v5", "ale-pong-v5"), ("--", "x"), ("x" * 99, "x" * 48)],
)
def test_any_text_becomes_an_id(text: str, expected: str) -> None:
    assert expected == check_id("run", to_id(text))


EPISODE = Episode(slot_id=3, episode_id=2**40, episode_return=-1.5, length=200, terminated=True, version=9)


def test_a_report_survives_redis() -> None:
    report = Report(session=4, sequence=2, evaluation=True, deterministic=True, episodes=(EPISODE, EPISODE))
    assert report == Report.decode(report.encode())


def test_credit_and_publication_survive_the_wire() -> None:
    credit = Credit(begin_through=5, min_version=3, round=2)
    publication = Publication(version=7, update=6, sha256="ab", size=99)
    assert credit == Credit.from_proto(credit.to_proto())
    assert publication == Publication.from_proto(publication.to_proto())


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Reason, refusal_pb2.Reason, "REASON_"),
        (Role, experience_pb2.Role, "ROLE_"),
        (Durability, experience_pb2.Durability, "DURABILITY_"),
        (RunState, weights_pb2.RunState, "RUN_STATE_"),
    ],
)
def test_enumerations_are_those_of_the_protocol(ours: type[Reason], theirs: object, prefix: str) -> None:
    wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}  # type: ignore[attr-defined]
    assert {member.name: member.value for member in ours} == wire


def test_labels_are_lower_case_names() -> None:
    assert Reason.NOT_READY.label == "not_ready"
    assert Durability.FSYNC_1S.label == "fsync_1s"
    assert Role.EVALUATION.label == "evaluation"
    assert RunState.STOPPING.label == "stopping"


def test_a_refusal_survives_the_wire() -> None:
    refusal = Refusal(reason=Reason.GAP, detail="hole", retry_after_ms=20, expected=4)
    assert refusal == Refusal.from_proto(refusal.to_proto())


def test_nothing_refused_is_none() -> None:
    assert Refusal.from_proto(refusal_pb2.Refusal()) is None


def test_a_refusal_raised_tells_reason_and_detail() -> None:
    error = Refused(Refusal(reason=Reason.FENCED, detail="a newer learner holds the lease"))
    assert str(error) == "fenced: a newer learner holds the lease"
    assert error.refusal.reason is Reason.FENCED


# ---- A message around its large field is protobuf's, both ways.


NUMBER = v1_pb.WatchLatestReply.WEIGHTS_FIELD_NUMBER
NEWS = v1_pb.WatchLatestReply(revision=7, scalars={"epsilon": 0.5}, latest=v1_pb.Publication(version=3))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21])
def test_protobuf_reads_what_is_written(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    whole = v1_pb.WatchLatestReply.FromString(write_around(NEWS, NUMBER, data))
    assert whole.weights == data
    whole.ClearField("weights")
    assert whole == NEWS


def test_what_protobuf_writes_is_read_without_a_copy_of_the_field() -> None:
    written = v1_pb.WatchLatestReply(weights=b"abc" * 99)
    written.MergeFrom(NEWS)
    data = written.SerializeToString()
    message, weights = read_beside(v1_pb.WatchLatestReply, NUMBER, data)
    assert (message, bytes(weights)) == (NEWS, b"abc" * 99)
    assert weights.obj is data


def test_of_several_the_last_counts() -> None:
    data = write_around(v1_pb.WatchLatestReply(), NUMBER, b"one") + write_around(NEWS, NUMBER, b"two")
    message, weights = read_beside(v1_pb.WatchLatestReply, NUMBER, data)
    assert (message, bytes(weights)) == (NEWS, b"two")
    assert v1_pb.WatchLatestReply.FromString(data).weights == b"two"


@given(st.binary(max_size=80))
def test_other_bytes_are_refused_as_protobuf_refuses_them(data: bytes) -> None:
    try:
        message, weights = read_beside(v1_pb.WatchLatestReply, NUMBER, data)
    except (DecodeError, Unfit):
        return
    message.weights = bytes(weights)
    assert message == v1_pb.WatchLatestReply.FromString(data)


def test_a_schema_survives_the_wire_with_its_id() -> None:
    back = FragmentSchema.from_proto(
        specification_pb2.FragmentSchema.FromString(SCHEMA.to_proto().SerializeToString())
    )
    assert back == SCHEMA
    assert back.schema_id == SCHEMA.schema_id


def test_the_id_does_not_depend_on_the_order_of_the_rules() -> None:
    assert FragmentSchema(SCHEMA.tensors[::-1]).schema_id == SCHEMA.schema_id


def test_the_id_changes_with_any_rule() -> None:
    base = TensorRule(name="extra/x", dtype="float32", shape=(2,))
    others = [
        TensorRule(name="extra/y", dtype="float32", shape=(2,)),
        TensorRule(name="extra/x", dtype="float64", shape=(2,)),
        TensorRule(name="extra/x", dtype="float32", shape=(3,)),
        TensorRule(name="extra/x", dtype="float32", shape=(2,), axes=Axes.SLOT),
    ]
    ids = {FragmentSchema((rule,)).schema_id for rule in [base, *others]}
    assert len(ids) == 5


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


def test_the_size_of_a_fragment_is_known_before_it_is_made() -> None:
    assert SCHEMA.fragment_bytes(5, 3, 3) == len(fragment_of(steps=5, slots=3, ends=3).payload)


def test_the_ends_that_a_message_holds_are_those_whose_last_observations_fit() -> None:
    large = Box(np.zeros((256, 256, 3), np.uint8), np.full((256, 256, 3), 255, np.uint8))
    schema = fragment_schema(large, Discrete(2))
    most = schema.most_ends(8, 4)
    assert schema.fragment_bytes(8, 4, most) <= payload_room(4) < schema.fragment_bytes(8, 4, most + 1)
    assert schema.most_ends(100, 4) < 0


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


SPECIFICATION = RunSpecification(
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


def test_a_specification_survives_redis() -> None:
    back = RunSpecification.decode(SPECIFICATION.encode())
    for field in fields(RunSpecification):
        if field.name != "probe":
            assert getattr(SPECIFICATION, field.name) == getattr(back, field.name)
    np.testing.assert_array_equal(
        SPECIFICATION.probe.observation["observation/joint"], back.probe.observation["observation/joint"]
    )
    np.testing.assert_array_equal(SPECIFICATION.probe.action["action"], back.probe.action["action"])


def test_encoding_is_the_same_every_time() -> None:
    assert SPECIFICATION.encode() == RunSpecification.decode(SPECIFICATION.encode()).encode()


def test_specification_every_field_of_the_message_is_filled() -> None:
    filled = {field.name for field, _ in SPECIFICATION.to_proto().ListFields()}
    assert {field.name for field in v1_v1_pb.RunSpecification.DESCRIPTOR.fields} == filled


def test_a_run_that_is_no_id_is_refused() -> None:
    with pytest.raises(ValueError, match="run='No Id' is not an id"):
        RunSpecification.decode(replace(SPECIFICATION, run="No Id").encode())
