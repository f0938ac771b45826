"""Asynchronous against synchronous: what the ratio and the distance are of."""

import tomllib

import pytest

from benchmarks import language_async
from benchmarks.language_async import Arm, Outcome, Threads, summarise
from penstock.config.settings import OnPolicySection, load
from workloads.rlhf.language_defaults import for_environment


def arm(*runs: tuple[float, float]) -> Arm:
    """Of these rates and rewards."""
    outcomes = [Outcome(rate=rate, reward=reward, busy=0.5) for rate, reward in runs]
    return Arm(threads=Threads(actor=1, learner=2), runs=outcomes)


def test_rates_are_compared_within_a_seed_and_rewards_in_standard_errors() -> None:
    """The errors of both arms add up as variances do."""
    table = summarise(
        {
            "asynchronous": arm((30, 0.7), (10, 0.8), (20, 0.9)),
            "synchronous": arm((10, 0.6), (10, 0.7), (10, 0.8)),
        }
    )
    ours, theirs = table.rows
    error = 0.1 / 3**0.5
    assert list(ours[1:6]) == [
        "actor 1, learner 2",
        20,
        2.0,
        pytest.approx(0.8),
        pytest.approx(error),
    ]
    assert theirs[3] is None
    assert f"{0.1 / (error * 2**0.5):.2f} apart" in table.note


def test_one_seed_has_no_standard_error() -> None:
    """It says nothing of the distance."""
    table = summarise({"asynchronous": arm((20, 0.7)), "synchronous": arm((10, 0.1))})
    assert table.rows[0][5] is None
    assert "0.00 apart" in table.note


@pytest.mark.parametrize("name", language_async.ARMS)
def test_a_fragment_is_a_batch_in_both_arms(name: str) -> None:
    """So both make the same updates, and only lock-step differs."""
    said = tomllib.loads(language_async._RECIPE.format(model="model", prompts="prompts"))
    for option in language_async.ARMS[name][1::2]:
        key, _, value = option.rpartition("=")
        said["algorithm"][key.removeprefix("algorithm.")] = int(value)
    settings = load([for_environment("sentiment-words", "ppo"), said])
    section = settings.algorithm
    assert isinstance(section, OnPolicySection)
    assert section.lock_step == (name == "synchronous")
    assert settings.environment.count * settings.actor.unroll_length == section.batch_steps
