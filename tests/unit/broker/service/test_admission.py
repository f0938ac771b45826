"""What of an Append goes to the log."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.broker.service.experience_service import (
    REFRESH_INTERVAL_S,
    REFUSED_INTERVAL_S,
    Admission,
    check_all,
)
from penstock.protocol.fragment import Fragment
from penstock.protocol.refusal import Reason
from tests.support.experience.fragment_messages import sent
from tests.support.run.small_run import SLOTS, STEPS, fragment, specification

SESSION = 7


def _with(**changes: object) -> Fragment:
    good = fragment(SESSION)
    return replace(good, header=replace(good.header, **changes))  # type: ignore[arg-type]


NAN = np.full((STEPS, SLOTS), np.nan, np.float32)
BAD = {
    "reward: holds NaN": fragment(SESSION, reward=NAN),
    "log_prob: holds NaN": fragment(SESSION, log_prob=-NAN),
    "reward: dtype float64": fragment(SESSION, reward=np.zeros((STEPS, SLOTS))),
    "reward: shape": fragment(SESSION, reward=np.zeros((STEPS, SLOTS + 1), np.float32)),
    "header.session=8": _with(session=8),
    "header.schema_id": _with(schema_id="0" * 64),
    "header.steps=5": _with(steps=5),
    "header.policy='../x'": _with(policy="../x"),
    "header.sequence=9007199254740993": _with(sequence=2**53 + 1),
    "header.run='run-b'": _with(run="run-b"),
    "payload": replace(fragment(SESSION), payload=fragment(SESSION).payload[:-1]),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_fragment_is_invalid_and_the_reason_names_the_field(field: str) -> None:
    messages = [sent(each) for each in (fragment(SESSION, 1), BAD[field], fragment(SESSION, 3))]
    admitted = check_all(SESSION, messages, specification())
    assert [item.header.sequence for item in admitted.items] == [1]
    assert admitted.refusal is not None
    assert admitted.refusal.reason is Reason.INVALID
    assert admitted.refusal.detail.startswith("fragments[1]")
    assert field in admitted.refusal.detail


def test_a_good_fragment_goes_on_as_it_came() -> None:
    newer = sent(fragment(SESSION))
    newer.header.MergeFromString(b"\x9a\x06\x03new")
    (item,) = check_all(SESSION, [newer], specification()).items
    assert item.payload == fragment(SESSION).payload
    assert item.header_bytes == newer.header.SerializeToString()
    assert b"new" in item.header_bytes


class StoredSpecification:
    """Where the specification is read from."""

    def __init__(self, encoded: bytes | None) -> None:
        self.encoded = encoded
        self.reads = 0

    async def read(self) -> bytes | None:
        """One look."""
        self.reads += 1
        return self.encoded


async def confirmed() -> None:
    """The run is the incarnation that was read."""


async def test_before_the_learner_wrote_the_run_an_append_is_not_ready() -> None:
    admitted = await Admission(StoredSpecification(None).read, confirmed).admit(
        SESSION, [sent(fragment(SESSION))]
    )
    assert admitted.refusal is not None
    assert admitted.refusal.reason is Reason.NOT_READY
    assert admitted.refusal.retry_after_ms > 0


async def test_the_specification_is_read_once() -> None:
    stored = StoredSpecification(specification().encode())
    admission = Admission(stored.read, confirmed, Clock())
    for _ in range(3):
        assert not (await admission.admit(SESSION, [sent(fragment(SESSION))])).refusal
        foreign = await admission.admit(SESSION, [sent(fragment(SESSION, run="run-b"))])
        assert foreign.refusal is not None
        assert foreign.refusal.reason is Reason.INVALID
    assert stored.reads == 1


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


@pytest.mark.promise("reward-log-probability-beyond")
async def test_bounds_that_a_resumed_learner_lowered_hold_from_the_next_second() -> None:
    stored, clock = StoredSpecification(specification().encode()), Clock()
    admission = Admission(stored.read, confirmed, clock)
    rewards = fragment(SESSION, reward=np.full((STEPS, SLOTS), 50.0, np.float32))
    assert not (await admission.admit(SESSION, [sent(rewards)])).refusal
    stored.encoded = replace(specification(), max_reward=10.0).encode()
    clock.now_s += REFRESH_INTERVAL_S
    admitted = await admission.admit(SESSION, [sent(rewards)])
    assert admitted.refusal is not None
    assert "broker.max_reward=10" in admitted.refusal.detail


@pytest.mark.promise("reward-log-probability-beyond")
async def test_nothing_is_refused_by_bounds_that_a_resumed_learner_raised() -> None:
    stored, clock = StoredSpecification(replace(specification(), max_reward=10.0).encode()), Clock()
    admission = Admission(stored.read, confirmed, clock)
    assert not (await admission.admit(SESSION, [sent(fragment(SESSION))])).refusal
    stored.encoded = specification().encode()
    clock.now_s += 2 * REFUSED_INTERVAL_S
    rewards = fragment(SESSION, reward=np.full((STEPS, SLOTS), 50.0, np.float32))
    assert not (await admission.admit(SESSION, [sent(rewards)])).refusal


async def test_a_large_append_is_checked_on_a_thread_with_the_same_result() -> None:
    messages = [sent(fragment(SESSION, sequence)) for sequence in range(1, 40)]
    messages.append(sent(fragment(SESSION, reward=NAN)))
    admitted = await Admission(StoredSpecification(specification().encode()).read, confirmed).admit(
        SESSION, messages
    )
    assert len(admitted.items) == 39
    assert admitted.refusal is not None
    assert "fragments[39]" in admitted.refusal.detail
