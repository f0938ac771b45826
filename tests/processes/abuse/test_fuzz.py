"""Mutated and random bytes against every RPC: refused with a reason, nothing stored, memory flat."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from penstock.protocol.limits import MIB
from penstock.protocol.messages import Role
from penstock.v1 import experience_pb2 as experience
from tests.support.abuse.corpus import Case, make_case
from tests.support.abuse.stage import Memory, Stage, staged, unharmed
from tests.support.abuse.wire import Answer, RawChannel, Rpc, answer_of, unary_rpcs
from tests.support.run.simulated_actor import SimulatedActor

SEED: Final = 20_251
WINDOW: Final = 32
"""Calls in flight."""
HELD_S: Final = 1.0
"""A WatchLatest that became a well-formed one is held; the caller gives up after this long."""
WARM_UP: Final = 1_000
GROWTH_BYTES: Final = 32 * MIB
BURNT_SESSIONS: Final = 256
STOPS: Final = "Stop"
"""Stops the run whatever its reason is: last."""
UNSERVED: Final = "List"
"""Of the standard health service; grpc's own servicer has no body for it."""
REFUSED: Final = frozenset({
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
})  # fmt: skip


@pytest.fixture
def stage(short_folder: Path) -> Iterator[Stage]:
    """A stage of its own: some of these bytes are requests that take effect."""
    with staged(short_folder) as ready:
        yield ready


def _share(rpc: Rpc, cases: int) -> int:
    return cases // 2 if str(rpc) == "Append" else cases // 2 // (len(unary_rpcs()) - 1)


def _plan(cases: int, session: int, seed: int, last: str = STOPS) -> Iterator[Case]:
    """In an order of the seed's, so that what one RPC leaves behind meets the others."""
    rpcs = [rpc for rpc in unary_rpcs() if last or str(rpc) != STOPS]
    plan = [(rpc, number) for rpc in rpcs for number in range(_share(rpc, cases))]
    random.Random(seed).shuffle(plan)
    plan.sort(key=lambda each: str(each[0]) == last)
    yield from (make_case(rpc, seed, number, session) for rpc, number in plan)


def _stored(stage: Stage) -> dict[str, Any]:
    """What only a fragment or a report that was taken changes; nothing is left staged."""
    traces = stage.traces()
    assert not [key for key in traces["keys"] if key.startswith(b"penstock:staging:")]
    return {
        name: traces[name]
        for name in ("acked", "number", "log_bytes", "log_lost", "reports", "shadow_number")
    }


def _check(case: Case, answer: Answer) -> None:
    if str(case.rpc) == UNSERVED and answer.code is grpc.StatusCode.UNIMPLEMENTED:
        return
    held = answer.code is grpc.StatusCode.DEADLINE_EXCEEDED and str(case.rpc) == "WatchLatest"
    assert held or answer.code in REFUSED, f"{answer.code.name} {answer.text}: {case}"
    said = answer.code is grpc.StatusCode.OK or held
    assert said or answer.text or "Health" in case.rpc.path, f"{answer.code.name} without a reason: {case}"
    if str(case.rpc) == "Append" and answer.code is grpc.StatusCode.OK:
        reply = experience.AppendReply.FromString(answer.data)
        assert reply.refusal.reason, f"taken: {case}"


def _send(stage: Stage, channel: RawChannel, cases: Iterator[Case]) -> Counter[str]:
    """Keep WINDOW calls in flight; how often each status came."""
    seen: Counter[str] = Counter()
    flying: list[tuple[Case, object]] = []

    def land() -> None:
        case, future = flying.pop(0)
        answer = answer_of(future)
        _check(case, answer)
        seen[answer.code.name] += 1

    for case in cases:
        limit = HELD_S if str(case.rpc) == "WatchLatest" else 60
        flying.append((case, channel.start(case.rpc.path, case.data, timeout=limit)))
        if len(flying) >= WINDOW:
            land()
    while flying:
        land()
    return seen


def _open_far_ahead(actor: SimulatedActor) -> int:
    """A session whose number no case names by chance; it may report but not append."""
    while actor.session <= BURNT_SESSIONS:
        actor.open()
    return actor.session


@pytest.mark.parametrize(
    "cases", [5_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_no_bytes_at_all_break_a_broker_or_are_stored(stage: Stage, cases: int) -> None:
    memory = Memory(stage.broker.process.pid)
    with (
        RawChannel(stage.address) as channel,
        SimulatedActor(stage.address, "fuzzing", Role.EVALUATION) as actor,
    ):
        session = _open_far_ahead(actor)
        with unharmed(stage):
            _send(stage, channel, _plan(WARM_UP, session, SEED + 1, last=""))
            stored, resident = _stored(stage), memory.resident()
            seen = _send(stage, channel, _plan(cases, session, SEED))
            assert _stored(stage) == stored
    grown = memory.resident() - resident
    print(f"{cases} cases: {dict(seen)}; memory grew by {grown / MIB:.1f} MiB")
    assert grown <= GROWTH_BYTES
    assert seen["INVALID_ARGUMENT"] > cases // 4, seen
    assert seen["OK"] > cases // 20, seen


def test_the_same_case_is_made_again_from_seed_and_number() -> None:
    for rpc in unary_rpcs():
        for number in range(20):
            assert make_case(rpc, SEED, number, 300).data == make_case(rpc, SEED, number, 300).data
