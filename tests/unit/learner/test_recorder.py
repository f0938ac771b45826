"""Staleness counts, the training clock and the final policy's files."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.launch.inspection.curve import read_rows
from penstock.learner.batch import reward_of
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.publish.kept_versions import FinalPolicy, read_final, write_final
from penstock.learner.recorder import Recorder, Staleness, TrainingClock
from penstock.policy import weights
from penstock.runtime import metrics
from tests.support.run.small_run import specification


def test_quantiles_of_staleness_survive_a_checkpoint() -> None:
    staleness = Staleness()
    assert staleness.quantiles() == {"p50": 0, "p99": 0, "max": 0}
    staleness.add({0: 10, 1: 88, 4: 1, 9: 1})
    assert staleness.quantiles() == {"p50": 1, "p99": 4, "max": 9}
    again = Staleness(staleness.state())
    assert again.quantiles() == staleness.quantiles()


def test_training_begins_with_the_first_experience() -> None:
    clock = TrainingClock()
    assert clock.seconds() == 0
    clock.start(round((time.time() - 2) * 1e6))
    assert clock.seconds() == pytest.approx(2, abs=0.5)
    resumed = TrainingClock(100.0)
    assert resumed.seconds() == pytest.approx(100.0)
    resumed.start(1)
    assert resumed.seconds() == pytest.approx(100.0, abs=0.5)


def test_a_line_torn_by_a_crash_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"env_steps": 10}\n{"env_steps": 20}\n{"env_st')
    recorder = Recorder(tmp_path, Staleness(), 10)
    recorder.write(lambda: moment(15), now=True)
    assert [row["env_steps"] for row in read_rows(path)] == [10, 15]


def test_a_line_says_what_was_evaluated_and_what_rewards_the_learner_was_given(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Staleness(), 0)
    log_batch = LogBatch(
        last=1, trained=(1,), dropped={}, steps=8, updates=(0,), versions=(1,), batch=None, round=None,
        size=1, created_us=1, assemble_s=0.0, origins={}, reward=-2.0,
    )  # fmt: skip
    recorder.updated(log_batch, {"nll": 0.5}, update=0, wait_s=0.0, compute_s=0.0)
    evaluated = {"evaluation_deterministic": 3.5, "evaluation_sampled": 2.5, "evaluation_best": 4.0}
    recorder.write(lambda: moment(8, evaluated), now=True)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row.items() >= (evaluated | {"nll": 0.5, "mean_reward": -0.25}).items()
    shown = metrics.exposition("learner").decode()
    assert "penstock_mean_reward -0.25" in shown
    assert 'penstock_imitation_nll_nats{split="train"} 0.5' in shown


def test_the_reward_of_a_fragment_is_that_of_its_valid_steps() -> None:
    valid = np.array([[1, 0], [1, 1]], bool)
    assert reward_of({"reward": np.array([[1, 50], [2, 4]], np.float32), "valid": valid}) == 7.0


def moment(env_steps: int, evaluated: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Somewhere in a run."""
    return {
        "evaluated": evaluated or {},
        "training_seconds": 1.0,
        "env_steps": env_steps,
        "updates": 1,
        "version": 1,
        "publications": 1,
        "episodes": 0,
        "mean_return": None,
        "episode_length": None,
        "publish_s": 0.0,
        "checkpoint_s": 0.0,
        "log_bytes": 0,
        "outstanding": 0,
        "budget": 1,
    }


def test_the_final_policy_needs_no_broker_to_be_read(tmp_path: Path) -> None:
    blob = weights.encode({"w": np.ones(3, np.float32)})
    final = FinalPolicy(specification=specification(), blob=blob, version=5, update=4)
    with pytest.raises(ValueError, match="has the run ended"):
        read_final(tmp_path)
    write_final(tmp_path, final)
    again = read_final(tmp_path)
    assert (again.blob, again.version, again.update) == (blob, 5, 4)
    assert again.specification.encode() == specification().encode()
    (tmp_path / "policies" / "final.safetensors").write_bytes(blob[:-1])
    with pytest.raises(ValueError, match="SHA-256"):
        read_final(tmp_path)
