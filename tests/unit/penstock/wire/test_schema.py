import numpy as np
import pytest

from penstock.protocol.schema import Axes, FragmentSchema, TensorRule, fragment_schema, payload_room
from penstock.protocol.spaces import Box, Dict, Discrete
from penstock.v1 import specification_pb2 as pb
from tests.support.experience.whole_fragments import SCHEMA, fragment_of


def test_a_schema_survives_the_wire_with_its_id() -> None:
    back = FragmentSchema.from_proto(pb.FragmentSchema.FromString(SCHEMA.to_proto().SerializeToString()))
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
        (pb.TensorRule(name="x", dtype="object", axes=pb.AXES_STEP), "schema.x: dtype 'object'"),
        (pb.TensorRule(name="x", dtype="int8", shape=[1] * 9, axes=pb.AXES_STEP), "schema.x: rank 9"),
        (pb.TensorRule(name="x", dtype="int8"), "schema.x: axes 0"),
    ],
)
def test_a_malformed_rule_is_refused_by_name(rule: pb.TensorRule, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        FragmentSchema.from_proto(pb.FragmentSchema(tensors=[rule]))
