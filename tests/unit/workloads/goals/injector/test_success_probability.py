"""The probability of success fits what happens, where the policy's own certainty does not."""

import math

import numpy as np
import pytest

from penstock.workloads.goals.injection_journal import LAST, fit_success, reliability


def outcomes(count: int, seed: int = 0) -> tuple[list[float], list[bool]]:
    """Goals of an overconfident policy: success = σ(−0.5 + 0.6 logit π)."""
    random = np.random.default_rng(seed)
    certainty = random.uniform(0.3, 0.99, count)
    chance = 1 / (1 + np.exp(0.5 - 0.6 * np.log(certainty / (1 - certainty))))
    return certainty.tolist(), (random.random(count) < chance).tolist()


def test_it_is_calibrated_on_outcomes_that_it_has_not_seen() -> None:
    fit = fit_success(*outcomes(LAST, seed=1))
    certainty, success = outcomes(LAST, seed=2)
    fitted = reliability([fit.at(one) for one in certainty], success)
    plain = reliability(certainty, success)
    assert fitted is not None
    assert plain is not None
    assert fitted["gap"] < 0.1 < plain["gap"]
    assert fitted["brier"] < plain["brier"]


def test_only_the_last_outcomes_count() -> None:
    certainty, success = outcomes(LAST)
    assert fit_success([0.5] * 300 + certainty, [False] * 300 + success) == fit_success(certainty, success)


def test_few_outcomes_are_a_rate() -> None:
    assert fit_success([], []).at(0.9) == pytest.approx(0.5)
    assert fit_success([0.9] * 3, [True] * 3).at(0.1) == pytest.approx(4 / 5)
    always = fit_success([0.0, 1.0] * 30, [True] * 60)
    assert 0.9 < always.at(1.0) < 1
    assert math.isfinite(always.slope)
    assert reliability([0.5] * 19, [True] * 19) is None
