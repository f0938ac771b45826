"""What of an Append goes to the log."""

from dataclasses import replace

import numpy as np
import pytest

from broker.admission import Admission, check_all
from penstock.v1 import fragment_pb2
from penstock.wire import fragment as fragments
from penstock.wire.fragment import Fragment, FragmentHeader, Slot, WeightSpan
from penstock.wire.refusal import Reason
from penstock.wire.schema import fragment_schema
from penstock.wire.spaces import Box, Discrete
from penstock.wire.specification import Probe, RunSpecification
from penstock.wire.tensor import Array

STEPS, SLOTS, SESSION = 4, 2, 7
OBSERVATION = Box(np.full(3, -1, np.float32), np.full(3, 1, np.float32))
SCHEMA = fragment_schema(OBSERVATION, Discrete(2))


def specification(run: str = "run-a") -> RunSpecification:
    """A run with three-number observations and two actions."""
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
        unroll_length=STEPS,
        lock_step=False,
        session_timeout_ms=1000,
    )


def arrays() -> dict[str, Array]:
    """Every tensor of a full fragment without ended episodes."""
    leading = {1: (STEPS, SLOTS), 2: (STEPS + 1, SLOTS), 3: (SLOTS,), 4: (0,)}
    return {
        rule.name: np.zeros((*leading[rule.axes.value], *rule.shape), rule.dtype) for rule in SCHEMA.tensors
    }


def fragment(sequence: int = 1, run: str = "run-a", **tensors: Array) -> Fragment:
    """A good fragment, with some tensors replaced."""
    header = FragmentHeader(
        run=run,
        session=SESSION,
        sequence=sequence,
        schema_id=SCHEMA.schema_id,
        steps=STEPS,
        slots=tuple(Slot(index, 0, 0) for index in range(SLOTS)),
        weights=(WeightSpan(0, 0, STEPS, 1, 0),),
        tensors=(),
    )
    return fragments.build(header, arrays() | tensors)


def _with(**changes: object) -> Fragment:
    good = fragment()
    return replace(good, header=replace(good.header, **changes))  # type: ignore[arg-type]


NAN = np.full((STEPS, SLOTS), np.nan, np.float32)
BAD = {
    "reward: holds NaN": fragment(reward=NAN),
    "log_prob: holds NaN": fragment(log_prob=-NAN),
    "reward: dtype float64": fragment(reward=np.zeros((STEPS, SLOTS))),
    "reward: shape": fragment(reward=np.zeros((STEPS, SLOTS + 1), np.float32)),
    "header.session=8": _with(session=8),
    "header.schema_id": _with(schema_id="0" * 64),
    "header.steps=5": _with(steps=5),
    "header.policy='../x'": _with(policy="../x"),
    "header.sequence=9007199254740993": _with(sequence=2**53 + 1),
    "header.run='run-b'": _with(run="run-b"),
    "payload": replace(fragment(), payload=fragment().payload[:-1]),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_fragment_is_invalid_and_the_reason_names_the_field(field: str) -> None:
    """With its place in the request; the good one before it is taken, the one behind it is not."""
    messages = [fragments.to_proto(each) for each in (fragment(1), BAD[field], fragment(3))]
    admitted = check_all(SESSION, messages, specification())
    assert [item.header.sequence for item in admitted.items] == [1]
    assert admitted.refusal is not None
    assert admitted.refusal.reason is Reason.INVALID
    assert admitted.refusal.detail.startswith("fragments[1]")
    assert field in admitted.refusal.detail


def test_a_good_fragment_goes_on_as_it_came() -> None:
    """Payload and header bytes unchanged, unknown fields of a newer actor included."""
    message = fragments.to_proto(fragment())
    newer = fragment_pb2.Fragment.FromString(message.SerializeToString())
    newer.header.MergeFromString(b"\x9a\x06\x03new")
    (item,) = check_all(SESSION, [newer], specification()).items
    assert item.payload == message.payload
    assert item.header_bytes == newer.header.SerializeToString()
    assert b"new" in item.header_bytes


class Shelf:
    """Where the specification is read from."""

    def __init__(self, encoded: bytes | None) -> None:
        self.encoded = encoded
        self.reads = 0

    async def read(self) -> bytes | None:
        """One look."""
        self.reads += 1
        return self.encoded


async def test_before_the_learner_wrote_the_run_an_append_is_not_ready() -> None:
    """With a time to wait."""
    admitted = await Admission(Shelf(None).read).admit(SESSION, [fragments.to_proto(fragment())])
    assert admitted.refusal is not None
    assert admitted.refusal.reason is Reason.NOT_READY
    assert admitted.refusal.retry_after_ms > 0


async def test_the_specification_is_read_once() -> None:
    """Not for every Append, and a foreign run's fragments do not make the broker read every time."""
    shelf = Shelf(specification().encode())
    admission = Admission(shelf.read)
    for _ in range(3):
        assert not (await admission.admit(SESSION, [fragments.to_proto(fragment())])).refusal
        foreign = await admission.admit(SESSION, [fragments.to_proto(fragment(run="run-b"))])
        assert foreign.refusal is not None
        assert foreign.refusal.reason is Reason.INVALID
    assert shelf.reads == 1


async def test_a_large_append_is_checked_on_a_thread_with_the_same_result() -> None:
    """Forty fragments, the last one bad."""
    messages = [fragments.to_proto(fragment(sequence)) for sequence in range(1, 40)]
    messages.append(fragments.to_proto(fragment(reward=NAN)))
    admitted = await Admission(Shelf(specification().encode()).read).admit(SESSION, messages)
    assert len(admitted.items) == 39
    assert admitted.refusal is not None
    assert "fragments[39]" in admitted.refusal.detail
