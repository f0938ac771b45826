"""The gate: what is done has the probability that it says, so that learning from it is learning of π."""

from typing import Final

import numpy as np
import pytest

from penstock.workloads.goals.injector import NOTHING, Gate

ACTIONS: Final = 5
DRAWS: Final = 100_000
SCORES: Final = np.array([0.2, 2.4, 0.0, 0.5, -0.3])
CHANCES: Final = np.exp(SCORES) / np.exp(SCORES).sum()
ADVANTAGE: Final = np.array([-0.2, 0.3, 1.0, -0.5, 0.8])
GATE: Final = Gate(threshold=0.6, explore=0.02, safe=(False, True, True, True, True))


def decided(gate: Gate) -> tuple[np.ndarray, np.ndarray]:
    """Actions and log ν of DRAWS decisions."""
    random = np.random.default_rng(3)
    drawn = random.choice(ACTIONS, size=DRAWS, p=CHANCES)
    found = [
        gate.decide(CHANCES, int(one), float(draw))
        for one, draw in zip(drawn, random.random(DRAWS), strict=True)
    ]
    return np.array([one.action for one in found]), np.array([one.log_prob for one in found])


def exact_gradient() -> np.ndarray:
    """Of Σ_a π(a) A(a) by the scores of a softmax."""
    gradient: np.ndarray = CHANCES * (ADVANTAGE - CHANCES @ ADVANTAGE)
    return gradient


def distance(actions: np.ndarray, log_probs: np.ndarray) -> float:
    """How many standard errors the weighted gradient is from the exact one, in its worst number."""
    weights = CHANCES[actions] / np.exp(log_probs)
    samples = (weights * ADVANTAGE[actions])[:, None] * (np.eye(ACTIONS)[actions] - CHANCES)
    error = samples.std(0) / np.sqrt(len(samples))
    return float(np.abs((samples.mean(0) - exact_gradient()) / error).max())


def test_the_weighted_gradient_is_that_of_the_policy() -> None:
    actions, log_probs = decided(GATE)
    assert distance(actions, log_probs) < 3
    assert distance(actions, np.log(CHANCES[actions])) > 10
    never = Gate(threshold=0.6, explore=0.0, safe=GATE.safe)
    assert distance(*decided(never)) > 10


def test_what_is_done_is_as_likely_as_it_says() -> None:
    gate = Gate(threshold=0.6, explore=0.3, safe=(False, True, True, False, True))
    done = gate.done_with(CHANCES)
    actions, log_probs = decided(gate)
    counted = np.bincount(actions, minlength=ACTIONS) / DRAWS
    assert done.sum() == pytest.approx(1)
    assert done[3] == counted[3] == 0
    assert done[1] == pytest.approx(CHANCES[1])
    assert (np.abs(counted - done) <= 4 * np.sqrt(done * (1 - done) / DRAWS)).all()
    assert np.exp(log_probs) == pytest.approx(done[actions])


def test_it_says_why() -> None:
    assert GATE.decide(CHANCES, 2, 0.5).why == "certainty 0.06 < 0.60"
    assert GATE.decide(CHANCES, 2, 0.5).action == NOTHING
    assert GATE.decide(CHANCES, 2, 0.001).why.endswith("tried as one of 2% of safe goals")
    assert GATE.decide(CHANCES, 1, 0.5).why == "certainty 0.71 ≥ 0.60"
    assert GATE.decide(CHANCES, NOTHING, 0.5).why == "the policy would do nothing"


@pytest.mark.parametrize("wrong", [{"threshold": 1.1}, {"explore": -0.1}, {"threshold": float("nan")}])
def test_what_is_no_probability_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be a probability"):
        Gate(**({"threshold": 0.7, "explore": 0.02} | wrong), safe=(False, True))
