"""How a reward model is judged, on numbers that can be checked by hand."""

from dataclasses import asdict

import numpy as np
import pytest

from penstock.workloads.language.feedback import Preference, Scored
from penstock.workloads.language.reward.heads import (
    Measures,
    doubt,
    expected_calibration_error,
    measure,
)


def scored(score: float, prompt: str = "p") -> Scored:
    """An example of that score."""
    return Scored(prompt=prompt, response="r", score=score, where="")


PAIR = Preference(prompt="p", chosen="a", rejected="b", where="")


def test_scores() -> None:
    found = measure([scored(1.0), scored(-1.0, "q")], [(0.5,), (0.0,)])
    assert (0.625, 0.75) == (found.mse, found.mae)
    assert (4.0, -1.0) == pytest.approx((found.slope, found.intercept))
    assert (2, 0, None, None) == (found.scored, found.pairs, found.pair_accuracy, found.calibration_error)


def test_pairs_given_and_pairs_of_one_prompt() -> None:
    assert 0.5 == measure([PAIR] * 3, [(1.0, 0.0), (0.0, 1.0), (2.0, 2.0)]).pair_accuracy
    found = measure([scored(1.0), scored(1.0), scored(0.0)], [(3.0,), (1.0,), (2.0,)])
    assert (2, 0.5) == (found.pairs, found.pair_accuracy)


@pytest.mark.parametrize(("pairs", "accuracy"), [(100, 0.6), (100, 0.3), (400, 0.54)])
def test_what_chance_gives_as_well_is_doubted(pairs: int, accuracy: float) -> None:
    said = doubt(asdict(Measures(pairs=pairs, pair_accuracy=accuracy)))
    assert f"pair_accuracy {accuracy} of {pairs} pairs" in said
    assert ("± 0.05" if pairs == 400 else "± 0.1") in said


@pytest.mark.parametrize(("pairs", "accuracy"), [(100, 0.61), (400, 0.56), (5, 1.0), (0, None)])
def test_what_chance_does_not_give_is_not_doubted(pairs: int, accuracy: float | None) -> None:
    assert not doubt(asdict(Measures(pairs=pairs, pair_accuracy=accuracy)))
    assert not doubt(None)


def test_nothing_to_measure_is_none() -> None:
    assert Measures() == measure([], [])
    assert measure([scored(1.0), scored(0.0)], [(2.0,), (2.0,)]).slope is None


def test_a_calibrated_model_has_no_calibration_error() -> None:
    margin = np.log(3)
    assert expected_calibration_error(np.array([margin] * 3 + [-margin])) == pytest.approx(0, abs=1e-12)
    assert expected_calibration_error(np.array([50.0] * 3 + [-50.0])) == pytest.approx(0.25)
