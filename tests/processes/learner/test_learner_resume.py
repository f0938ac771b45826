"""A learner that stops, in whatever way, goes on from what it committed."""

import json
import logging
import threading
from pathlib import Path

import pytest
import torch

from penstock.config.settings import ConfigurationError, OnPolicySection
from penstock.learner.algorithms.algorithm import AlgorithmState, LogShare
from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Drop, Ledger, Progress
from penstock.runtime.exit import Fatal, RunFailed
from penstock.runtime.health import ENDPOINT_VARIABLE
from tests.support.fleet.one_parameter_learner import OneParameter, make_model, resolve
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
    until,
    updated,
)
from tests.support.run.small_run import RUN
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
def test_a_resumed_learner_is_what_it_was_at_the_stop(redis_url: str, tmp_path: Path) -> None:
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
def test_nothing_is_stale_after_a_kill_three_times_the_limit_behind_the_checkpoint(
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
def test_beginning_behind_the_trim_floor_needs_permission_and_is_booked(
    redis_url: str, tmp_path: Path
) -> None:
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
        ({"policy": wide}, "policy=.*resume it with the same"),
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
    given = resolve(RUN, [])
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
    checkpointer.save(Progress(run=RUN, sections={}, log=lease.learner_log.snapshot()))
    (line,) = map(json.loads, lineage.read_text().splitlines())
    checkpoint = store.read(line["checkpoint"])
    assert line["version"] == checkpoint.state["log"]["version"] == known
    assert log.snapshot().version == known + 1
    log.close()
