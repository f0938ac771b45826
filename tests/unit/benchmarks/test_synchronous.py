from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import synchronous
from benchmarks.proof_records import Record, append
from benchmarks.proofs import Proof
from penstock.config.settings import OnPolicySection, load
from tests.unit.benchmarks.test_learn import RECORD
from workloads.control.defaults import for_environment


def records(task: str, asynchronous: list[float], lock_step: list[float]) -> list[Record]:
    """Runs that ended with these evaluations."""
    made = []
    for variant, means in (("asynchronous", asynchronous), ("synchronous", lock_step)):
        proofs = [proof for proof in synchronous.RUNS if (proof.task, proof.variant) == (task, variant)]
        for proof, mean in zip(proofs, means, strict=False):
            result = {"evaluation": {"mean": mean}}
            made.append(
                replace(
                    RECORD, task=task, variant=variant, seed=proof.seed, command=proof.command, result=result
                )
            )
    return made


def test_there_are_three_tasks_and_five_seeds_in_both_arms_at_equal_steps() -> None:
    """The arms of a task differ by lock-step alone."""
    assert len(synchronous.RUNS) == 3 * 5 * 2
    for ours, theirs in zip(synchronous.RUNS[::2], synchronous.RUNS[1::2], strict=True):
        assert (ours.task, ours.seed, ours.total_steps) == (theirs.task, theirs.seed, theirs.total_steps)
        assert theirs.options == (*ours.options, "--set", "algorithm.staleness=0")


@pytest.mark.parametrize("proof", synchronous.RUNS[::10], ids=lambda proof: proof.task)
def test_a_round_of_lock_step_is_as_large_as_a_batch(proof: Proof) -> None:
    """One fragment of every worker."""
    settings = load([for_environment(proof.task, "ppo")])
    workers = int(proof.options[proof.options.index("--actors") + 1])
    assert isinstance(settings.algorithm, OnPolicySection)
    assert (
        workers * settings.actor.unroll_length * settings.environment.count == settings.algorithm.batch_steps
    )


def test_the_interval_is_that_of_the_difference_of_means() -> None:
    """Close to the normal one for many numbers; a point where nothing varies; signed."""
    random = np.random.default_rng(1)
    first, second = random.normal(3.0, 1.0, 400), random.normal(1.0, 2.0, 400)
    low, high = synchronous.interval(first, second)
    error = np.sqrt(first.var() / 400 + second.var() / 400)
    centre = first.mean() - second.mean()
    assert low == pytest.approx(centre - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(centre + 1.96 * error, abs=0.1 * error)
    assert synchronous.interval(np.full(5, 2.0), np.full(5, 3.0)) == (-1.0, -1.0)
    assert synchronous.interval(first, second) == (low, high)


@pytest.mark.parametrize(
    ("asynchronous", "lock_step", "verdict"),
    [
        ([500.0] * 5, [500.0] * 5, "certain"),
        ([490.0, 480.0, 500.0, 495.0, 485.0], [500.0] * 5, "certain"),
        ([500.0, 400.0, 500.0, 500.0, 450.0], [500.0] * 5, "possible"),
        ([300.0, 310.0, 290.0, 305.0, 300.0], [500.0] * 5, "excluded"),
    ],
)
def test_the_verdict_says_where_a_small_loss_lies(
    asynchronous: list[float], lock_step: list[float], verdict: str
) -> None:
    """In all of the interval, in a part of it, or outside."""
    compared = synchronous.compare("CartPole-v1", records("CartPole-v1", asynchronous, lock_step))
    assert compared is not None
    assert compared.verdict == verdict
    assert compared.seeds == 5


def test_a_loss_of_negative_returns_is_a_loss() -> None:
    """−110 is worse than −100 by a tenth."""
    compared = synchronous.compare("Acrobot-v1", records("Acrobot-v1", [-110.0] * 5, [-100.0] * 5))
    assert compared is not None
    assert compared.difference == pytest.approx(-0.1)
    assert compared.verdict == "excluded"


def test_the_page_holds_what_was_run(tmp_path: Path) -> None:
    """Nothing without runs; a table and what is missing with some; runs of another command do not count."""
    path = tmp_path / "synchronous.jsonl"
    assert synchronous.section(path) == ""
    for record in records("CartPole-v1", [500.0, 490.0], [500.0, 500.0]):
        append(path, record)
    page = synchronous.section(path)
    assert "| CartPole-v1 | 100,000 | 2 | 495.0 | 500.0 | -1.0% | -2.0% to +0.0% | certain |" in page
    assert "Not run yet: 26 of 30 runs." in page
    append(path, replace(records("CartPole-v1", [500.0], [])[0], command="penstock train other"))
    assert synchronous.section(path) == ""
