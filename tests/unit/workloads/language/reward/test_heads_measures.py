"""Measures by hand."""

from dataclasses import asdict

import numpy as np
import pytest

from penstock.workloads.language.reward.heads import area_under_curve, measure_heads

NAN = float("nan")


def test_measures_are_of_what_was_said_alone() -> None:
    shares = np.array([[0.9, 0.5], [0.4, 0.5], [0.4, 0.5]])
    targets = np.array([[1.0, NAN], [1.0, NAN], [0.0, 0.25]])
    found = measure_heads(["thumb", "charm"], shares, targets, np.array([2.0, -1.0, 0.0]))
    assert found.heads["thumb"].ratings == 3
    assert found.heads["thumb"].squared_error == pytest.approx((0.01 + 0.36 + 0.16) / 3)
    assert found.heads["thumb"].auc == pytest.approx(0.75)
    assert found.heads["charm"].squared_error == pytest.approx(0.0625)
    assert found.heads["charm"].auc is None
    assert (found.pairs, found.pair_accuracy) == (3, 0.5)
    assert asdict(found)["heads"]["charm"]["ratings"] == 1


def test_an_area_agrees_with_counting_every_pair() -> None:
    rng = np.random.default_rng(0)
    above, below = rng.integers(5, size=40).astype(float), rng.integers(4, size=60).astype(float)
    counted = np.mean([(a > b) + (a == b) / 2 for a in above for b in below])
    assert area_under_curve(above, below) == pytest.approx(float(counted))
    assert area_under_curve(above, below[:0]) is None
