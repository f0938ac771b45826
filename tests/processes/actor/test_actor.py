"""Actors in a real run: Redis, a broker process, and the learner's side stepped by the test."""

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session, open_session
from penstock.actor.rollout.generator import EnvironmentGenerator, make_generator
from penstock.broker.log.replies import Commit, ProbeAnswer, Totals
from penstock.config.settings import ConfigurationError, load
from penstock.policy.weights import encode
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Role
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle
from penstock.v1 import control_pb2, control_pb2_grpc, experience_pb2, experience_pb2_grpc
from tests.support.experience import faulty_environments
from tests.support.run.actor_run import (
    PATIENCE_S,
    UNROLL,
    ActorThread,
    Plan,
    ScriptedLearner,
    launch_actor,
)
from tests.support.run.harness import BrokerProcess, eventually, launch
from tests.support.storage.redis_server import RedisServer

Begin = Callable[..., ScriptedLearner]
FAULTY = "tests.support.experience.faulty_environments"
OWN = "tests.support.experience.own_networks"


@pytest.fixture
def begin(redis_url: str) -> Iterator[Begin]:
    learners: list[ScriptedLearner] = []

    def make(**plan: Any) -> ScriptedLearner:
        learner = ScriptedLearner(redis_url, Plan(**plan))
        learners.append(learner)
        if not learner.specification.lock_step:
            learner.publish()
        return learner

    yield make
    for learner in learners:
        learner.log.close()


def assert_dense(learner: ScriptedLearner) -> None:
    """Within each session the log holds 1..s in order, and everything acknowledged is there."""
    learner.read()
    for session, sequences in learner.sequences().items():
        assert sequences == list(range(1, len(sequences) + 1)), session
    assert learner.log.acked() == len(learner.fragments)


@pytest.mark.parametrize(
    ("policy", "count"),
    [({"hidden_sizes": [8]}, 30), ({"network": f"{OWN}:Good"}, 8), ({"hidden_sizes": [500, 500]}, 10)],
    ids=["small", "the user's own", "above one message"],
)
def test_fragments_agree_with_the_published_weights(
    broker: BrokerProcess, begin: Begin, policy: dict[str, Any], count: int
) -> None:
    learner = begin(policy=policy)
    with ActorThread(broker.address, "actor-0", allow_modules=[OWN]):
        eventually(lambda: learner.learn() >= count, "fragments")
    assert_dense(learner)
    versions = {fragment.header.oldest_version for fragment in learner.fragments}
    assert len(versions) > count // 10
    for fragment in learner.fragments:
        arrays: dict[str, Any] = fragment.arrays()
        policy_then = learner.policies[fragment.header.oldest_version]
        steps = fragment.header.charge
        observed = {"observation": arrays["observation"][:-1].reshape(steps, 4).copy()}
        expected = policy_then.log_prob(observed, {"action": arrays["action"].reshape(steps).copy()})
        np.testing.assert_allclose(arrays["log_prob"].reshape(steps), expected, atol=2e-5)


