"""What the task says of itself, against simulation and brute force."""

import ast
from pathlib import Path

import numpy as np
import pytest

from penstock.workloads.rlhf import sentiment
from penstock.workloads.rlhf.sentiment import true_reward
from tests.support.language.known_sentiment import (
    KnownSentiment,
    expected_pair_accuracy,
    optimal,
    optimum,
)
from tests.support.language.known_sentiment import pairs as pairs_of

TASK = KnownSentiment()


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("", 0.0),
        ("tree", 0.0),
        ("good", 1.0),
        ("bad bad", -1.0),
        ("good bad tree stone", 0.0),
        ("good tree", 0.5),
    ],
)
def test_the_true_reward_counts_words(response: str, reward: float) -> None:
    assert reward == true_reward(response)


def test_the_file_imports_nothing_that_learns() -> None:
    tree = ast.parse(Path(sentiment.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} == {"collections", "dataclasses", "typing", "numpy"}


def test_the_distribution_of_rewards_is_that_of_the_generator() -> None:
    rng, count = np.random.default_rng(0), 10_000
    drawn = np.array([true_reward(TASK.response(rng)) for _ in range(count)])
    values, chances = TASK.rewards()
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert set(drawn) <= set(values)
    shares = np.array([(drawn == value).mean() for value in values])
    assert np.all(np.abs(shares - chances) <= 5 * np.sqrt(chances * (1 - chances) / count) + 1e-12)


def test_the_floor_of_the_squared_error_is_that_of_the_best_prediction() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.choice(TASK.rewards().values, 400_000, p=TASK.rewards().chances)
    said = np.clip(rewards + TASK.noise * rng.standard_normal(len(rewards)), -1, 1)
    best = TASK.expected_score(rewards)
    assert np.mean((said - best) ** 2) == pytest.approx(TASK.bayes_mse(), rel=0.01)
    assert np.mean((said - rewards) ** 2) > np.mean((said - best) ** 2)


def test_the_ceiling_of_pair_accuracy_is_that_of_the_true_order() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.choice(TASK.rewards().values, (2, 400_000), p=TASK.rewards().chances)
    said = rewards + TASK.noise * rng.standard_normal(rewards.shape)
    agree = (np.sign(rewards[0] - rewards[1]) * np.sign(said[0] - said[1]) + 1) / 2
    assert agree.mean() == pytest.approx(TASK.bayes_pair_accuracy(), abs=0.003)


def test_pairs_are_preferred_as_often_as_said() -> None:
    rng = np.random.default_rng(0)
    rows = list(pairs_of(TASK, rng, 4000))
    better = np.array([true_reward(row["chosen"]) for row in rows])
    worse = np.array([true_reward(row["rejected"]) for row in rows])
    accuracy = ((np.sign(better - worse) + 1) / 2).mean()
    assert accuracy == pytest.approx(TASK.bayes_pair_accuracy(), abs=0.025)


def test_the_true_order_reaches_the_ceiling_and_the_reversed_one_its_mirror() -> None:
    rng = np.random.default_rng(0)
    responses = [TASK.response(rng) for _ in range(50)]
    rewards = [true_reward(response) for response in responses]
    accuracy, ceiling = expected_pair_accuracy(TASK, responses, rewards)
    assert accuracy == pytest.approx(ceiling, abs=1e-12)
    reversed_, _ = expected_pair_accuracy(TASK, responses, [-reward for reward in rewards])
    assert reversed_ == pytest.approx(1 - ceiling, abs=1e-12)
    assert (0.5, ceiling) == pytest.approx(expected_pair_accuracy(TASK, responses, [0.0] * 50))


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_no_other_policy_beats_the_optimum(beta: float) -> None:
    values, chances = TASK.rewards()
    best = optimal(chances, values, beta)

    def value(policy: np.ndarray) -> float:
        return float(policy @ values - beta * policy @ np.log(policy / chances))

    found = optimum(TASK.rewards(), beta)
    assert value(best) == pytest.approx(found.value, abs=1e-12)
    assert best @ values == pytest.approx(found.reward, abs=1e-12)
    assert best @ np.log(best / chances) == pytest.approx(found.kl, abs=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = best * np.exp(0.1 * rng.standard_normal(len(best)))
        assert value(other / other.sum()) < found.value


def test_a_looser_leash_is_used() -> None:
    found = [optimum(TASK.rewards(), beta) for beta in (0.05, 0.1, 0.5, 1.0, 5.0)]
    assert sorted(found, key=lambda one: -one.kl) == found
    assert sorted(found, key=lambda one: -one.reward) == found


def test_without_noise_everything_can_be_known() -> None:
    certain = KnownSentiment(noise=0.0)
    values, chances = certain.rewards()
    assert certain.bayes_mse() == 0
    assert certain.bayes_pair_accuracy() == pytest.approx(1 - float(chances @ chances) / 2)
    assert np.array_equal(certain.expected_score(values), values)
