"""Scores of a source's own scale, as numbers from −1 to 1."""

import math
from typing import Any

import pytest

from penstock.workloads.language.feedback import parse_scale


@pytest.mark.parametrize(
    ("name", "raw", "score"),
    [
        ("thumbs", True, 1.0), ("thumbs", False, -1.0), ("thumbs", 1, 1.0), ("thumbs", -1, -1.0),
        ("thumbs", "up", 1.0), ("thumbs", "Down", -1.0),
        ("stars", 1, -1.0), ("stars", 3, 0.0), ("stars", 4.5, 0.75), ("stars", 5, 1.0),
        ("percent", 0, -1.0), ("percent", 50, 0.0), ("percent", 100, 1.0),
        ("0:10", 2.5, -0.5), ("-2:2", 2, 1.0), ("0:1", 0, -1.0),
        ("none", -1.0, -1.0), ("none", 0.0, 0.0), ("none", 17, 17.0),
    ],
)  # fmt: skip
def test_a_score_is_mapped_as_declared(name: str, raw: Any, score: float) -> None:
    assert score == parse_scale(name).to_score(raw)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("thumbs", 0, "scale 0:1"),
        ("thumbs", 2, "no thumb"),
        ("thumbs", None, "no thumb"),
        ("stars", 6, "outside 1 to 5"),
        ("stars", 0, "outside 1 to 5"),
        ("stars", True, "is bool, not a number"),
        ("stars", "4", "is str, not a number"),
        ("percent", math.nan, "not finite"),
        ("none", math.inf, "not finite"),
        ("none", None, "no score"),
    ],
)
def test_what_is_none_of_the_scale_is_refused(name: str, raw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_scale(name).to_score(raw)


@pytest.mark.parametrize("name", ["", "starz", "5:1", "1:1", "a:b", "0:inf"])
def test_an_unknown_scale_is_told_the_names(name: str) -> None:
    with pytest.raises(ValueError, match="use thumbs, stars, percent, LOW:HIGH"):
        parse_scale(name)
