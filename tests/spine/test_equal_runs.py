import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from penstock.config.settings import Settings, dump
from penstock.launch.audit.audit_command import audit
from penstock.learner.checkpoint.store import BEST
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.feed.recording import FrameEntry
from penstock.learner.probe import Quarantine
from penstock.policy import weights
from penstock.protocol.messages import Publication
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE
from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from penstock.workloads.language.policy import LanguagePolicy
from tests.support.language.language_learner import PATIENCE_S as SCRIPTED_LANGUAGE_LEARNER_PATIENCE_S
from tests.support.language.language_learner import WRONG, Fault, ScriptedLanguageLearner
from tests.support.run.actor_run import ActorThread
from tests.support.run.harness import BrokerProcess, Training, eventually, is_alive, wait_until_gone
from tests.support.run.learner_run import (
    BATCH,
    CHARGE,
    SLOTS,
    STEPS,
    LearnerThread,
    Producer,
    account,
    audited,
    checkpoint_now,
    learner_process,
    newest,
    settings,
    until,
)
from tests.support.run.learner_run import PATIENCE_S as LEARNER_RUN_PATIENCE_S
from tests.support.storage.redis_server import RedisServer

ROUNDS = 12


def lock_step(rounds: int = ROUNDS, actors: int = 2) -> Settings:
    return settings(
        seed=7,
        actor={"unroll_length": 4, "count": actors},
        algorithm={"batch_steps": CHARGE, "epochs": 2, "minibatches": 2, "staleness": 0},
        learner={
            "total_steps": rounds * actors * CHARGE,
            "checkpoint_interval_s": 3600,
            "stop_at_target": False,
        },
    )


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "policies" / "final.safetensors").read_bytes()


def run_once(server: RedisServer, run_dir: Path, names: tuple[str, str]) -> dict[str, Any]:
    """A whole run; the sessions open and send in the order of `names`."""
    with LearnerThread(server.url, run_dir, lock_step()) as learner, Producer(server.url) as producer:
        sessions = {name: producer.open(name, data=name) for name in names}
        producer.drive(list(sessions.values()), lambda: learner.ended)
        return learner.finish()


@pytest.mark.promise("lock-step-two-runs")
def test_two_runs_are_equal_bit_by_bit_whatever_the_order(redis_server: RedisServer, tmp_path: Path) -> None:
    first = run_once(redis_server, tmp_path / "first", ("actor-0", "actor-1"))
    redis_server.restart_empty()
    second = run_once(redis_server, tmp_path / "second", ("actor-1", "actor-0"))
    assert weights_of(tmp_path / "first") == weights_of(tmp_path / "second")
    assert first["updates"] == second["updates"] == ROUNDS
    assert first["staleness"]["max"] == 0
    assert first["ledger"]["balanced"]
    assert second["ledger"]["balanced"]


@pytest.mark.promise("lock-step-run-killed")
def test_a_killed_run_ends_like_an_unkilled_one(redis_server: RedisServer, tmp_path: Path) -> None:
    run_once(redis_server, tmp_path / "whole", ("actor-0", "actor-1"))
    redis_server.restart_empty()
    broken = tmp_path / "broken"
    with Producer(redis_server.url) as producer:
        process = learner_process(redis_server.url, broken, lock_step())
        sessions = [producer.open(name, data=name) for name in ("actor-0", "actor-1")]
        producer.drive(sessions, lambda: producer.status().latest.update >= 3)
        producer.control("checkpoint")
        producer.drive(sessions, lambda: (broken / "lineage.jsonl").exists())
        update = producer.status().latest.update
        producer.drive(sessions, lambda: producer.status().latest.update >= min(update + 2, ROUNDS - 1))
        process.kill()
        process.wait()
        with LearnerThread(redis_server.url, broken, lock_step(), resume=True) as learner:
            producer.drive(sessions, lambda: learner.ended)
            result = learner.finish()
    assert result["updates"] == ROUNDS
    assert result["ledger"]["dropped"] == {}
    assert weights_of(broken) == weights_of(tmp_path / "whole")


