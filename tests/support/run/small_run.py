"""A run of the smallest size that has every part: what tests of broker and actor send about."""

import numpy as np

from penstock.protocol import fragment as fragments
from penstock.protocol.fragment import Fragment, FragmentHeader, Slot, WeightSpan
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.specification import Probe, RunSpecification
from penstock.protocol.tensor import Array

RUN = "run-a"
STEPS, SLOTS = 4, 2
CHARGE = STEPS * SLOTS
OBSERVATION = Box(np.full(3, -1, np.float32), np.full(3, 1, np.float32))
SCHEMA = fragment_schema(OBSERVATION, Discrete(2))


def specification(
    run: str = RUN, *, session_timeout_ms: int = 30_000, lock_step: bool = False, unroll_length: int = STEPS
) -> RunSpecification:
    return RunSpecification(
        run=run,
        seed=0,
        environment_json="{}",
        policy_json="{}",
        actor_json="{}",
        evaluation_json="{}",
        workload="control",
        observation_space=OBSERVATION,
        action_space=Discrete(2),
        schema=SCHEMA,
        probe=Probe({}, {}),
        unroll_length=unroll_length,
        lock_step=lock_step,
        session_timeout_ms=session_timeout_ms,
    )


def arrays() -> dict[str, Array]:
    leading = {1: (STEPS, SLOTS), 2: (STEPS + 1, SLOTS), 3: (SLOTS,), 4: (0,)}
    return {
        rule.name: np.zeros((*leading[rule.axes.value], *rule.shape), rule.dtype) for rule in SCHEMA.tensors
    }


def fragment(session: int, sequence: int = 1, run: str = RUN, version: int = 1, **tensors: Array) -> Fragment:
    header = FragmentHeader(
        run=run,
        session=session,
        sequence=sequence,
        schema_id=SCHEMA.schema_id,
        steps=STEPS,
        slots=tuple(Slot(index, 0, (sequence - 1) * STEPS) for index in range(SLOTS)),
        weights=(WeightSpan(0, 0, STEPS, version, 0),),
        tensors=(),
    )
    return fragments.build(header, arrays() | tensors)
