"""How a run ends, with which version, and what `learner.json` says of it."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import penstock.learner.learner
import penstock.learner.recorder
from penstock.config.settings import Settings
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.checkpoint.store import BEST, Checkpoint, CheckpointStore, tensor_bytes
from penstock.learner.publish.kept_versions import FinalPolicy, read_final, write_final
from penstock.policy import weights
from penstock.protocol.messages import Role
from penstock.registry.records import Origin
from penstock.registry.registry import Registry
from penstock.registry.weight_files import read_kept, registry_url
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from tests.support.run.learner_run import (
    BATCH,
    PATIENCE_S,
    LearnerThread,
    Producer,
    audited,
    checkpoint_now,
    endless,
    learner_process,
    newest,
    settings,
    until,
)

IMPATIENT = {"patience": 2, "min_improvement": 0.5}
"""Ends after two evaluations in a row without half a point more."""
KEEPING: dict[str, Any] = {"keep_checkpoints": 2, "keep_best": True}


def judged(evaluation: Mapping[str, Any] | None = None, **learner: Any) -> Settings:
    """An evaluation of two episodes after every other update."""
    section = {"timeout_s": 60, "episodes": 2, "interval_steps": 2 * BATCH, **(evaluation or {})}
    return settings(learner={"total_steps": 10**9} | learner, evaluation=section)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def policy_bytes(checkpoint: Checkpoint) -> bytes:
    tensors = checkpoint.tensors.items()
    own = {name: tensor.numpy() for name, tensor in tensors if name.startswith("policy/")}
    return weights.encode({name.removeprefix("policy/"): array for name, array in own.items()})


class Judge:
    def __init__(self, producer: Producer, learner: LearnerThread | None = None) -> None:
        self.producer, self.learner = producer, learner
        self.session = producer.open("judge", role=Role.EVALUATION)
        self.rollout = producer.open()
        self.judged: list[int] = []

    def give(self, mean: float) -> int:
        """The next version that is asked about gets this mean; its number, 0 when the run has ended."""
        seen = max(self.judged, default=0)
        self.producer.drive([self.rollout], lambda: self._asked() > seen or self._has_ended())
        if self._has_ended():
            return 0
        version = self._asked()
        self.judged.append(version)
        self.producer.report(self.session, [mean - 1, mean + 1], version=version, evaluation=True)
        return version

    def finish(self) -> dict[str, Any]:
        """Drive the run to its end; its account."""
        assert self.learner is not None
        self.producer.drive([self.rollout], self._has_ended)
        return self.learner.finish()

    def _asked(self) -> int:
        return self.producer.evaluate_version(self.session)

    def _has_ended(self) -> bool:
        return self.learner is not None and self.learner.ended


def assert_restored(
    run_dir: Path, result: dict[str, Any], best: int, mean: float, ending: str = "no_improvement"
) -> None:
    """The newest version holds the bytes of the best one; final policy, registry and checkpoint agree."""
    assert (result["ending"], result["finished"], result["restored_from"]) == (ending, True, best)
    assert (result["evaluation"]["version"], result["evaluation"]["mean"]) == (best, mean)
    final = read_final(run_dir)
    assert final.version == result["policy_version"] > best
    assert (run_dir / "policies" / "latest").readlink() == Path("final.safetensors")
    with Registry.open(registry_url(run_dir)) as registry:
        rows = {row.version: row for row in registry.list("default")}
    assert (rows[best].origin, rows[final.version].origin) == (Origin.BEST, Origin.FINAL)
    assert rows[final.version].sha256 == rows[best].sha256 == weights.sha256(final.blob)
    assert rows[final.version].update == rows[best].update
    recorded = rows[final.version].evaluation
    assert recorded is not None
    assert recorded.mean == mean
    assert ending in rows[final.version].reason
    assert read_kept(run_dir, best, rows[best].sha256) == final.blob
    assert policy_bytes(newest(run_dir)) == final.blob, "a learner that resumes goes on from the best weights"


@pytest.mark.promise("run-stops-because-longer")
def test_a_run_that_no_longer_improves_publishes_its_best_version_again(
    redis_url: str, tmp_path: Path
) -> None:
    given = judged(IMPATIENT)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url, tmp_path) as producer:
        judge = Judge(producer, learner)
        versions = [judge.give(mean) for mean in (3.0, 5.0, 5.4)]
        assert not learner.ended
        judge.give(4.0)
        result = judge.finish()
        latest = producer.status().latest
        # 5.4 is no improvement that patience counts, and still the best that was measured.
        assert_restored(tmp_path, result, versions[2], 5.4)
        assert latest.version == result["policy_version"]
        assert latest.sha256 == weights.sha256(read_final(tmp_path).blob)
        audited(tmp_path, redis_url)
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert (last["evaluation_deterministic"], last["evaluation_best"]) == (4.0, 5.4)
    assert last["evaluations_without_improvement"] == 2
    shown = metrics.exposition("learner").decode()
    assert 'penstock_evaluation_return{actions="deterministic"} 4.0' in shown
    assert "penstock_evaluation_best_return 5.4" in shown
    assert "penstock_evaluations_without_improvement 2.0" in shown


@pytest.mark.promise("run-whose-algorithm-rejects")
def test_a_rejected_run_publishes_its_best_version_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejects = threading.Event()
    monkeypatch.setattr(Algorithm, "has_rejected", property(lambda _: rejects.is_set()))
    monkeypatch.setattr(Algorithm, "rejection", "nonsense")
    monkeypatch.setattr(Algorithm, "findings", lambda _: {"remarks": ["worth nothing"]})
    with LearnerThread(redis_url, tmp_path, judged()) as learner, Producer(redis_url, tmp_path) as producer:
        judge = Judge(producer, learner)
        versions = [judge.give(mean) for mean in (3.0, 5.0, 4.0)]
        assert not learner.ended
        rejects.set()
        result = judge.finish()
        assert_restored(tmp_path, result, versions[1], 5.0, "nonsense")
        assert result["findings"] == {"remarks": ["worth nothing"]}
        audited(tmp_path, redis_url)


@pytest.mark.promise("run-stops-because-longer")
def test_patience_and_the_best_version_survive_a_kill(redis_url: str, tmp_path: Path) -> None:
    given, told = judged(IMPATIENT), tmp_path / "metrics.jsonl"
    with Producer(redis_url) as producer:
        process = learner_process(redis_url, tmp_path, given)
        judge = Judge(producer)
        best = judge.give(7.0)
        judge.give(1.0)
        until(lambda: '"evaluations_without_improvement": 1' in told.read_text(), "the second result")
        checkpoint_now(producer, tmp_path)
        # When there is another, the one before is not only written but committed.
        kept = checkpoint_now(producer, tmp_path)
        assert kept.state["evaluation"]["patience"] == {"best": 7.0, "without": 1}
        process.kill()
        process.wait()
        with LearnerThread(redis_url, tmp_path, given, resume=True) as learner:
            judge.learner = learner
            while not learner.ended:
                # The first may be a version that the killed learner still asked about.
                judge.give(2.0)
            result = learner.finish()
    assert_restored(tmp_path, result, best, 7.0)
    assert lines(told)[-1]["evaluations_without_improvement"] == 2


@pytest.mark.parametrize(
    ("evaluation", "learner", "ending"),
    [
        (IMPATIENT, {"target_return": 3.5}, "no_improvement"),
        ({"patience": 100}, {"total_steps": 4 * BATCH}, "steps"),
    ],
    ids=["solved", "its steps are done"],
)
def test_a_run_ends_with_its_best_version_for_every_ending(
    redis_url: str, tmp_path: Path, evaluation: dict[str, float], learner: dict[str, float], ending: str
) -> None:
    given = judged(evaluation, **learner)
    with LearnerThread(redis_url, tmp_path, given) as running, Producer(redis_url) as producer:
        judge = Judge(producer, running)
        best = judge.give(9.0)
        while not running.ended:
            judge.give(4.0)
        result = judge.finish()
    assert_restored(tmp_path, result, best, 9.0, ending)
    assert result["policy_version"] > max(judge.judged)
    assert "target_return" not in learner or result["solved_at"]["version"] == best


FAR = 16
"""Updates, of which the hard bound of staleness lets half pass."""


@pytest.mark.promise("checkpoint-best-evaluation-kept")
def test_a_run_keeps_its_best_checkpoint_and_returns_to_it(redis_url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, judged(**KEEPING)) as learner:
            judge = Judge(producer, learner)
            _, best, *_ = [judge.give(mean) for mean in (3.0, 9.0, 4.0, 5.0)]
            until(lambda: learner_saw(producer, 5.0), "the last result")
            seen = producer.status().latest.update
            producer.drive([judge.rollout], lambda: producer.status().latest.update > seen + FAR)
            under_way = store.ids()[0]
            # The third begins when the second has removed what is not kept.
            for _ in range(3):
                checkpoint_now(producer, tmp_path)
            assert under_way in store.ids(), "neither among the newest two nor the best, and in evaluation"
            result = learner.drain()
        kept = store.best()
        assert result["best_checkpoint"] == kept
        assert kept in store.ids()
        assert kept not in store.ids()[:2]
        assert len(store.ids()) == 3, "the newest two and the best: an evaluation ends with its process"
        stopped = store.read(store.ids()[0])
        blob = tensor_bytes(stopped.tensors[BEST])
        assert policy_bytes(store.read(kept)) == blob
        assert stopped.state["evaluation"]["best"]["candidate"]["version"] == best
        before, update = producer.status().latest.version, store.read(kept).state["updates"]
        again = LearnerThread(redis_url, tmp_path, judged(**KEEPING), resume=True, allow_loss=True, best=True)
        with again as learner:
            producer.drive([judge.rollout], lambda: producer.status().latest.version > before)
            assert producer.status().latest.update < stopped.state["updates"], "counted on from the best one"
            producer.drive([judge.rollout], lambda: producer.status().latest.update > update)
            resumed = learner.drain()
        audited(tmp_path, redis_url)
    assert resumed["ledger"]["dropped"]["log_lost"] > 0
    assert update == stopped.state["evaluation"]["best"]["candidate"]["update"]
    new = [entry["parent"] for entry in lines(tmp_path / "lineage.jsonl") if entry["checkpoint"] > stopped.id]
    assert new[0] == kept, "what was made since is no part of the lineage any more"
    assert update < store.read(store.ids()[0]).state["updates"] < stopped.state["updates"]


def test_a_run_ends_after_its_updates_and_names_its_last_checkpoint_where_it_is_the_best(
    redis_url: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, judged(**KEEPING, total_updates=2)) as learner:
            judge = Judge(producer, learner)
            judge.give(9.0)
            result = judge.finish()
        audited(tmp_path, redis_url)
    assert (result["ending"], result["updates"], result["env_steps"]) == ("updates", 2, 2 * BATCH)
    assert result["evaluation"]["mean"] == 9.0
    assert result["best_checkpoint"] == store.best() == store.ids()[0]


def test_a_best_checkpoint_that_is_gone_is_not_named(redis_url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, judged(**KEEPING)) as learner:
            judge = Judge(producer, learner)
            for mean in (3.0, 9.0, 4.0, 5.0):
                judge.give(mean)
            until(lambda: learner_saw(producer, 5.0), "the last result")
            for _ in range(3):
                checkpoint_now(producer, tmp_path)
            kept = learner.drain()["best_checkpoint"]
        known = store.read(kept).state["evaluation"]["best"]["candidate"]["checkpoint"]
        assert known not in store.ids()
        for _ in range(2):
            before = producer.status().latest.version
            again = LearnerThread(
                redis_url, tmp_path, judged(**KEEPING), resume=True, allow_loss=True, best=True
            )
            with again as learner:
                producer.drive([judge.rollout], lambda old=before: producer.status().latest.version > old)  # type: ignore[misc]
                for _ in range(3):
                    checkpoint_now(producer, tmp_path)
                assert learner.drain()["best_checkpoint"] is None
            assert store.best() == kept
            assert kept in store.ids()


def learner_saw(producer: Producer, mean: float) -> bool:
    return f'"evaluation_deterministic": {mean}' in producer.status().learner_json


def test_returning_to_a_missing_best_checkpoint_is_refused(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 1)
        learner.drain()
    again = LearnerThread(redis_url, tmp_path, endless(), resume=True, best=True)
    with again as learner, pytest.raises(RunFailed, match=r"learner\.keep_best=true"):
        learner.finish()


def test_training_ends_with_the_last_update(redis_url: str, tmp_path: Path) -> None:
    waited_s = 2
    made = settings(evaluation={"timeout_s": waited_s, "episodes": 2})
    with LearnerThread(redis_url, tmp_path, made) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        told = learner.finish()
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert last["training_seconds"] - told["training_seconds"] >= waited_s
    rate = told["env_steps"] / told["training_seconds"]
    assert told["env_steps_per_second"] == pytest.approx(rate, rel=0.01)
    with LearnerThread(redis_url, tmp_path, made, resume=True) as learner:
        again = learner.finish()
    assert again["training_seconds"] == told["training_seconds"], "a checkpoint counts what is no training"


class Gate:
    """Holds the learner's thread where it is reached, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


