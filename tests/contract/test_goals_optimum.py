"""The optimum of the simulated host, beside a search without value iteration, and beside play."""

from functools import cache

import numpy as np
import pytest

from penstock.workloads.goals.host import (
    ACTIONS,
    HEALTHY,
    STATES,
    GoalReward,
    Outcome,
    SimulatedHost,
    host_model,
)
from tests.support.serving.goals_optimum import optimum

EPISODES = 400
STEPS = 50


def test_the_tables_are_probabilities() -> None:
    model = host_model()
    assert len(STATES) == 72
    assert np.allclose(model.arrivals.sum(1), 1)
    assert ((model.success >= 0) & (model.success <= 1)).all()
    assert (model.arrivals >= 0).all()
    assert (model.success[0] == 0).all(), "doing nothing mends nothing"


def test_it_agrees_with_a_search_through_all_futures() -> None:
    reward, model = GoalReward(), host_model()

    @cache
    def best(state: int, left: int) -> float:
        return max(worth(action, state, left) for action in range(len(ACTIONS))) if left else 0.0

    def worth(action: int, state: int, left: int) -> float:
        chance, took_s = model.success[action, state], model.took_s[action, state]
        total = 0.0
        for success, weight in ((True, chance), (False, 1 - chance)):
            earned = reward.of(Outcome(success=success, took_s=took_s) if action else None)
            mended = model.mended[action, state] if success else state
            after = sum(one * best(to, left - 1) for to, one in enumerate(model.arrivals[mended]) if one > 0)
            total += weight * (earned + after)
        return float(total)

    assert optimum(3, reward).value == pytest.approx(best(STATES.index(HEALTHY), 3), rel=1e-9)


def test_its_policy_earns_it() -> None:
    found = optimum(STEPS, GoalReward())
    mean, error = play(found.policy)
    assert abs(mean - found.value) < 4 * error
    random = np.random.default_rng(0).integers(len(ACTIONS), size=(STEPS, len(STATES)))
    for other in (random, np.zeros_like(random), np.ones_like(random)):
        assert play(other)[0] < 0.3 * found.value


def test_the_best_policy_keeps_the_host_healthy() -> None:
    policy = optimum(STEPS, GoalReward()).policy[0]
    chosen = {state: ACTIONS[action] for state, action in zip(STATES, policy, strict=True)}
    assert chosen[HEALTHY] == "nothing"
    assert chosen[HEALTHY._replace(down=1)] == "restart_service"
    assert chosen[HEALTHY._replace(cache=2)] == "clear_cache"
    assert chosen[HEALTHY._replace(log=1)] == "rotate_logs"
    assert chosen[HEALTHY._replace(load=2)] == "shed_load"
    assert "check_disks" not in chosen.values()


def play(policy: np.ndarray) -> tuple[float, float]:
    """Mean return and its standard error; policy: the action by step and state."""
    host, reward, returns = SimulatedHost(), GoalReward(), []
    for seed in range(EPISODES):
        host.reset(seed)
        earned = 0.0
        for step in range(STEPS):
            action = int(policy[step, STATES.index(host.state)])
            if action == 0:
                host.idle()
                earned += reward.of(None)
            else:
                outcome = host.carry_out(ACTIONS[action])
                earned += reward.of(outcome)
        returns.append(earned)
    return float(np.mean(returns)), float(np.std(returns) / np.sqrt(EPISODES))
