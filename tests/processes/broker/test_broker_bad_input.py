"""What a broker answers to input that breaks the contract: a reason with field and value, nothing stored."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.broker.log.learner_log import LearnerLog
from penstock.protocol import fragment as fragments
from penstock.protocol.limits import (
    MAX_EPISODES_PER_REPORT,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_MESSAGE_BYTES,
    MAX_PROBE_ANSWERS,
    MAX_WATCH_WAIT_MS,
)
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason
from penstock.v1 import control_pb2, control_pb2_grpc, weights_pb2
from penstock.v1 import experience_pb2 as experience
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.harness import BrokerProcess, eventually, launch, open_run
from tests.support.run.simulated_actor import SimulatedActor, code_of, refusal_of
from tests.support.run.small_run import SLOTS, STEPS, fragment
from tests.support.storage.redis_server import RedisServer, find_binaries

NAN = np.full((STEPS, SLOTS), np.nan, np.float32)


@dataclass(frozen=True)
class Stage:
    """One broker and one learner for all tests here: bad input must leave no trace for the next."""

    broker: BrokerProcess
    learner: LearnerLog


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    server = RedisServer(find_binaries()[0], tmp_path_factory.mktemp("redis"))
    server.start()
    learner = open_run(server.url)
    broker = launch(server.url, tmp_path_factory.mktemp("broker"))
    eventually(broker.is_ready, "readiness of the broker")
    yield Stage(broker, learner)
    broker.end()
    learner.close()
    server.kill()


@pytest.fixture
def learner(stage: Stage) -> LearnerLog:
    stage.learner.settle(2**40)
    return stage.learner


@pytest.fixture
def actor(stage: Stage, learner: LearnerLog) -> Iterator[SimulatedActor]:
    """An actor with a new session; it is closed afterwards."""
    with SimulatedActor(stage.broker.address, "a-1") as opened:
        opened.open()
        yield opened


@contextmanager
def nothing_stored(learner: LearnerLog) -> Iterator[None]:
    def traces() -> tuple[int, int, int, set[bytes]]:
        return (
            learner.acked(),
            learner.residue(0).entries,
            len(learner.read_reports(0, 100)),
            set(learner._calls.client.scan_iter("penstock:staging:*")),
        )

    before = traces()
    yield
    assert traces() == before


def _changed(good: fragments.Fragment, **changes: Any) -> fragments.Fragment:
    return replace(good, header=replace(good.header, **changes))


def _entry(good: fragments.Fragment, **changes: Any) -> fragments.Fragment:
    first, *others = good.header.tensors
    return _changed(good, tensors=(first._replace(**changes), *others))


BAD_FRAGMENTS: dict[str, Callable[[int], fragments.Fragment]] = {
    "reward: holds NaN": lambda s: fragment(s, reward=NAN),
    "reward: holds NaN or infinity": lambda s: fragment(
        s, reward=np.full((STEPS, SLOTS), -np.inf, np.float32)
    ),
    "log_prob: holds NaN": lambda s: fragment(s, log_prob=NAN),
    "reward: dtype float64": lambda s: fragment(s, reward=np.zeros((STEPS, SLOTS))),
    "reward: shape (4, 3)": lambda s: fragment(s, reward=np.zeros((STEPS, SLOTS + 1), np.float32)),
    "observation: shape": lambda s: fragment(s, observation=np.zeros((STEPS, SLOTS, 3), np.float32)),
    "observation: dtype": lambda s: fragment(s, observation=np.zeros((STEPS + 1, SLOTS, 3), np.float64)),
    "missing ['action']": lambda s: _changed(fragment(s), tensors=fragment(s).header.tensors[1:]),
    "dtype object": lambda s: _entry(fragment(s), dtype="object"),
    "codec": lambda s: _entry(fragment(s), codec="pickle"),
    "raw_size": lambda s: _entry(fragment(s), raw_size=2**63),
    "shape": lambda s: _entry(fragment(s), shape=(2**32, 2**32)),
    "offset": lambda s: _entry(fragment(s), offset=2**63),
    "payload": lambda s: replace(fragment(s), payload=b""),
    "header.run": lambda s: fragment(s, run="another-run"),
    "header.policy": lambda s: _changed(fragment(s), policy="../../etc"),
    "header.schema_id": lambda s: _changed(fragment(s), schema_id="f" * 64),
    "header.session": lambda s: fragment(s + 1),
    "header.steps=5": lambda s: _changed(fragment(s), steps=STEPS + 1),
    "T=0": lambda s: _changed(fragment(s), steps=0),
    "N=0": lambda s: _changed(fragment(s), slots=()),
    "header.weights": lambda s: _changed(fragment(s), weights=()),
    "header.attributes": lambda s: _changed(fragment(s), attributes=b"x" * 1025),
}


@pytest.mark.promise("fragment-breaks-run-s")
@pytest.mark.parametrize("field", BAD_FRAGMENTS)
def test_a_bad_fragment_is_refused_as_invalid_and_not_stored(
    actor: SimulatedActor, learner: LearnerLog, field: str
) -> None:
    with nothing_stored(learner):
        refusal = refusal_of(actor.send(BAD_FRAGMENTS[field](actor.session)))
    assert refusal.reason is Reason.INVALID
    assert field in refusal.detail


def test_the_good_fragments_before_a_bad_one_are_taken(actor: SimulatedActor, learner: LearnerLog) -> None:
    before = learner.acked()
    good, bad, behind = (
        fragment(actor.session, 1),
        fragment(actor.session, 2, reward=NAN),
        fragment(actor.session, 3),
    )
    reply = actor.send(good, bad, behind)
    assert reply.acked_through == 1
    assert "fragments[1] (sequence 2)" in refusal_of(reply).detail
    assert learner.acked() == before + 1


def test_sequence_zero_and_one_without_credit_are_invalid(actor: SimulatedActor, learner: LearnerLog) -> None:
    assert refusal_of(actor.send(_changed(fragment(actor.session), sequence=0))).reason is Reason.INVALID
    sequence = actor.acked_through
    while sequence < actor.begin_through + 200:
        sequence += 1
        reply = actor.send(fragment(actor.session, sequence))
        if reply.refusal.reason:
            break
    assert "without credit" in refusal_of(reply).detail


def test_an_evaluation_session_appends_nothing(stage: Stage, learner: LearnerLog) -> None:
    with SimulatedActor(stage.broker.address, "e-1", Role.EVALUATION) as evaluator:
        evaluator.open()
        with nothing_stored(learner):
            assert refusal_of(evaluator.send(fragment(evaluator.session, 1))).reason is Reason.INVALID


def _append(actor: SimulatedActor, **fields: Any) -> Any:
    return actor.experience.Append(experience.AppendRequest(**fields), timeout=10)


def _report(actor: SimulatedActor, **fields: Any) -> Any:
    return actor.experience.ReportEpisodes(experience.ReportEpisodesRequest(**fields), timeout=10)


def _open(actor: SimulatedActor, **fields: Any) -> Any:
    return actor.experience.OpenSession(experience.OpenSessionRequest(**fields), timeout=10)


def _watch(actor: SimulatedActor, **fields: Any) -> Any:
    return actor.weights.WatchLatest(weights_pb2.WatchLatestRequest(**fields), timeout=10)


def _weights(actor: SimulatedActor, **fields: Any) -> Any:
    return actor.weights.GetWeights(weights_pb2.GetWeightsRequest(**fields), timeout=10)


def _pause(actor: SimulatedActor, **fields: Any) -> Any:
    control = control_pb2_grpc.ControlServiceStub(actor.channel)
    return control.Pause(control_pb2.ControlRequest(**fields), timeout=10)


BAD_CALLS: list[tuple[str, Callable[[SimulatedActor], Any]]] = [
    ("actor_id=''", lambda a: _open(a, actor_id="", role=1)),
    ("actor_id='../x'", lambda a: _open(a, actor_id="../x", role=1)),
    ("actor_id='a:*\\x00'", lambda a: _open(a, actor_id="a:*\0", role=1)),
    ("actor_id='aaaa", lambda a: _open(a, actor_id="a" * 10_000, role=1)),
    ("role=0", lambda a: _open(a, actor_id="a-1")),
    ("role=9", lambda a: _open(a, actor_id="a-1", role=9)),
    ("session=0", lambda a: _append(a, fragments=[to_proto(fragment(1))])),
    ("fragments: 0", lambda a: _append(a, session=a.session)),
    (
        f"fragments: more in one Append than {MAX_FRAGMENTS_PER_APPEND}",
        lambda a: _append(
            a,
            session=a.session,
            fragments=[to_proto(fragment(a.session, i)) for i in range(1, MAX_FRAGMENTS_PER_APPEND + 2)],
        ),
    ),
    (
        "acked_through=18446744073709551615",
        lambda a: _append(
            a,
            session=a.session,
            acked_through=2**64 - 1,
            fragments=[to_proto(fragment(a.session))],
        ),
    ),
    ("session=0", lambda a: a.experience.CloseSession(experience.CloseSessionRequest(), timeout=10)),
    ("sequence=0", lambda a: _report(a, session=a.session)),
    (
        "episodes[0].episode_return=nan",
        lambda a: _report(
            a, session=a.session, sequence=1, episodes=[experience.Episode(episode_return=float("nan"))]
        ),
    ),
    (
        "episodes[1].episode_return=1.7e+308",
        lambda a: _report(
            a,
            session=a.session,
            sequence=1,
            episodes=[experience.Episode(), experience.Episode(episode_return=1.7e308)],
        ),
    ),
    (
        f"episodes: {MAX_EPISODES_PER_REPORT + 1}",
        lambda a: _report(
            a, session=a.session, sequence=1, episodes=[experience.Episode()] * (MAX_EPISODES_PER_REPORT + 1)
        ),
    ),
    ("session=0", _watch),
    (
        f"wait_ms={MAX_WATCH_WAIT_MS + 1}",
        lambda a: _watch(a, session=a.session, wait_ms=MAX_WATCH_WAIT_MS + 1),
    ),
    ("applied_sha256='xyz'", lambda a: _watch(a, session=a.session, applied_sha256="xyz")),
    (
        f"probe_log_prob: {MAX_PROBE_ANSWERS + 1}",
        lambda a: _watch(a, session=a.session, probe_log_prob=[0.0] * (MAX_PROBE_ANSWERS + 1)),
    ),
    ("version=0", lambda a: _weights(a, session=a.session)),
    ("offset=", lambda a: _weights(a, session=a.session, version=1, offset=2**63)),
    ("reason: 1025", lambda a: _pause(a, reason="x" * 1025)),
]


@pytest.mark.promise("bad-request-refused-field", "evaluation-sessions-report-evaluations")
@pytest.mark.parametrize(
    ("field", "call"), BAD_CALLS, ids=[f"{i}-{field[:24]}" for i, (field, _) in enumerate(BAD_CALLS)]
)
def test_a_bad_request_is_an_invalid_argument_that_names_the_field(
    actor: SimulatedActor, learner: LearnerLog, field: str, call: Callable[[SimulatedActor], Any]
) -> None:
    with nothing_stored(learner), pytest.raises(grpc.RpcError) as caught:
        call(actor)
    code, text = code_of(caught.value)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in text
    assert actor.send(fragment(actor.session, 1)).acked_through == 1


def test_a_version_that_is_gone_is_not_found(actor: SimulatedActor) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _weights(actor, session=actor.session, version=999)
    assert code_of(caught.value)[0] is grpc.StatusCode.NOT_FOUND
    assert "version=999" in code_of(caught.value)[1]


@pytest.mark.promise("bad-request-refused-field")
def test_a_message_over_the_limit_is_an_invalid_argument(stage: Stage, learner: LearnerLog) -> None:
    with (
        SimulatedActor(stage.broker.address, "a-1") as actor,
        grpc.insecure_channel(stage.broker.address) as unbounded,
    ):
        actor.open()
        big = replace(fragment(actor.session, 1), payload=b"\0" * MAX_MESSAGE_BYTES)
        request = experience.AppendRequest(session=actor.session, fragments=[to_proto(big)])
        with nothing_stored(learner), pytest.raises(grpc.RpcError) as caught:
            unbounded.unary_unary("/penstock.v1.ExperienceService/Append", None, None)(
                request.SerializeToString(), timeout=10
            )
    code, text = code_of(caught.value)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"at most {MAX_MESSAGE_BYTES}" in text


@pytest.mark.promise("nothing-unpickled")
def test_pickles_are_bytes_like_others_and_never_loaded(
    actor: SimulatedActor, learner: LearnerLog, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    evil = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    refusal = refusal_of(actor.send(replace(fragment(actor.session, 1), payload=evil)))
    assert refusal.reason is Reason.INVALID
    assert not canary.exists()