def test_a_result_that_comes_after_the_end_changes_nothing(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updating, ending = Gate(), Gate()
    updates = 0

    def hold(name: str, _sequence: int = 0) -> None:
        nonlocal updates
        updates += name == "update.after"
        if name == "update.after" and updates == 4:
            updating.hold()

    def write(run_dir: Path, final: FinalPolicy) -> None:
        ending.hold()
        write_final(run_dir, final)

    monkeypatch.setattr(penstock.learner.learner, "failpoint", hold)
    monkeypatch.setattr(penstock.learner.recorder, "write_final", write)
    made = judged({"timeout_s": 1}, stop_at_target=True, target_return=5.0)
    with LearnerThread(redis_url, tmp_path, made) as running, Producer(redis_url) as producer:
        judge, rollout = producer.open("judge", role=Role.EVALUATION), producer.open()
        try:
            producer.drive([rollout], updating.reached.is_set)
            first = producer.evaluate_version(judge)
            producer.report(judge, [6.0, 6.0], version=first, evaluation=True)
            until(lambda: producer.evaluate_version(judge) == 0, "the target to be reached")
            updating.opened.set()
            until(ending.reached.is_set, "the end")
            second = producer.evaluate_version(judge)
            assert second > first > 0
            producer.report(judge, [7.0, 7.0], version=second, evaluation=True)
            producer.report(rollout, [123.0])
            until(lambda: metrics.MEAN_RETURN._value.get() == 123.0, "all reports to be read")
        finally:
            updating.opened.set()
            ending.opened.set()
        told = running.finish()
    assert told["ending"] == "target"
    versions = told["solved_at"]["version"], told["evaluation"]["version"]
    assert versions == (first, first)
    assert read_final(tmp_path).version == told["policy_version"] == first
