from dataclasses import fields, replace

import numpy as np
import pytest

from penstock.protocol.spaces import Discrete
from penstock.protocol.specification import Probe, RunSpecification
from penstock.v1 import specification_pb2 as pb
from tests.support.experience.whole_fragments import OBSERVATION, RUN, SCHEMA

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


def test_every_field_of_the_message_is_filled() -> None:
    filled = {field.name for field, _ in SPECIFICATION.to_proto().ListFields()}
    assert {field.name for field in pb.RunSpecification.DESCRIPTOR.fields} == filled


def test_a_run_that_is_no_id_is_refused() -> None:
    with pytest.raises(ValueError, match="run='No Id' is not an id"):
        RunSpecification.decode(replace(SPECIFICATION, run="No Id").encode())
