"""Malformed requests by name: each refused with a reason, nothing stored, memory flat."""

from collections.abc import Iterator

import grpc
import pytest

from penstock.protocol.limits import MAX_NUMBER, MIB
from penstock.protocol.refusal import Reason
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import weights_pb2
from tests.support.abuse.stage import Memory, Stage, nothing_stored, session_of, staged, unharmed
from tests.support.abuse.wire import CALLS, CONTROL, EXPERIENCE, FRAGMENTS, WEIGHTS, Answer, RawChannel
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.simulated_actor import SimulatedActor

APPEND = f"{EXPERIENCE}Append"
LEAST_NAMES = 60
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


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_malformed_fragment_is_refused_as_invalid(stage: Stage, actor: SimulatedActor, name: str) -> None:
    make, words = FRAGMENTS[name]
    request = experience.AppendRequest(session=actor.session, fragments=[to_proto(make(actor.session))])
    reason, detail = _refusal(_send(stage, APPEND, request.SerializeToString()))
    assert reason is Reason.INVALID
    assert words in detail


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


def test_all_of_them_leave_an_honest_actor_unharmed(stage: Stage) -> None:
    assert len(FRAGMENTS) + len(CALLS) >= LEAST_NAMES
    with (
        unharmed(stage),
        RawChannel(stage.address) as channel,
        session_of(stage, "malformed") as actor,
    ):
        session = actor.session
        for make, _ in FRAGMENTS.values():
            request = experience.AppendRequest(session=session, fragments=[to_proto(make(session))])
            assert _refusal(channel.send(APPEND, request.SerializeToString()))[0] is Reason.INVALID
        for path, make_call, _ in CALLS.values():
            channel.send(path, make_call(session))


def test_one_session_cannot_break_status_for_everybody(stage: Stage, actor: SimulatedActor) -> None:
    with RawChannel(stage.address) as channel:
        for name in ("watch that applied version 2^64 - 1", "watch that began sequence 2^64 - 1"):
            path, make, _ = CALLS[name]
            assert channel.send(path, make(actor.session)).code is grpc.StatusCode.INVALID_ARGUMENT
        most = weights_pb2.WatchLatestRequest(
            session=actor.session, applied_version=MAX_NUMBER, begun_through=MAX_NUMBER
        )
        assert channel.send(f"{WEIGHTS}WatchLatest", most.SerializeToString()).code is grpc.StatusCode.OK
        assert channel.send(f"{CONTROL}Status", b"").code is grpc.StatusCode.OK