def test_every_finished_episode_is_reported_once(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin()
    actor = ActorThread(broker.address, "actor-0")
    eventually(lambda: learner.learn() >= 40, "forty fragments")
    assert actor.drain() == EXIT_OK
    learner.read()
    ended = sum(int(fragment.arrays()["final/slot"].size) for fragment in learner.fragments)
    episodes = learner.episodes()
    assert len(episodes) == ended > 0
    assert len({(episode.slot_id, episode.episode_id) for episode in episodes}) == ended
    # CartPole gives 1 per step.
    assert all(episode.episode_return == episode.length for episode in episodes)


def test_an_actor_waits_without_credit(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin(budget_fragments=3)
    with ActorThread(broker.address, "actor-0"):
        eventually(lambda: learner.read() == 3, "the budget")
        assert learner.log.read(learner.position, 10, 500) == []
        learner.publish()
        eventually(lambda: learner.read() == 6, "the next budget")
    assert {f.header.oldest_version for f in learner.fragments[3:]} == {2}


def test_after_credit_without_new_weights_the_next_watch_starts_at_once(
    broker: BrokerProcess, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.actor.link.session._IDLE_S", 600.0)
    learner = begin(budget_fragments=1)

    def settle_one() -> None:
        before = len(learner.fragments)
        eventually(lambda: learner.read() > before, "a fragment")
        learner.log.settle(learner.position)

    with ActorThread(broker.address, "actor-0"):
        for _ in range(6):
            settle_one()
    assert {fragment.header.oldest_version for fragment in learner.fragments} == {1}


@pytest.mark.promise("actor-continues-without-help")
def test_an_actor_continues_when_the_broker_is_killed(
    broker: BrokerProcess, begin: Begin, redis_url: str, tmp_path: Path
) -> None:
    learner = begin()
    with ActorThread(broker.address, "actor-0"):
        eventually(lambda: learner.learn() >= 10, "ten fragments")
        broker.process.send_signal(signal.SIGKILL)
        broker.process.wait()
        again = launch(redis_url, tmp_path / "again", listen=broker.address)
        eventually(again.is_ready, "readiness of the second broker")
        before = len(learner.fragments)
        eventually(lambda: learner.learn() >= before + 10, "ten more")
    again.end()
    assert_dense(learner)
    assert len(learner.sequences()) == 1


@pytest.mark.promise("actor-continues-without-help")
def test_an_actor_continues_when_redis_is_killed(
    redis_server: RedisServer, broker: BrokerProcess, begin: Begin
) -> None:
    learner = begin()
    with ActorThread(broker.address, "actor-0"):
        eventually(lambda: learner.learn() >= 10, "ten fragments")
        redis_server.restart()
        learner.log.reopen(learner.log.snapshot())
        learner.publish()
        before = len(learner.fragments)
        eventually(lambda: learner.learn() >= before + 10, "ten more")


def test_a_lost_session_is_followed_by_another_with_new_seeds(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin()
    channel = open_channel(broker.address, Credentials())
    with ActorThread(broker.address, "actor-0"):
        eventually(lambda: learner.learn() >= 5, "five fragments")
        session = learner.fragments[0].header.session
        experience_pb2_grpc.ExperienceServiceStub(channel).CloseSession(
            experience_pb2.CloseSessionRequest(session=session), timeout=5
        )
        eventually(lambda: learner.learn() and len(learner.sequences()) == 2, "a second session")
    channel.close()
    assert_dense(learner)
    first = {f.header.session: f for f in learner.fragments if f.header.sequence == 1}
    one, two = (fragment.arrays()["observation"][0] for fragment in first.values())
    assert (one != two).any()


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.EVALUATION])
def test_an_actor_keeps_nothing_of_lost_sessions(broker: BrokerProcess, begin: Begin, role: Role) -> None:
    learner = begin(session_timeout_ms=3_000)
    stub = experience_pb2_grpc.ExperienceServiceStub(channel := open_channel(broker.address, Credentials()))

    def newest() -> int:
        learner.learn()
        return max(session_numbers(), default=0)

    with only_new_objects(), ActorThread(broker.address, "actor-0", role):
        for _ in range(3):
            eventually(newest, "a session")
            number = newest()
            stub.CloseSession(experience_pb2.CloseSessionRequest(session=number), timeout=5)
            eventually(lambda at=number: newest() > at, "the next session")  # type: ignore[misc]
        eventually(lambda: newest() and len(session_numbers()) == 1, "the end of the lost sessions")
    channel.close()


@contextmanager
def only_new_objects() -> Iterator[None]:
    """The garbage collector sees what is made from now on.

    All that a thousand tests left takes it seconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def session_numbers() -> list[int]:
    gc.collect()
    return [found.number for found in gc.get_objects() if type(found) is Session]


def test_a_frozen_or_killed_actor_returns_in_a_new_session(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin(session_timeout_ms=1_000)
    actor = launch_actor(broker.address, "actor-0")
    try:
        eventually(lambda: learner.learn() >= 5, "five fragments", 60)
        actor.send_signal(signal.SIGSTOP)
        eventually(lambda: learner.learn() and learner.log.renew().rollout_sessions == 0, "expiry")
        actor.send_signal(signal.SIGCONT)
        eventually(lambda: learner.learn() and len(learner.sequences()) == 2, "a second session")
        actor.kill()
        actor.wait()
        actor = launch_actor(broker.address, "actor-0")
        eventually(lambda: learner.learn() and len(learner.sequences()) == 3, "a third session", 60)
        actor.terminate()
        assert actor.wait(30) == EXIT_OK
    finally:
        actor.kill()
    assert_dense(learner)


def test_a_second_actor_of_the_same_name_ends_the_first(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin()
    first = ActorThread(broker.address, "actor-0")
    eventually(lambda: learner.learn() >= 3, "fragments of the first")
    with ActorThread(broker.address, "actor-0"):
        eventually(lambda: learner.learn() and first.error is not None, "the end of the first")
        eventually(lambda: learner.learn() and len(learner.sequences()) >= 2, "fragments of the second")
    error = first.join()
    assert isinstance(error, Fatal)
    assert "another process" in str(error)
    assert_dense(learner)


@pytest.mark.parametrize("name", ["NotANumber-v0", "NotANumberAtItsEnd-v0"])
def test_an_environment_whose_rewards_are_no_numbers_ends_the_actor(
    broker: BrokerProcess, begin: Begin, name: str
) -> None:
    learner = begin(environment={"id": f"{FAULTY}:{name}", "count": 2})
    actor = ActorThread(broker.address, "actor-0", allow_modules=[FAULTY])
    eventually(lambda: learner.learn() >= 0 and actor.error is not None, "the end of the actor")
    error = actor.join()
    assert isinstance(error, Fatal)
    assert f"{name}': step: reward=nan (5 failures in a row)" in str(error)
    assert learner.episodes() == []


@pytest.mark.promise("actor-makes-environments-session")
def test_steps_collected_before_an_environment_hangs_are_delivered(
    broker: BrokerProcess, begin: Begin
) -> None:
    faulty_environments.GOES_ON.clear()
    learner = begin(environment={"id": f"{FAULTY}:StandsStill-v0", "count": 2})
    actor = ActorThread(broker.address, "actor-0", allow_modules=[FAULTY], stall_timeout_s=3)
    with actor:
        try:
            eventually(lambda: learner.read() == 2, "the steps before")
            assert [len(f.arrays()["reward"]) for f in learner.fragments] == [UNROLL, 2]
        finally:
            faulty_environments.GOES_ON.set()
        eventually(lambda: learner.learn() >= 4, "another session")
    assert_dense(learner)
    first, second = ([f for f in learner.fragments if f.header.session == s] for s in learner.sequences())
    assert [counted(f) for f in first] == [[0, 1, 2, 3, 4], [4, 5, 6]]
    assert counted(second[0]) == [0, 1, 2, 3, 4]


def counted(fragment: Fragment) -> list[int]:
    """What the first slot of an environment that counts its steps has observed."""
    return [int(count) for count in fragment.arrays()["observation"][:, 0, 0]]


@pytest.mark.promise("actor-imports-module-run")
def test_a_module_is_imported_only_if_allowed_here(broker: BrokerProcess, begin: Begin) -> None:
    begin(environment={"id": f"{FAULTY}:NotANumber-v0", "count": 2}, actor={"allow_modules": [FAULTY]})
    error = ActorThread(broker.address, "actor-0").join()
    assert isinstance(error, ConfigurationError)
    assert "allow_modules" in str(error)


def test_an_actor_with_another_environment_refuses_to_start(
    broker: BrokerProcess, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin()
    from gymnasium import envs

    registered = envs.registration.registry["Acrobot-v1"]
    monkeypatch.setitem(envs.registration.registry, "CartPole-v1", registered)
    error = ActorThread(broker.address, "actor-0").join()
    assert isinstance(error, Fatal)
    assert "observation_space" in str(error)
    assert "(4,)" in str(error)
    assert "(6,)" in str(error)


@pytest.mark.promise("ceiling-log-stays-below")
def test_a_full_log_makes_the_actor_wait_and_drops_nothing(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin(budget_fragments=64, max_log_bytes=6_000)
    with ActorThread(broker.address, "actor-0"):
        eventually(lambda: broker.refused("full") > 0, "the ceiling")
        stuck = learner.read()
        assert learner.log.read(learner.position, 10, 500) == []
        make_room(learner)
        eventually(lambda: learner.read() > stuck, "more fragments")
    assert_dense(learner)


def test_unsent_fragments_of_a_lost_session_are_not_sent_by_the_next(
    broker: BrokerProcess, begin: Begin
) -> None:
    learner = begin(budget_fragments=64, max_log_bytes=6_000)
    channel = open_channel(broker.address, Credentials())
    with ActorThread(broker.address, "actor-0"):
        eventually(lambda: broker.refused("full") > 0, "the ceiling")
        learner.read()
        lost = learner.fragments[0].header.session
        closed_us = time.time_ns() // 1000
        experience_pb2_grpc.ExperienceServiceStub(channel).CloseSession(
            experience_pb2.CloseSessionRequest(session=lost), timeout=5
        )
        make_room(learner)
        eventually(lambda: learner.read() and len(learner.sequences()) == 2, "a second session")
    channel.close()
    opening = next(one for one in learner.fragments if one.header.session != lost)
    assert opening.header.sequence == 1
    assert opening.header.created_us >= closed_us


def make_room(learner: ScriptedLearner) -> None:
    """Commit and trim what was read; a trim follows the oldest of three checkpoints."""
    for number in range(3):
        learner.log.commit(
            Commit(
                checkpoint_id=f"c-{number}",
                manifest_sha256="0" * 64,
                position=learner.position,
                trim=learner.position,
                totals=Totals(trained=0, dropped={}, env_steps=0),
            )
        )


def test_an_actor_follows_pause_resume_and_stop(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin()
    channel = open_channel(broker.address, Credentials())
    control = control_pb2_grpc.ControlServiceStub(channel)
    actor = ActorThread(broker.address, "actor-0")
    eventually(lambda: learner.learn() >= 5, "five fragments")
    control.Pause(control_pb2.ControlRequest(), timeout=5)
    eventually(lambda: learner.learn() and not learner.log.read(learner.position, 10, 500), "the pause")
    control.Resume(control_pb2.ControlRequest(), timeout=5)
    before = len(learner.fragments)
    eventually(lambda: learner.learn() > before, "more fragments")
    control.Stop(control_pb2.ControlRequest(), timeout=5)
    assert actor.join() == EXIT_OK
    assert_dense(learner)
    assert not control.Status(control_pb2.StatusRequest(), timeout=5).sessions
    channel.close()


def test_an_actor_waits_for_the_run(broker: BrokerProcess, begin: Begin) -> None:
    actor = ActorThread(broker.address, "actor-0")
    with actor:
        eventually(lambda: broker.get("/metrics")[1].count('reason="not_ready"') > 0, "a first refusal")
        learner = begin()
        eventually(lambda: learner.learn() >= 3, "three fragments")


@pytest.mark.promise("actor-reports-version-acts")
def test_an_actor_reports_the_weights_it_really_acts_with(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin()
    answers: list[ProbeAnswer] = []
    with ActorThread(broker.address, "actor-0"):

        def has_answered() -> bool:
            learner.learn()
            answers.extend(learner.log.renew().probes)
            return len(answers) >= 3

        eventually(has_answered, "three answers")
    for answer in answers:
        expected = learner.policies[answer.version].log_prob(learner.probe.observation, learner.probe.action)
        np.testing.assert_allclose(answer.log_prob, expected, atol=1e-5)


def test_an_evaluation_actor_measures_the_requested_version(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin()
    old = learner.publish(pin=True)
    for _ in range(5):
        learner.publish()
    with ActorThread(broker.address, "evaluator", Role.EVALUATION):
        learner.log.request_evaluation(old.version)
        eventually(lambda: learner.read() == 0 and len(learner.episodes(evaluation=True)) == 5, "a result")
        newest = learner.publish()
        learner.log.request_evaluation(newest.version)
        eventually(lambda: learner.read() == 0 and len(learner.episodes(evaluation=True)) == 10, "another")
    assert [report.deterministic for report in learner.reports] == [True, True]
    played = learner.episodes(evaluation=True)
    assert [episode.version for episode in played] == [old.version] * 5 + [newest.version] * 5


def test_an_evaluation_actor_plays_both_ways_where_the_run_is_set_to(
    broker: BrokerProcess, begin: Begin
) -> None:
    learner = begin(evaluation={"episodes": 4, "both": True})
    blob = encode(learner.policies[1])
    again = learner.log.publish(blob, update=1, settled=learner.position, scalars={})
    with ActorThread(broker.address, "evaluator", Role.EVALUATION):
        learner.log.request_evaluation(1)
        eventually(
            lambda: learner.read() == 0 and len(learner.episodes(evaluation=True)) == 8, "both results"
        )
        learner.log.request_evaluation(again.version)
        eventually(lambda: learner.read() == 0 and len(learner.episodes(evaluation=True)) == 16, "both again")
    reports = [report for report in learner.reports if report.evaluation]
    assert [report.deterministic for report in reports] == [True, False, True, False]
    returns = [[episode.episode_return for episode in report.episodes] for report in reports]
    assert returns[:2] == returns[2:]
    assert returns[0] != returns[1]


def test_an_evicted_version_is_skipped_and_the_next_is_evaluated(broker: BrokerProcess, begin: Begin) -> None:
    learner = begin(evaluation={"episodes": 3, "deterministic": False})
    for _ in range(5):
        newest = learner.publish()
    with ActorThread(broker.address, "evaluator", Role.EVALUATION):
        learner.log.request_evaluation(1)
        learner.log.request_evaluation(newest.version)
        eventually(lambda: learner.read() == 0 and len(learner.episodes(evaluation=True)) == 3, "a result")
    assert [report.deterministic for report in learner.reports] == [False]


def record(binary: Any, folder: Path, rounds: int) -> dict[tuple[int, str], bytes]:
    """Payloads of two actors over some lock-step rounds, by round and digest of their first observation."""
    folder.mkdir()
    server = RedisServer(binary, folder)
    server.start()
    process = launch(server.url, folder)
    try:
        eventually(process.is_ready, "readiness of the broker")
        learner = ScriptedLearner(server.url, Plan(lock_step=True, actor_count=2))
        learner.publish(opens=0)
        with ActorThread(process.address, "a"), ActorThread(process.address, "b"):
            for number in range(rounds):

                def is_complete(at: int = number) -> bool:
                    return learner.read() > 0 and learner.log.round_complete(at)

                eventually(is_complete, "a round")
                learner.read()
                learner.publish(opens=number + 1)
        assert learner.rounds[: 2 * rounds] == [n for n in range(rounds) for _ in range(2)]
        learner.log.close()
        pairs = zip(learner.rounds, learner.fragments, strict=True)
        return {
            (number, f.arrays()["observation"].tobytes().hex()): bytes(f.payload)
            for number, f in pairs
            if number < rounds
        }
    finally:
        process.end()
        server.kill()


@pytest.mark.promise("lock-step-two-runs")
def test_two_lock_step_runs_with_one_seed_are_equal(redis_server: RedisServer, short_folder: Path) -> None:
    first, second = (record(redis_server.binary, short_folder / name, 6) for name in ("one", "two"))
    assert first == second
    assert len(first) == 12


FRAGMENTS = 300
LONG_S = 0.5
"""Many times what a cut takes."""


@pytest.fixture
def session(begin: Begin, broker: BrokerProcess) -> Iterator[Session]:
    begin(unroll=64)
    client = BrokerClient(broker.address, Credentials())
    session = open_session(client, "a", Role.ROLLOUT, Lifecycle("actor"))
    assert session is not None
    session.start()
    assert session.wait_until(lambda: session.weights is not None, PATIENCE_S)
    yield session
    session.close(politely=True)


@pytest.fixture
def generator(session: Session) -> Iterator[EnvironmentGenerator]:
    generator = make_generator(session.specification, load([]), Health("actor"))
    generator.begin("a", session)
    generator.follow(session)
    yield generator
    generator.close()


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.promise("actor-makes-environments-session")
def test_with_cuts_by_another_thread_each_step_is_in_one_fragment(
    generator: EnvironmentGenerator, hasty_threads: None
) -> None:
    fragments: list[Fragment] = []
    over = threading.Event()

    def step() -> None:
        while not over.is_set():
            generator.unroll(over.is_set)

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    while len(fragments) < FRAGMENTS and stepping.is_alive():
        if generator.collected:
            fragments.append(generator.cut(1, len(fragments) + 1, 0)[0])
    over.set()
    stepping.join()
    arrays = [fragment.arrays() for fragment in fragments]
    assert len(arrays) == FRAGMENTS
    for one, following in pairwise(arrays):
        np.testing.assert_array_equal(one["observation"][-1], following["observation"][0])
        assert all(int(step) < len(one["reward"]) for step in np.asarray(one["final/step"]))


def test_nothing_is_cut_while_a_step_is_recorded(
    generator: EnvironmentGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, cut = generator._builder.record, threading.Event()
    found: list[bool] = []

    def cut_once() -> None:
        generator.cut(1, 1, 0)
        cut.set()

    def slow_record(*step: Any) -> None:
        record(*step)
        if not found:
            threading.Thread(target=cut_once, daemon=True).start()
            found.append(cut.wait(LONG_S))

    monkeypatch.setattr(generator._builder, "record", slow_record)
    generator.unroll(lambda: True)
    assert found == [False]
    assert cut.wait(PATIENCE_S)
