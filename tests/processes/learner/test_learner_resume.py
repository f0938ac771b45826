"""A learner goes on from what it committed, whatever has happened to it, to its disk or to Redis."""

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from penstock.config.settings import ConfigurationError, OnPolicySection, Settings
from penstock.learner.algorithms.algorithm import AlgorithmState, LogShare
from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Drop, Ledger, Progress
from penstock.runtime.exit import Fatal, RunFailed
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE, PHASE_VARIABLE
from penstock.runtime.health import ENDPOINT_VARIABLE
from tests.support.fleet.fleet import read_phases
from tests.support.fleet.one_parameter_learner import OneParameter, make_model, resolve
from tests.support.run import small_run
from tests.support.run.harness import BrokerProcess, open_run
from tests.support.run.learner_run import (
    BATCH,
    CHARGE,
    LearnerThread,
    Producer,
    account,
    audited,
    checkpoint_now,
    endless,
    learner_process,
    newest,
    settings,
    until,
    updated,
)
from tests.support.storage.redis_server import RedisServer

CHANGING = ("training_seconds", "log", "staleness", "publications")
"""A learner that starts publishes once more, so a run that was killed has published oftener."""


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """Optimiser moments, normaliser, generators, position and counters are equal, bit by bit."""
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    changing = dict.fromkeys(CHANGING)
    assert one.state | changing == other.state | changing


@pytest.mark.promise("resumed-learner-continues-same")
def test_a_resumed_learner_equals_the_stopped_one(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url) as producer:
        with LearnerThread(redis_url, tmp_path, endless()) as learner:
            session = producer.open()
            producer.report(session, [1.0, 2.0, 3.0])
            producer.drive([session], lambda: producer.status().latest.update >= 5)
            learner.drain()
        stopped = newest(tmp_path)
        assert stopped.state["position"] >= 5 * BATCH // CHARGE
        assert any("normaliser" in name or "mean" in name for name in stopped.tensors)
        producer.control("pause")
        epoch = producer.status().epoch
        with LearnerThread(redis_url, tmp_path, endless(), resume=True) as learner:
            until(lambda: producer.status().epoch > epoch, "the resumed learner")
            learner.drain()
    resumed = newest(tmp_path)
    assert resumed.id != stopped.id
    assert_same(stopped, resumed)


def test_a_resumed_learner_shows_its_books_from_the_start(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = tmp_path / "endpoint.json"
    with Producer(redis_url) as producer:
        with LearnerThread(redis_url, tmp_path, endless()) as learner:
            session = producer.open()
            until(lambda: producer.send_with_credit(session, update=1000), "credit")
            producer.drive([session], lambda: producer.status().latest.update >= 2)
            learner.drain()
        books = newest(tmp_path).state["totals"]
        assert books["trained"] >= 2 * BATCH // CHARGE
        assert books["dropped"]["stale"] >= 1
        producer.control("pause")
        with monkeypatch.context() as patch:
            patch.setenv(ENDPOINT_VARIABLE, str(endpoint))
            process = learner_process(redis_url, tmp_path, endless(), "--resume")
        # Any role has a broker's ports.
        resumed = BrokerProcess(process=process, endpoint_file=endpoint, log=tmp_path / "learner.log")
        try:
            until(resumed.is_ready, "the resumed learner")
            assert checkpoint_now(producer, tmp_path).state["totals"] == books, "nothing was consumed"
            shown = resumed.get("/metrics")[1].splitlines()
        finally:
            resumed.end()
    assert f"penstock_ledger_trained_fragments {books['trained']:.1f}" in shown
    for reason in Drop:
        count = books["dropped"].get(reason.value, 0)
        assert f'penstock_ledger_dropped_fragments{{reason="{reason}"}} {count:.1f}' in shown


@pytest.mark.promise("restart-makes-fragment-stale")
def test_nothing_is_stale_after_a_kill_three_limits_past_the_checkpoint(
    redis_url: str, tmp_path: Path
) -> None:
    with Producer(redis_url, tmp_path) as producer:
        process = learner_process(redis_url, tmp_path, endless())
        session = producer.open()
        updated(producer, session, 2)
        checkpoint_now(producer, tmp_path)
        updated(producer, session, 3 * endless().algorithm.stale_after)  # type: ignore[attr-defined]
        process.kill()
        process.wait()
        with LearnerThread(redis_url, tmp_path, endless(), resume=True) as learner:
            updated(producer, session, 3)
            result = learner.drain()
    assert result["ledger"]["dropped"] == {}
    assert audited(tmp_path, redis_url).keys() <= {"trained", "resident"}


@pytest.mark.promise("truncated-changed-checkpoint-skipped")
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, endless()) as learner:
            session = producer.open()
            producer.drive([session], lambda: producer.status().latest.update >= 2)
            before = checkpoint_now(producer, tmp_path)
            producer.drive([session], lambda: producer.status().latest.update >= 5)
            learner.drain()
        version = producer.status().latest.version
        damage(tmp_path / "checkpoints" / newest(tmp_path).id / "tensors.safetensors")
        with (
            caplog.at_level(logging.INFO),
            LearnerThread(redis_url, tmp_path, endless(), resume=True) as learner,
        ):
            # It publishes what it began from, and then an update.
            producer.drive([session], lambda: producer.status().latest.version >= version + 2)
            result = learner.drain()
    assert any("falling back" in record.message for record in caplog.records)
    assert any(getattr(record, "checkpoint", "") == before.id for record in caplog.records)
    assert result["ledger"]["dropped"] == {}
    assert audited(tmp_path, redis_url).keys() <= {"trained", "resident"}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.promise("resuming-behind-trimmed-part")
