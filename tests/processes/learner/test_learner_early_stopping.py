"""A run that no longer improves ends, and its best version becomes the newest.

The same bytes under a new number.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import Settings
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.publish.kept_versions import read_final
from penstock.policy import weights
from penstock.protocol.messages import Role
from penstock.registry.records import Origin
from penstock.registry.registry import Registry
from penstock.registry.weight_files import read_kept, registry_url
from penstock.runtime import metrics
from tests.processes.learner.test_learner_resume import checkpoint_now, newest
from tests.support.run.learner_run import (
    BATCH,
    LearnerThread,
    Producer,
    account,
    audited,
    learner_process,
    settings,
    until,
)


def impatient(target: float | None = None, **evaluation: Any) -> Settings:
    """An evaluation of two episodes after every other update.

    Ends after two in a row without half a point more.
    """
    section = {"episodes": 2, "interval_steps": 2 * BATCH, "patience": 2, "min_improvement": 0.5}
    return settings(
        learner={
            "total_steps": 10**9,
            "checkpoint_interval_s": 3600,
            "stop_at_target": False,
            "target_return": target,
        },
        evaluation={"timeout_s": 60} | section | evaluation,
    )


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
    held = {
        name.removeprefix("policy/"): tensor.numpy()
        for name, tensor in newest(run_dir).tensors.items()
        if name.startswith("policy/")
    }
    assert weights.encode(held) == final.blob, "a learner that resumes goes on from the best weights"


@pytest.mark.promise("run-stops-because-longer")
def test_a_run_that_no_longer_improves_publishes_its_best_version_again(
    redis_url: str, tmp_path: Path
) -> None:
    with (
        LearnerThread(redis_url, tmp_path, impatient()) as learner,
        Producer(redis_url, tmp_path) as producer,
    ):
        judge = Judge(producer, learner)
        versions = [judge.give(mean) for mean in (3.0, 5.0, 5.4)]
        assert not learner.ended
        judge.give(4.0)
        producer.drive([judge.rollout], lambda: learner.ended)
        result = learner.finish()
        latest = producer.status().latest
        # 5.4 is no improvement that patience counts, and still the best that was measured.
        assert_restored(tmp_path, result, versions[2], 5.4)
        assert (latest.version, latest.sha256) == (
            result["policy_version"],
            weights.sha256(read_final(tmp_path).blob),
        )
        assert result["ledger"]["balanced"]
        audited(tmp_path, redis_url)
    assert curve(tmp_path)[-1].items() >= {
        "evaluation_deterministic": 4.0, "evaluation_best": 5.4, "evaluations_without_improvement": 2,
    }.items()  # fmt: skip
    shown = metrics.exposition("learner").decode()
    assert 'penstock_evaluation_return{actions="deterministic"} 4.0' in shown
    assert "penstock_evaluation_best_return 5.4" in shown
    assert "penstock_evaluations_without_improvement 2.0" in shown


def test_a_solved_run_tells_when_the_version_was_made_that_it_ends_with(
    redis_url: str, tmp_path: Path
) -> None:
    with (
        LearnerThread(redis_url, tmp_path, impatient(target=3.5)) as learner,
        Producer(redis_url, tmp_path) as producer,
    ):
        judge = Judge(producer, learner)
        best, *_ = [judge.give(mean) for mean in (9.0, 5.0, 4.0)]
        producer.drive([judge.rollout], lambda: learner.ended)
        result = learner.finish()
        assert_restored(tmp_path, result, best, 9.0)
    assert result["solved_at"]["version"] == best


@pytest.mark.promise("run-whose-algorithm-rejects")
def test_a_run_whose_algorithm_rejects_what_it_learns_publishes_its_best_version_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejects = threading.Event()
    monkeypatch.setattr(Algorithm, "has_rejected", property(lambda _: rejects.is_set()))
    monkeypatch.setattr(Algorithm, "rejection", "nonsense")
    monkeypatch.setattr(Algorithm, "findings", lambda _: {"remarks": ["worth nothing"]})
    with (
        LearnerThread(redis_url, tmp_path, impatient(patience=None)) as learner,
        Producer(redis_url, tmp_path) as producer,
    ):
        judge = Judge(producer, learner)
        versions = [judge.give(mean) for mean in (3.0, 5.0, 4.0)]
        assert not learner.ended
        rejects.set()
        producer.drive([judge.rollout], lambda: learner.ended)
        result = learner.finish()
        assert_restored(tmp_path, result, versions[1], 5.0, "nonsense")
        assert result["findings"] == {"remarks": ["worth nothing"]}
        assert result["ledger"]["balanced"]
        audited(tmp_path, redis_url)


@pytest.mark.promise("run-stops-because-longer")
def test_patience_and_the_best_version_survive_a_kill(redis_url: str, tmp_path: Path) -> None:
    given = impatient()
    with Producer(redis_url) as producer:
        process = learner_process(redis_url, tmp_path, given)
        judge = Judge(producer)
        best = judge.give(7.0)
        judge.give(1.0)
        until(lambda: waits(tmp_path) == 1, "the second result")
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
    assert curve(tmp_path)[-1]["evaluations_without_improvement"] == 2


def test_a_run_whose_steps_are_done_ends_with_its_best_version_too(redis_url: str, tmp_path: Path) -> None:
    learner_section = {"total_steps": 4 * BATCH, "checkpoint_interval_s": 3600, "stop_at_target": False}
    given = impatient(patience=100).model_copy(update={"learner": settings(learner=learner_section).learner})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        judge = Judge(producer, learner)
        best = judge.give(7.0)
        while not learner.ended:
            judge.give(1.0)
        result = learner.finish()
    assert (result["ending"], result["restored_from"]) == ("steps", best)
    assert account(tmp_path)["policy_version"] > max(judge.judged)


def test_a_run_ends_after_its_updates(redis_url: str, tmp_path: Path) -> None:
    section = {
        "total_steps": 10**6,
        "total_updates": 3,
        "checkpoint_interval_s": 3600,
        "stop_at_target": False,
    }
    with (
        LearnerThread(redis_url, tmp_path, settings(learner=section)) as learner,
        Producer(redis_url) as producer,
    ):
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        result = learner.finish()
    assert (result["ending"], result["updates"]) == ("updates", 3)
    assert result["env_steps"] == 3 * BATCH


def curve(run_dir: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def waits(run_dir: Path) -> int:
    lines = curve(run_dir)
    return int(lines[-1].get("evaluations_without_improvement", 0)) if lines else 0
