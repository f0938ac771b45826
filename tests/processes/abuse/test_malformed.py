"""Requests that are malformed, mutated or random: refused with a reason, nothing stored, memory flat."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest

from penstock.protocol.limits import MAX_NUMBER, MIB
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import weights_pb2
from tests.support.abuse.corpus import Case, make_case
from tests.support.abuse.stage import Memory, Stage, nothing_stored, session_of, staged, unharmed
from tests.support.abuse.wire import (
    CALLS,
    CONTROL,
    EXPERIENCE,
    FRAGMENTS,
    WEIGHTS,
    Answer,
    RawChannel,
    Rpc,
    answer_of,
    reward,
    unary_rpcs,
)
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.simulated_actor import SimulatedActor, refusal_of
from tests.support.run.small_run import fragment

APPEND = f"{EXPERIENCE}Append"
PEAK_BYTES = 64 * MIB
"""Most that one request may raise the broker's memory by, while it is held and parsed: some copies of it."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One for all: a request that leaves a trace makes the tests behind it fail."""
    with staged(tmp_path_factory.mktemp("stage")) as ready:
        yield ready


@pytest.fixture
def actor(stage: Stage) -> Iterator[SimulatedActor]:
    with session_of(stage, "malformed") as opened:
        yield opened


def _send(stage: Stage, path: str, data: bytes) -> Answer:
    memory = Memory(stage.broker.process.pid)
    memory.forget_peak()
    before = memory.resident()
    with nothing_stored(stage), RawChannel(stage.address) as channel:
        answer = channel.send(path, data)
    assert memory.peak() - before <= PEAK_BYTES
    return answer


def _refusal(answer: Answer) -> tuple[Reason, str]:
    assert answer.code is grpc.StatusCode.OK, answer
    reply = experience.AppendReply.FromString(answer.data)
    return Reason(reply.refusal.reason), reply.refusal.detail


@pytest.mark.promise("fragment-breaks-run-s")
@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_malformed_fragment_is_refused_as_invalid(stage: Stage, actor: SimulatedActor, name: str) -> None:
    make, words = FRAGMENTS[name]
    request = experience.AppendRequest(session=actor.session, fragments=[to_proto(make(actor.session))])
    reason, detail = _refusal(_send(stage, APPEND, request.SerializeToString()))
    assert reason is Reason.INVALID
    assert words in detail


@pytest.mark.promise("bad-request-refused-field", "evaluation-sessions-report-evaluations")
@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_is_refused(stage: Stage, actor: SimulatedActor, name: str) -> None:
    path, make, words = CALLS[name]
    answer = _send(stage, path, make(actor.session))
    if words.startswith("INVALID "):
        reason, detail = _refusal(answer)
        assert reason is Reason.INVALID
        assert words.removeprefix("INVALID ") in detail
    else:
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, answer
        assert words in answer.text


def test_the_good_fragments_before_a_bad_one_are_taken(stage: Stage, actor: SimulatedActor) -> None:
    before, session = stage.learner.acked(), actor.session
    reply = actor.send(
        fragment(session, 1), fragment(session, 2, reward=reward(np.nan)), fragment(session, 3)
    )
    assert reply.acked_through == 1
    assert "fragments[1] (sequence 2)" in refusal_of(reply).detail
    assert stage.learner.acked() == before + 1


def test_malformed_fragments_do_not_harm_an_honest_actor(stage: Stage) -> None:
    with unharmed(stage), RawChannel(stage.address) as channel, session_of(stage, "malformed") as actor:
        session = actor.session
        for make, _ in FRAGMENTS.values():
            request = experience.AppendRequest(session=session, fragments=[to_proto(make(session))])
            assert _refusal(channel.send(APPEND, request.SerializeToString()))[0] is Reason.INVALID
        for path, make_call, _ in CALLS.values():
            channel.send(path, make_call(session))


def test_one_session_cannot_break_the_status(stage: Stage, actor: SimulatedActor) -> None:
    with RawChannel(stage.address) as channel:
        for name in ("watch that applied version 2^64 - 1", "watch that began sequence 2^64 - 1"):
            path, make, _ = CALLS[name]
            assert channel.send(path, make(actor.session)).code is grpc.StatusCode.INVALID_ARGUMENT
        most = weights_pb2.WatchLatestRequest(
            session=actor.session, applied_version=MAX_NUMBER, begun_through=MAX_NUMBER
        )
        assert channel.send(f"{WEIGHTS}WatchLatest", most.SerializeToString()).code is grpc.StatusCode.OK
        assert channel.send(f"{CONTROL}Status", b"").code is grpc.StatusCode.OK


SEED: Final = 20_251
WINDOW: Final = 32
"""Calls in flight."""
HELD_S: Final = 1.0
"""A WatchLatest that became a well-formed one is held; the caller gives up after this long."""
WARM_UP: Final = 1_000
GROWTH_BYTES: Final = 32 * MIB
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
def own_stage(short_folder: Path) -> Iterator[Stage]:
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


def _send_all(channel: RawChannel, cases: Iterator[Case]) -> Counter[str]:
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
    while actor.session <= 256:
        actor.open()
    return actor.session


@pytest.mark.parametrize(
    "cases", [5_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_random_bytes_neither_break_a_broker_nor_are_stored(own_stage: Stage, cases: int) -> None:
    stage = own_stage
    memory = Memory(stage.broker.process.pid)
    with (
        RawChannel(stage.address) as channel,
        SimulatedActor(stage.address, "fuzzing", Role.EVALUATION) as actor,
    ):
        session = _open_far_ahead(actor)
        with unharmed(stage):
            _send_all(channel, _plan(WARM_UP, session, SEED + 1, last=""))
            stored, resident = _stored(stage), memory.resident()
            seen = _send_all(channel, _plan(cases, session, SEED))
            assert _stored(stage) == stored
    grown = memory.resident() - resident
    print(f"{cases} cases: {dict(seen)}; memory grew by {grown / MIB:.1f} MiB")
    assert grown <= GROWTH_BYTES
    assert seen["INVALID_ARGUMENT"] > cases // 4, seen
    assert seen["OK"] > cases // 20, seen