@pytest.mark.promise("lock-step-round-continues")
def test_a_round_continues_without_a_stopped_actor(redis_url: str, tmp_path: Path) -> None:
    given = lock_step(rounds=6, actors=3)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        sessions = [producer.open(f"actor-{index}") for index in range(3)]
        producer.drive(sessions[:2], lambda: producer.acked >= 2)
        assert producer.status().latest.update == 0
        producer.close(sessions[2])
        until(lambda: producer.status().latest.update == 1, "the round of two")
        producer.drive(sessions[:2], lambda: learner.ended)
        result = learner.finish()
    assert result["ledger"]["balanced"]
    assert result["updates"] >= 6


LEARNER: Final = (sys.executable, "-P", "-m", "penstock.launch.cli", "learner")
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
PATIENCE_S: Final = 200.0


def endless(**learner: Any) -> Settings:
    return settings(
        learner={"total_steps": 10**9, "checkpoint_interval_s": 3600, "stop_at_target": False} | learner
    )


class TwoRanks:
    def __init__(self, folder: Path, url: str, given: Settings, *, torchrun: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = folder
        self.log = folder / "learner.log"
        self._endpoint = folder / "learner.json.endpoint"
        config = folder / "run.toml"
        config.write_text(dump(given))
        words = ("--redis", url, "--run-dir", str(folder), "--config", str(config), "--resume")
        before = (sys.executable, *TORCHRUN, "--no-python") if torchrun else ()
        environment = {**os.environ, ENDPOINT_VARIABLE: str(self._endpoint), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                (*before, *LEARNER, *words), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def pid(self, rank: int) -> int:
        """Of a rank; 0 before it has said so."""
        endpoint = read_endpoint(self._file(rank))
        return 0 if endpoint is None else endpoint.pid

    def page(self, rank: int, path: str) -> tuple[int, str]:
        return BrokerProcess(process=self.process, endpoint_file=self._file(rank), log=self.log).get(path)

    def are_ready(self) -> bool:
        assert self.process.poll() is None
        return all(self._file(rank).exists() and self.page(rank, "/readyz")[0] == 200 for rank in (0, 1))

    def end(self) -> int:
        """Ask all to end; exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def _file(self, rank: int) -> Path:
        return self._endpoint.with_stem(f"{self._endpoint.stem}-{rank}") if rank else self._endpoint


@contextmanager
def two_ranks(folder: Path, url: str, given: Settings, *, torchrun: bool = False) -> Iterator[TwoRanks]:
    ranks = TwoRanks(folder, url, given, torchrun=torchrun)
    try:
        eventually(ranks.are_ready, "both ranks", PATIENCE_S)
        yield ranks
    except BaseException:
        sys.stderr.write(ranks.log.read_text()[-8000:])
        raise
    finally:
        for pid in {ranks.process.pid, ranks.pid(0), ranks.pid(1)} - {0}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        ranks.process.wait(PATIENCE_S)


def test_two_ranks_train_one_run_and_drain_together(redis_url: str, tmp_path: Path) -> None:
    with (
        Producer(redis_url, tmp_path) as producer,
        two_ranks(tmp_path, redis_url, endless(ranks=2)) as ranks,
    ):
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        bad = np.full((STEPS, SLOTS), np.nan, np.float32)
        until(lambda: producer.send_with_credit(session, reward=bad), "credit")
        # Who sent it is quarantined, so that another actor has to go on.
        other = producer.open("actor-1")
        producer.drive([other], lambda: producer.status().latest.update >= 5)
        others = ranks.pid(1)
        for rank in (0, 1):
            assert ranks.page(rank, "/healthz") == ranks.page(rank, "/readyz") == (200, "ok\n")
            shown = ranks.page(rank, "/metrics")[1].splitlines()
            assert {"penstock_ranks 2.0", f"penstock_rank {rank}.0"} <= set(shown)
        assert any(
            row.startswith("penstock_rank_updates_total") and not row.endswith(" 0.0") for row in shown
        )
        assert not any(row.startswith("penstock_mean_return") for row in shown), (
            "a rank has no run of its own"
        )
        assert ranks.end() == 0
        eventually(lambda: not is_alive(others), "the end of the other rank", PATIENCE_S)
    assert account(tmp_path)["ledger"]["balanced"]
    assert account(tmp_path)["ledger"]["dropped"]["invalid"] >= 1
    assert (tmp_path / "checkpoints").exists()
    assert audited(tmp_path, redis_url)["trained"] >= 5 * BATCH // (STEPS * SLOTS)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_dies_ends_the_other(redis_url: str, tmp_path: Path, victim: int) -> None:
    with Producer(redis_url) as producer, two_ranks(tmp_path, redis_url, endless(ranks=2)) as ranks:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        other = ranks.pid(1 - victim)
        os.kill(ranks.pid(victim), signal.SIGKILL)
        assert ranks.process.wait(PATIENCE_S) != 0
        eventually(lambda: not is_alive(other), "the end of the other rank", PATIENCE_S)
    if victim:
        assert "rank 1 of this learner ended (-9)" in ranks.log.read_text()


@pytest.mark.promise("rank-learner-dies-ranks")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_starts_all_ranks_again_from_the_checkpoint(
    redis_url: str, tmp_path: Path, victim: int
) -> None:
    with (
        Producer(redis_url, tmp_path) as producer,
        two_ranks(tmp_path, redis_url, endless(), torchrun=True) as ranks,
    ):
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        producer.control("checkpoint")
        until(lambda: list((tmp_path / "checkpoints").glob("0*")), "a checkpoint")
        producer.drive([session], lambda: producer.status().latest.update >= 5)
        status, before = producer.status(), {ranks.pid(0), ranks.pid(1)}
        os.kill(ranks.pid(victim), signal.SIGKILL)
        eventually(lambda: producer.status().epoch > status.epoch, "the learner's return", PATIENCE_S)
        producer.drive([session], lambda: producer.status().latest.update >= status.latest.update + 3)
        assert not before & {ranks.pid(0), ranks.pid(1)}
        ranks.end()
        until(lambda: (tmp_path / "learner.json").exists(), "the account")
    assert json.loads((tmp_path / "learner.json").read_text())["ledger"]["balanced"]
    assert audited(tmp_path, redis_url)["trained"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_continues_when_a_rank_of_its_learner_is_killed(tmp_path: Path) -> None:
    training = Training(
        tmp_path / "run",
        *("CartPole-v1", "--ranks", "2", "--total-steps", "100000000"),
        *("--set", f"actor.ack_journal={tmp_path / 'acknowledged'}"),
        *("--set", "learner.stop_at_target=false", "--set", "learner.checkpoint_interval_s=1"),
    )
    try:
        training.until_steps(4_000)
        file = training.run_dir / "endpoints" / "learner-1.json"
        endpoint = read_endpoint(file)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        training.until_steps(training.steps() + 8_000)
        training.process.send_signal(signal.SIGINT)
        code, _, err = training.end(PATIENCE_S)
        assert code == 130, err
    finally:
        training.process.kill()
        training.process.communicate()
        wait_until_gone(training)
    (learner,) = [one for one in training.summary()["processes"] if one["role"] == "learner"]
    assert learner["restarts"] >= 1
    verdict = audit(training.run_dir)
    assert verdict.clean, verdict.problems
    assert training.summary()["ledger"]["balanced"]


UPDATES = 12


def recorded(given: Settings, folder: Path, **section: Any) -> Settings:
    return with_learner(given, record=folder, **section)


def replayed(given: Settings, folder: Path, **section: Any) -> Settings:
    return with_learner(given, feed_from=folder, **section)


def with_learner(given: Settings, **section: Any) -> Settings:
    return given.model_copy(update={"learner": given.learner.model_copy(update=section)})


def short(**over: Any) -> Settings:
    """Twelve updates with a linear schedule, staleness 1, and fragments that go stale."""
    algorithm = {
        "batch_steps": BATCH, "epochs": 2, "minibatches": 2, "staleness": 1, "stale_after": 3,
        "learning_rate_schedule": "linear",
    }  # fmt: skip
    learner = {"total_steps": UPDATES * BATCH, "checkpoint_interval_s": 3600, "stop_at_target": False}
    return settings(seed=7, algorithm=algorithm, learner=learner, **over)


def replay(server: RedisServer, run_dir: Path, given: Settings) -> dict[str, Any]:
    """Learn from a recording before a Redis that has never seen the run; no actor sends."""
    server.restart_empty()
    with LearnerThread(server.url, run_dir, given) as learner:
        return learner.finish()


def assert_equal_learning(one: Path, other: Path) -> None:
    assert weights_of(one) == weights_of(other)
    first, second = newest(one).tensors, newest(other).tensors
    assert first.keys() == second.keys()
    for name in first.keys() - {BEST}:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.promise("learning-recording-run-gives")
def test_a_replayed_run_ends_with_the_same_bytes(redis_server: RedisServer, tmp_path: Path) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with LearnerThread(redis_server.url, first, given) as learner, Producer(redis_server.url) as producer:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 3)
        until(lambda: producer.send_with_credit(session, update=1000), "credit for what will be stale")
        producer.drive([session], lambda: learner.ended)
        original = learner.finish()
    assert original["updates"] == UPDATES
    assert original["ledger"]["dropped"]["stale"] >= 1
    recording = Recording(folder)
    trained = sum(len(batch.fragments) for batch in recording.batches)
    assert trained == original["ledger"]["trained"] == len(recording.fragments)
    again = replay(redis_server, second, replayed(short(), folder))
    assert_equal_learning(first, second)
    for name in ("updates", "env_steps", "staleness", "ending"):
        assert again[name] == original[name], name
    assert again["ledger"] == {"acked": 0, "trained": 0, "dropped": {}, "resident": 0, "balanced": True}
    assert again["recording"] == {
        "folder": str(folder),
        "run": "run-l",
        "fragments": trained,
        "steps": trained * CHARGE,
        "batches_taken": UPDATES,
    }
    rewards = [line.get("mean_reward") for line in curve(second)]
    assert rewards[-1] == curve(first)[-1]["mean_reward"]


@pytest.mark.promise("learning-recording-run-gives")
def test_a_replayed_run_in_lock_step_ends_with_the_same_bytes(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(lock_step(), folder)
    with LearnerThread(redis_server.url, first, given) as learner, Producer(redis_server.url) as producer:
        sessions = [producer.open(name, data=name) for name in ("actor-0", "actor-1")]
        producer.drive(sessions, lambda: learner.ended)
        original = learner.finish()
    again = replay(redis_server, second, replayed(lock_step(), folder))
    assert_equal_learning(first, second)
    assert again["updates"] == original["updates"]


@pytest.mark.promise("recording-repeats-operator")
def test_an_operators_commands_are_replayed(redis_server: RedisServer, tmp_path: Path) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with Producer(redis_server.url, first) as producer:
        with LearnerThread(redis_server.url, first, given) as learner:
            session = producer.open()
            producer.drive([session], lambda: producer.status().latest.update >= 3)
            producer.answer("checkpoint", "good")
            learner.drain()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FAILPOINTS_VARIABLE, "restore.published=kill")
            process = learner_process(redis_server.url, first, given, "--resume")
        producer.ask("restore", "good")
        assert process.wait(LEARNER_RUN_PATIENCE_S) == -signal.SIGKILL
        with LearnerThread(redis_server.url, first, given, resume=True) as learner:
            producer.drive([session], lambda: learner.ended)
            original = learner.finish()
        assert not producer.answer("restore", "good").refusal
        audited(first, redis_server.url)
    events = [one for one in Recording(folder).entries if isinstance(one, FrameEntry)]
    assert [(one.action, one.name) for one in events] == [("checkpoint", "good"), ("restore", "good")]
    again = replay(redis_server, second, replayed(short(), folder))
    assert_equal_learning(first, second)
    assert again["updates"] == original["updates"]
    assert (second / "named-checkpoints" / "good").is_dir()


@pytest.mark.promise("learning-recording-run-gives")
@pytest.mark.slow
def test_a_recording_holds_once_what_a_killed_learner_learned(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with Producer(redis_server.url, first) as producer:
        process = learner_process(redis_server.url, first, given)
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 3)
        checkpoint_now(producer, first)
        update = producer.status().latest.update
        producer.drive([session], lambda: producer.status().latest.update >= min(update + 2, UPDATES - 1))
        process.kill()
        process.wait()
        with LearnerThread(redis_server.url, first, given, resume=True) as learner:
            producer.drive([session], lambda: learner.ended)
            original = learner.finish()
        audited(first, redis_server.url)
    positions = [batch.entry.position for batch in Recording(folder).batches]
    assert positions == sorted(set(positions))
    assert len(Recording(folder).fragments) == original["ledger"]["trained"]
    replay(redis_server, second, replayed(short(), folder))
    assert_equal_learning(first, second)


@pytest.mark.promise("learning-recording-run-gives")
@pytest.mark.slow
def test_a_killed_replay_ends_like_an_unkilled_one(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with LearnerThread(redis_server.url, first, given) as learner, Producer(redis_server.url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        learner.finish()
    redis_server.restart_empty()
    given = replayed(short(), folder, checkpoint_interval_s=0.0)
    with monkeypatch.context() as patch:
        patch.setenv(FAILPOINTS_VARIABLE, "update.before=kill@7")
        assert (
            learner_process(redis_server.url, second, given).wait(LEARNER_RUN_PATIENCE_S) == -signal.SIGKILL
        )
    assert newest(second).state["recorded"] == 6
    with LearnerThread(redis_server.url, second, given, resume=True) as learner:
        again = learner.finish()
    assert (again["updates"], again["recording"]["batches_taken"]) == (UPDATES, UPDATES)
    assert_equal_learning(first, second)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


TRUE: Final = "penstock.workloads.rlhf.sentiment:true_rewards"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    made = Fault()
    monkeypatch.setattr(LanguagePolicy, "load", lambda policy, blob: made(policy, blob))
    return made


class Judged:
    """A learner whose learner's side judges answers as a learner does."""

    def __init__(self, learner: ScriptedLanguageLearner) -> None:
        self.learner = learner
        tolerance = learner.settings.learner.probe_tolerance
        self._quarantine = Quarantine(learner.probe, learner.build(0), tolerance)
        self._answered: dict[int, int] = {}
        """Newest version that a session has answered for."""

    def publish(self) -> Publication:
        self.learner.read()
        made = self.learner.publish()
        snapshot = weights.snapshot(self.learner.policies[made.version])
        self._quarantine.expect(made.version, made.sha256, snapshot)
        return made

    def verdict(self, version: int) -> bool:
        """Whether who answers for this version is quarantined by its first answer."""
        eventually(lambda: self._look(version), "an answer", within_s=SCRIPTED_LANGUAGE_LEARNER_PATIENCE_S)
        (session,) = self._answered
        return self._quarantine.holds(session)

    def _look(self, version: int) -> bool:
        self.learner.read()
        probes = self.learner.log.renew().probes
        self._quarantine.check(probes)
        self._answered |= {answer.session: answer.version for answer in probes}
        return version in self._answered.values()


@pytest.mark.parametrize("way", [WRONG[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WRONG[1:])])
def test_a_wrong_adapter_is_caught_by_the_first_answer(
    way: str,
    fault: Fault,
    broker: BrokerProcess,
    begin: Callable[..., ScriptedLanguageLearner],
    base: Path,
    prompts: Path,
) -> None:
    judged = Judged(begin())
    places = {"model": str(base), "prompts": str(prompts), "reward": TRUE}
    with ActorThread(broker.address, "actor-0", places=places):
        assert not judged.verdict(judged.publish().version)
        fault.way = way
        assert judged.verdict(judged.publish().version)
        fault.way = "applied"
        assert not judged.verdict(judged.publish().version)
