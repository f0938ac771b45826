"""Returns as people read them."""

import math

import pytest

from penstock.launch.inspection.curve import shown


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [(499.04, None, "499.0"), (-250.0, None, "-250.0"), (0.61234, None, "0.612"), (None, None, "–"),
     (math.nan, None, "–"), (2.04, 499.0, "2.0"), (0.2, 0.6, "0.200")],
)  # fmt: skip
def test_small_returns_have_more_decimals(value: float | None, like: float | None, text: str) -> None:
    assert shown(value, like) == text
