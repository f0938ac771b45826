"""A flush takes what is pending as a batch: once, the same again after a death, in whole minibatches."""

import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.log.replies import CommandRefusal
from penstock.learner.feed.recorded_feed import Recording
from penstock.protocol.messages import Role
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE
from tests.processes.learner.test_learner_replay import replaying
from tests.processes.learner.test_learner_restore import FRAGMENTS, leave_waiting, updated
from tests.processes.learner.test_learner_resume import endless
from tests.spine.test_equal_runs import assert_equal_learning, recorded, replay, replayed
from tests.support.run.learner_run import (
    BATCH,
    CHARGE,
    PATIENCE_S,
    LearnerThread,
    Producer,
    audited,
    learner_process,
    settings,
    until,
)
from tests.support.storage.redis_server import RedisServer


@pytest.mark.promise("flush-takes-pending-much")
def test_what_is_pending_is_one_batch(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        updated(producer, session, 2)
        leave_waiting(producer, session, FRAGMENTS - 1)
        before = producer.status().latest.update
        flushed = producer.answer("flush", str(CHARGE))
        assert (flushed.refusal, flushed.steps) == (0, BATCH - CHARGE), flushed
        until(lambda: producer.status().latest.update == before + 1, "the update of it")
        assert producer.answer("flush", str(CHARGE)) == flushed, "the same id, the same flush"
        updated(producer, session, 2)
        result = learner.drain()
    assert result["ledger"]["balanced"]
    assert result["ledger"]["dropped"] == {}
    audited(tmp_path, redis_url)


@pytest.mark.promise("flush-takes-pending-much")
def test_fewer_steps_than_asked_for_are_left(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        updated(producer, session, 1)
        leave_waiting(producer, session, 1)
        few = producer.answer("flush", str(2 * CHARGE))
        assert (few.refusal, few.steps) == (CommandRefusal.TOO_FEW_STEPS, CHARGE)
        assert f"{CHARGE} steps are pending, fewer than the {2 * CHARGE} asked for" in few.detail
        many = producer.answer("flush", str(BATCH + 1))
        assert many.refusal == CommandRefusal.TOO_FEW_STEPS
        assert "at most that" in many.detail
        updated(producer, session, 2)
        result = learner.drain()
    assert result["ledger"]["trained"] % FRAGMENTS == 0, "whole batches only"
    assert result["ledger"]["balanced"]


@pytest.mark.promise("flush-takes-pending-much")
@pytest.mark.parametrize("kind", ["lock_step", "replay"])
def test_where_nothing_waits_for_a_batch_a_flush_is_refused(
    redis_url: str, tmp_path: Path, kind: str
) -> None:
    section: dict[str, Any] = {"batch_steps": BATCH, "epochs": 1, "minibatches": 1, "staleness": 0}
    given = settings(algorithm=section) if kind == "lock_step" else replaying()
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, given):
        producer.open()
        refused = producer.answer("flush", "1")
    assert refused.refusal == CommandRefusal.UNSUPPORTED
    assert "has no flush" in refused.detail


@pytest.mark.promise("flush-takes-pending-much")
def test_a_policy_server_is_waited_for(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, endless()):
        session = producer.open()
        server = producer.open("server", Role.SERVER)
        updated(producer, session, 1)
        leave_waiting(producer, session, 1)
        number = producer.ask("flush", "1").number
        until(lambda: producer.flush_wanted(server) == number, "the server to be asked")
        assert producer.flush_wanted(session) == 0, "an actor that serves no client is not asked"
        leave_waiting(producer, session, 2)
        assert producer.ask("flush", "1").answer is None
        producer.flush_wanted(server, flushed=number)
        assert producer.answer("flush", "1").steps == 2 * CHARGE


@pytest.mark.promise("flush-takes-pending-much")
@pytest.mark.parametrize(
    "place",
    [
        "update.after",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in (
                "command.before",
                "flush.decided",
                "update.before",
                "commit.before",
                "command.after",
            )
        ),
    ],
)
def test_a_killed_learner_takes_the_same_flush_again(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(endless(), folder)
    with Producer(redis_server.url, first) as producer:
        with LearnerThread(redis_server.url, first, given) as learner:
            session = producer.open()
            updated(producer, session, 2)
            leave_waiting(producer, session, 2)
            learner.drain()
        with monkeypatch.context() as within:
            within.setenv(FAILPOINTS_VARIABLE, f"{place}=kill")
            process = learner_process(redis_server.url, first, given, "--resume")
        number = producer.ask("flush", "1").number
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        decided = producer.ask("flush", "1").through
        producer.send_with_credit(session, 1)
        with LearnerThread(redis_server.url, first, given, resume=True) as learner:
            answer = producer.answer("flush", "1")
            updated(producer, session, 1)
            learner.drain()
        audited(first, redis_server.url)
    assert (answer.refusal, answer.number) == (0, number)
    if decided is not None:
        assert answer.steps == 2 * CHARGE
    flushes = [one for one in Recording(folder).batches if one.entry.flush]
    assert [len(one.fragments) * CHARGE for one in flushes] == [answer.steps]
    replay(redis_server, second, replayed(endless(), folder))
    assert_equal_learning(first, second)
