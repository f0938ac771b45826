"""Estimates beside closed forms and plain Python; intervals that cover the truth; broken propensities."""

import random
from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from penstock.workloads.goals.off_policy import (
    Decisions,
    Estimates,
    TooLittle,
    cross_fitted,
    estimate,
    judge,
    returns_from,
)
from tests.support.oracles import off_policy_truth as truth

Policy = tuple[tuple[float, ...], ...]
DRAWS: Final = 200
NAMES: Final = ("ips", "self_normalised", "doubly_robust")


def decisions_of(episodes: list[list[truth.Event]], target: Policy, discount: float) -> Decisions:
    """Events as the estimators take them, with a model that is fitted on them."""
    events = [event for episode in episodes for event in episode]
    episode = np.repeat(np.arange(len(episodes)), [len(one) for one in episodes])
    reward = np.array([event.reward for event in events])
    action = np.array([event.action for event in events])
    seen = np.eye(len(target), dtype=np.float32)[[event.context for event in events]]
    returns = returns_from(episode, reward, discount)
    model = cross_fitted(seen, action, returns, episode, len(target[0]))
    chances = np.array([target[event.context] for event in events])
    return Decisions(
        episode=episode,
        reward=reward,
        log_target=np.log([event.target for event in events]),
        log_logged=np.log([event.logged for event in events]),
        predicted=model[np.arange(len(events)), action],
        expected=(chances * model).sum(1),
    )


def bandit(seed: int, count: int = 400) -> list[list[truth.Event]]:
    """Episodes of one decision."""
    return [[event] for event in truth.bandit_log(seed, count)]


def coverage(found: list[Estimates], value: float) -> dict[str, float]:
    """The share of intervals that hold the value, by estimator."""
    inside = {
        name: [getattr(one, name).low <= value <= getattr(one, name).high for one in found] for name in NAMES
    }
    return {name: sum(hits) / len(hits) for name, hits in inside.items()}


def test_intervals_of_single_decisions_cover_the_truth() -> None:
    found = [judge(decisions_of(bandit(seed), truth.TARGET, 1.0), 1.0) for seed in range(DRAWS)]
    value = truth.bandit_value(truth.TARGET)
    covered = coverage(found, value)
    assert min(covered.values()) >= 0.9, covered
    assert max(covered.values()) < 1.0, "intervals that always cover are too wide to say anything"
    assert abs(np.mean([one.doubly_robust.value for one in found]) - value) < 0.01
    assert value > truth.bandit_value(truth.LOGGING) + 0.2


def test_intervals_of_episodes_cover_the_truth() -> None:
    value = truth.chain_value(truth.CHAIN_TARGET)
    found = [
        judge(decisions_of(truth.chain_log(seed, 250), truth.CHAIN_TARGET, truth.DISCOUNT), truth.DISCOUNT)
        for seed in range(DRAWS)
    ]
    covered = coverage(found, value)
    assert min(covered.values()) >= 0.9, covered
    assert max(covered.values()) < 1.0
    assert abs(np.mean([one.ips.value for one in found]) - value) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_plain_python(seed: int) -> None:
    for episodes, target, discount in (
        (bandit(seed), truth.TARGET, 1.0),
        (truth.chain_log(seed, 100), truth.CHAIN_TARGET, truth.DISCOUNT),
    ):
        found = estimate(decisions_of(episodes, target, discount), discount)
        value, error = truth.importance_sampling(episodes, discount)
        assert found.ips.value == pytest.approx(value, rel=1e-9)
        assert found.ips.standard_error == pytest.approx(error, rel=1e-9)
        assert found.self_normalised.value == pytest.approx(
            truth.self_normalised(episodes, discount), rel=1e-9
        )


def test_a_good_model_narrows_the_interval() -> None:
    found = estimate(decisions_of(bandit(0, 5000), truth.TARGET, 1.0), 1.0)
    assert found.doubly_robust.standard_error < 0.8 * found.ips.standard_error


def test_a_bad_model_costs_no_bias() -> None:
    values = []
    for seed in range(60):
        made = decisions_of(bandit(seed), truth.TARGET, 1.0)
        wrong = replace(
            made, predicted=np.full_like(made.predicted, 3), expected=np.full_like(made.expected, 3)
        )
        values.append(estimate(wrong, 1.0).doubly_robust.value)
    spread = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(values) - truth.bandit_value(truth.TARGET)) < 4 * spread


def test_shuffled_propensities_are_noticed() -> None:
    for seed in range(20):
        events = truth.bandit_log(seed, 1000)
        logged = [event.logged for event in events]
        random.Random(seed).shuffle(logged)
        shuffled = [[replace(event, logged=one)] for event, one in zip(events, logged, strict=True)]
        with pytest.raises(TooLittle, match="mean of .* instead of 1: the propensities do not belong"):
            judge(decisions_of(shuffled, truth.TARGET, 1.0), 1.0)


def test_a_policy_that_is_never_like_the_logged_one_is_not_judged() -> None:
    made = decisions_of(bandit(3), truth.TARGET, 1.0)
    log_target = np.full_like(made.log_target, -30.0)
    log_target[:7] = 0.0
    with pytest.raises(TooLittle, match=r"effective sample size [0-9.]+ of 400 episodes, below 50"):
        judge(replace(made, log_target=log_target), 1.0)
    with pytest.raises(TooLittle, match="49 episodes with known propensities, fewer than 50"):
        judge(decisions_of(bandit(3, 49), truth.TARGET, 1.0), 1.0)
    with pytest.raises(TooLittle, match="effective sample size 0.0"):
        judge(replace(made, log_target=np.full_like(made.log_target, -np.inf)), 1.0)


def test_weights_that_overflow_are_not_judged() -> None:
    made = decisions_of(bandit(3), truth.TARGET, 1.0)
    log_logged = made.log_logged.copy()
    log_logged[0] = -1000.0
    with pytest.raises(TooLittle, match="effective sample size 1.0"):
        judge(replace(made, log_logged=log_logged), 1.0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"episode": np.zeros(400, np.int64) + 1}, "without a gap"),
        ({"reward": np.full(400, np.nan)}, "reward must be finite"),
        ({"log_logged": np.full(400, 0.5)}, "log_logged must be the logarithm"),
        ({"log_logged": np.full(400, -np.inf)}, "log_logged must be the logarithm"),
        ({"log_target": np.full(400, np.nan)}, "log_target must be the logarithm"),
        ({"reward": np.zeros(3)}, "different lengths"),
    ],
)
def test_decisions_that_cannot_be_used_are_refused(changed: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(decisions_of(bandit(0), truth.TARGET, 1.0), **changed)


def test_intervals_cover_the_truth_where_failures_are_rare() -> None:
    rate, draws, covered = 0.98, 200, {"self_normalised": 0, "doubly_robust": 0}
    for seed in range(draws):
        random = np.random.default_rng(seed)
        action = random.integers(3, size=240)
        reward = (random.random(240) < rate).astype(float)
        chosen = action == 1
        mean = np.array([reward[action == one].mean() for one in range(3)])
        with np.errstate(divide="ignore"):
            log_target = np.log(chosen.astype(float))
        decisions = Decisions(
            episode=np.arange(240), reward=reward, log_target=log_target,
            log_logged=np.full(240, -np.log(3.0)), predicted=mean[action], expected=np.full(240, mean[1]),
            action=action,
        )  # fmt: skip
        found = estimate(decisions, 1.0)
        for name in covered:
            one = getattr(found, name)
            covered[name] += one.low <= rate <= one.high
    assert min(covered.values()) >= 0.9 * draws, covered
