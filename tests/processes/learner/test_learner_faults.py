"""Another learner, a Redis that restarts, a Redis that forgets: one learner writes, the books balance."""

import os
import signal
from pathlib import Path
from typing import Final

import pytest

from penstock.config.settings import ConfigurationError
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE, PHASE_VARIABLE
from tests.support.fleet.fleet import read_phases
from tests.support.run.learner_run import (
    LearnerThread,
    Producer,
    account,
    audited,
    learner_process,
    settings,
    until,
    updated,
)
from tests.support.storage.redis_server import RedisServer

ENDLESS: Final = settings(learner={"total_steps": 10**9, "lease_ttl_s": 1.0})


def test_a_learner_whose_half_written_checkpoint_was_cleared_away_says_that_it_was_taken_over(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(FAILPOINTS_VARIABLE, "rename.before=stop")
        sleeper = learner_process(redis_url, tmp_path, ENDLESS)
    try:
        with Producer(redis_url, tmp_path) as producer:
            session = producer.open()
            updated(producer, session, 2)
            producer.control("checkpoint")
            until(lambda: sleeper.is_stopped, "the frozen learner")
            (half_written,) = (tmp_path / "checkpoints").iterdir()
            with LearnerThread(redis_url, tmp_path, ENDLESS, resume=True) as learner:
                until(lambda: not half_written.exists(), "the second learner to clear up")
                os.kill(sleeper.pid, signal.SIGCONT)
                assert sleeper.wait(30) == 1
                learner.drain()
    finally:
        sleeper.kill()
        sleeper.wait()
    told = (tmp_path / "learner.log").read_text()
    assert "may not write any longer" in told.splitlines()[-1]
    assert "FileNotFoundError" not in told
    assert audited(tmp_path, redis_url).keys() <= {"trained", "resident"}


@pytest.mark.promise("lease-holder-another-learner")
def test_another_holder_waits_for_the_lease_to_expire(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path / "first", ENDLESS) as first:
        producer.open()
        with LearnerThread(redis_url, tmp_path / "second", ENDLESS, resume=True) as second:
            epoch = producer.status().epoch
            first.drain()
            until(lambda: producer.status().epoch > epoch, "the second learner to take over")
            second.drain()


@pytest.mark.promise("second-learner-folder-learner")
def test_a_second_learner_on_the_folder_is_refused(redis_url: str, tmp_path: Path) -> None:
    with LearnerThread(redis_url, tmp_path, ENDLESS) as first, Producer(redis_url) as producer:
        session = producer.open()
        epoch = producer.status().epoch
        with (
            LearnerThread(redis_url, tmp_path, ENDLESS, resume=True) as second,
            pytest.raises(ConfigurationError, match="another learner is using this run"),
        ):
            second.finish()
        updated(producer, session, 2)
        assert producer.status().epoch == epoch
        first.drain()


@pytest.mark.promise("entries-returned-redis-lost")
def test_what_redis_forgot_is_booked(redis_server: RedisServer, tmp_path: Path) -> None:
    url = redis_server.url
    with LearnerThread(url, tmp_path, ENDLESS) as learner, Producer(url, tmp_path) as producer:
        session = producer.open()
        updated(producer, session, 3)
        copy, update = redis_server.save_aof(), producer.status().latest.update
        updated(producer, session, 4)
        redis_server.go_back(copy)
        producer.drive([session], lambda: producer.status().latest.update >= update + 10)
        result = learner.drain()
    assert result["updates"] >= update + 10
    assert sum(audited(tmp_path, redis_server.url).values()) == producer.acked


@pytest.mark.promise("entries-returned-redis-lost")
def test_what_was_read_and_then_forgotten_is_lost_by_name(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases, lost = tmp_path / "phases", 3
    with monkeypatch.context() as patch:
        patch.setenv(PHASE_VARIABLE, str(phases))
        learner = learner_process(redis_server.url, tmp_path, ENDLESS)
    try:
        with Producer(redis_server.url, tmp_path) as producer:
            session = producer.open()
            updated(producer, session, 2)
            until(lambda: producer.status().settled == producer.status().log_head, "every batch")
            copy, head = redis_server.save_aof(), producer.status().log_head
            producer._watch(session)
            assert producer.send(session, count=lost).refusal is None
            until(
                lambda: ("feed.waiting", head + lost) in {(p.name, p.sequence) for p in read_phases(phases)},
                "the learner to have read them",
            )
            redis_server.go_back(copy)
            update = producer.status().latest.update
            producer.drive([session], lambda: producer.status().latest.update >= update + 3)
            learner.send_signal(signal.SIGTERM)
            assert learner.wait(60) == 0
    finally:
        learner.kill()
        learner.wait()
    ledger = account(tmp_path)["ledger"]
    assert ledger["balanced"]
    assert ledger["dropped"] == {"log_lost": lost}
    assert audited(tmp_path, redis_server.url)["log_lost"] == lost