def test_starting_after_the_trim_floor_needs_permission_and_is_booked(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, endless()) as learner:
            session = producer.open()
            for _ in range(3):
                updated(producer, session, 2)
                checkpoint_now(producer, tmp_path)
            learner.drain()
        floor = producer.status().trim_floor
        assert floor > 0
        for path in (tmp_path / "checkpoints").glob("*/state.json"):
            damage(path)
        with (
            LearnerThread(redis_url, tmp_path, endless(), resume=True) as learner,
            pytest.raises(RunFailed, match="--allow-loss"),
        ):
            learner.finish()
        version = producer.status().latest.version
        with LearnerThread(redis_url, tmp_path, endless(), resume=True, allow_loss=True) as learner:
            until(lambda: producer.status().latest.version > version, "the first publication")
            producer.drive([session], lambda: producer.status().latest.update >= 2)
            result = learner.drain()
    assert result["ledger"]["dropped"]["log_lost"] == floor
    assert audited(tmp_path, redis_url)["log_lost"] == floor


@pytest.mark.promise("empty-redis-opened-again")
def test_an_empty_redis_is_filled_from_the_newest_checkpoint(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with Producer(redis_server.url, tmp_path) as producer:
        with LearnerThread(redis_server.url, tmp_path, endless()) as learner:
            session = producer.open()
            producer.drive([session], lambda: producer.status().latest.update >= 3)
            learner.drain()
        version = producer.status().latest.version
        redis_server.kill()
        redis_server.forget()
        redis_server.start()
        with LearnerThread(redis_server.url, tmp_path, endless(), resume=True) as learner:
            session = producer.open()
            producer.drive([session], lambda: producer.status().latest.update >= 6)
            assert producer.status().latest.version > version
            result = learner.drain()
    assert result["updates"] >= 6
    assert audited(tmp_path, redis_server.url)["trained"] >= 6 * BATCH // CHARGE


def test_a_run_is_begun_once_and_resumed_only_with_the_settings_it_was_begun_with(
    redis_url: str, tmp_path: Path
) -> None:
    begun = endless(lease_ttl_s=1.0)
    with LearnerThread(redis_url, tmp_path, begun) as learner, Producer(redis_url) as producer:
        producer.open()
        learner.drain()
    wide = begun.policy.model_copy(update={"hidden_sizes": (9,)})
    scaled = begun.algorithm.model_copy(update={"scale_rewards": True})
    for given, message in (
        ({"policy": wide}, "policy.hidden_sizes=.*resume it with the same"),
        ({"algorithm": scaled}, "does not fit the settings"),
    ):
        again = LearnerThread(redis_url, tmp_path, begun.model_copy(update=given), resume=True)
        with again as learner, pytest.raises(ConfigurationError, match=message):
            learner.finish()
        assert account(tmp_path)["ledger"]["balanced"]
    other = LearnerThread(redis_url, tmp_path / "other", begun)
    with other as learner, pytest.raises(Fatal, match="--resume"):
        learner.finish()


def test_the_lineage_names_the_version_that_its_checkpoint_knows(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = resolve(small_run.RUN, [])
    log = open_run(redis_url)
    known = log.snapshot().version
    lease = LeaseKeeper(
        log,
        15.0,
        stop=threading.Event(),
        quarantine=make_model(given, 4).quarantine,
        on_reopened=lambda: None,
        description=lambda: "{}",
    )
    store, lineage = CheckpointStore(tmp_path / "checkpoints", 3), tmp_path / "lineage.jsonl"
    assert isinstance(given.algorithm, OnPolicySection)
    algorithm = OneParameter(given.algorithm)
    state = algorithm.state

    def overtaken() -> AlgorithmState:
        # The publisher has a thread of its own.
        log.publish(b"weights-2", update=1, settled=0, scalars={})
        return state()

    monkeypatch.setattr(algorithm, "state", overtaken)
    checkpointer = Checkpointer(
        store,
        log,
        lease,
        Ledger(),
        algorithm,
        lineage=(),
        lineage_path=lineage,
        interval_s=3600,
        room=LogShare(size=2**20, entries=1000),
    )
    checkpointer.save(Progress(run=small_run.RUN, sections={}, log=lease.learner_log.snapshot()))
    (line,) = map(json.loads, lineage.read_text().splitlines())
    checkpoint = store.read(line["checkpoint"])
    assert line["version"] == checkpoint.state["log"]["version"] == known
    assert log.snapshot().version == known + 1
    log.close()


SHORT_LEASE: Final = settings(learner={"total_steps": 10**9, "lease_ttl_s": 1.0})


def test_a_learner_whose_half_written_checkpoint_was_cleared_away_says_that_it_was_taken_over(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(FAILPOINTS_VARIABLE, "rename.before=stop")
        sleeper = learner_process(redis_url, tmp_path, SHORT_LEASE)
    try:
        with Producer(redis_url, tmp_path) as producer:
            session = producer.open()
            updated(producer, session, 2)
            producer.control("checkpoint")
            until(lambda: sleeper.is_stopped, "the frozen learner")
            (half_written,) = (tmp_path / "checkpoints").iterdir()
            with LearnerThread(redis_url, tmp_path, SHORT_LEASE, resume=True) as learner:
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
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path / "first", SHORT_LEASE) as first:
        producer.open()
        with LearnerThread(redis_url, tmp_path / "second", SHORT_LEASE, resume=True) as second:
            epoch = producer.status().epoch
            first.drain()
            until(lambda: producer.status().epoch > epoch, "the second learner to take over")
            second.drain()


@pytest.mark.promise("second-learner-folder-learner")
def test_a_second_learner_on_the_folder_is_refused(redis_url: str, tmp_path: Path) -> None:
    with LearnerThread(redis_url, tmp_path, SHORT_LEASE) as first, Producer(redis_url) as producer:
        session = producer.open()
        epoch = producer.status().epoch
        with (
            LearnerThread(redis_url, tmp_path, SHORT_LEASE, resume=True) as second,
            pytest.raises(ConfigurationError, match="another learner is using this run"),
        ):
            second.finish()
        updated(producer, session, 2)
        assert producer.status().epoch == epoch
        first.drain()


@pytest.mark.promise("entries-returned-redis-lost")
def test_entries_that_redis_lost_are_booked(redis_server: RedisServer, tmp_path: Path) -> None:
    url = redis_server.url
    with LearnerThread(url, tmp_path, SHORT_LEASE) as learner, Producer(url, tmp_path) as producer:
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
def test_entries_that_were_read_and_then_lost_are_named(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases, lost = tmp_path / "phases", 3
    with monkeypatch.context() as patch:
        patch.setenv(PHASE_VARIABLE, str(phases))
        learner = learner_process(redis_server.url, tmp_path, SHORT_LEASE)
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


FRAGMENTS = 60
"""Of a run with replay."""
CAPACITY = 12 * CHARGE


DQN: dict[str, Any] = {
    "name": "dqn", "capacity": CAPACITY, "capacity_bytes": 100_000, "learning_starts": 4 * CHARGE,
    "batch_size": 16, "replay_ratio": 0.5, "error_steps": 4 * CHARGE, "n_step": 2, "prioritised": True,
    "publish_period": 4, "target_period": 10,
}  # fmt: skip


def replaying(
    steps: int = FRAGMENTS * CHARGE, broker: dict[str, Any] | None = None, **algorithm: Any
) -> Settings:
    """Half a gradient step of DQN to a step, with a memory of twelve fragments."""
    return settings(algorithm=DQN | algorithm, learner={"total_steps": steps}, broker=broker or {})


def entries_of(checkpoint: Checkpoint) -> list[int]:
    numbers: list[int] = checkpoint.tensors["replay/entries"][:, 0].tolist()
    return numbers


def test_experience_is_settled_when_it_enters_replay(redis_url: str, tmp_path: Path) -> None:
    given = replaying(learning_starts=5 * CHARGE)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: producer.acked >= 4)
        until(lambda: producer.status().settled >= 4, "the fragments to be settled")
        status = producer.status()
        assert (status.latest.version, status.budget_steps) == (1, 4 * CHARGE)
        learner.drain()


def test_what_was_learned_last_is_published_when_an_operator_stops_the_learner(
    redis_url: str, tmp_path: Path
) -> None:
    given = replaying(20 * CHARGE, publish_period=10**6)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended or producer.status().settled >= 15)
        assert producer.status().latest.version == 1
        producer.control("stop")
        result = learner.finish()
        latest = producer.status().latest
    assert (result["ending"], result["finished"]) == ("stopped", False)
    assert list((tmp_path / "checkpoints").iterdir())
    assert result["updates"] >= 15
    assert (latest.version, latest.update) == (2, result["updates"])


def run_whole(url: str, run_dir: Path) -> Checkpoint:
    with LearnerThread(url, run_dir, replaying()) as learner, Producer(url) as producer:
        session = producer.open(data="same")
        producer.drive([session], lambda: learner.ended)
        learner.finish()
    return newest(run_dir)


def run_killed(url: str, run_dir: Path) -> Checkpoint:
    """The same fragments; the learner is killed some fragments behind a checkpoint, and resumed."""
    with Producer(url, run_dir) as producer:
        process = learner_process(url, run_dir, replaying())
        session = producer.open(data="same")
        producer.drive([session], lambda: producer.status().settled >= 30)
        before = entries_of(checkpoint_now(producer, run_dir))
        producer.drive([session], lambda: producer.status().settled >= 40)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert producer.status().trim_floor < before[0], "the log holds what replay held"
        process = learner_process(url, run_dir, replaying(), "--resume")
        producer.drive([session], lambda: process.poll() is not None)
        assert process.returncode == 0, (run_dir / "learner.log").read_text()
    return newest(run_dir)


@pytest.mark.promise("content-replay-log-read")
def test_a_killed_learner_ends_bit_for_bit_like_an_unkilled_one(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    whole = run_whole(redis_server.url, tmp_path / "whole")
    redis_server.kill()
    redis_server.forget()
    redis_server.start()
    killed = run_killed(redis_server.url, tmp_path / "killed")
    assert_same(whole, killed)
    numbers = entries_of(killed)
    assert numbers == list(range(FRAGMENTS - CAPACITY // CHARGE + 1, FRAGMENTS + 1))
    assert killed.state["numbers"]["replay"]["inserted"] == FRAGMENTS * CHARGE
    assert killed.state["totals"]["trained"] == FRAGMENTS
    assert "comes back smaller" not in (tmp_path / "killed" / "learner.log").read_text()
    assert audited(tmp_path / "killed", redis_server.url)["trained"] == FRAGMENTS


@pytest.mark.promise("fragments-kept-replay-trimmed")
def test_a_log_that_fills_up_is_trimmed_up_to_the_entries_in_replay(redis_url: str, tmp_path: Path) -> None:
    given = replaying(200 * CHARGE, {"max_log_bytes": 60_000}, capacity_bytes=6_000, replay_ratio=0.1)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        learner.finish()
        floor = producer.status().trim_floor
    store = CheckpointStore(tmp_path / "checkpoints", 3)
    last, second, *_ = (store.read(name) for name in store.ids())
    assert len((tmp_path / "lineage.jsonl").read_text().splitlines()) >= 4
    assert floor == entries_of(second)[0] - 1
    assert entries_of(last)[0] > entries_of(second)[0]


@pytest.mark.promise("content-replay-log-read")
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_its_replay(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = replaying(10**6)
    with Producer(redis_url) as producer:
        with LearnerThread(redis_url, tmp_path, given) as learner:
            session = producer.open()
            producer.drive([session], lambda: producer.status().settled >= 20)
            before = checkpoint_now(producer, tmp_path)
            producer.drive([session], lambda: producer.status().settled >= 40)
            learner.drain()
        last = newest(tmp_path)
        assert entries_of(before)[0] < entries_of(last)[0]
        damaged = tmp_path / "checkpoints" / last.id / "tensors.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        producer.control("pause")
        epoch = producer.status().epoch
        with caplog.at_level(logging.INFO), LearnerThread(redis_url, tmp_path, given, resume=True) as learner:
            until(lambda: producer.status().epoch > epoch, "the resumed learner")
            until(lambda: "replay was read again" in caplog.text, "replay")
            learner.drain()
    resumed = newest(tmp_path)
    for name in ("replay/entries", "replay/priorities", "replay/generator"):
        assert torch.equal(resumed.tensors[name], before.tensors[name]), name
