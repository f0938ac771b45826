"""A head's numbers become the share of people who say yes."""

import numpy as np
import pytest

from penstock.workloads.language.reward.heads import LEAST, Calibration, calibrate, measure_head


def test_it_finds_the_line_that_made_the_answers() -> None:
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal(20_000)
    said = (rng.random(20_000) < 1 / (1 + np.exp(-(0.5 * logits - 1)))).astype(np.float64)
    said[rng.random(20_000) < 0.3] = np.nan
    found = calibrate(logits, said)
    assert (found.slope, found.shift) == pytest.approx((0.5, -1.0), abs=0.06)
    assert (measure_head(found.share(logits), said).calibration_error or 1) < 0.02
    assert (measure_head(Calibration().share(logits), said).calibration_error or 0) > 0.1


def test_shares_between_no_and_yes_are_met_in_the_middle() -> None:
    found = calibrate(np.random.default_rng(1).standard_normal(500), np.full(500, 0.7))
    assert found.share(np.array([-1.0, 0.0, 1.0])) == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize("how", ["few", "turned", "certain"])
def test_it_leaves_alone_what_it_cannot_judge(how: str) -> None:
    logits = np.linspace(-2, 2, 200)
    said = (logits > 0).astype(np.float64)
    if how == "few":
        assert calibrate(logits[: LEAST - 1], said[: LEAST - 1]) == Calibration()
    elif how == "turned":
        assert calibrate(logits, 1 - said) == Calibration()
    else:
        found = calibrate(logits, said)
        assert found.slope > 1
        assert np.isfinite([found.slope, found.shift]).all()
