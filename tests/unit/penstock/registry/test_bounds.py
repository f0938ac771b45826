"""What a server cannot have seen is refused by name."""

from typing import Any

import pytest

from penstock.registry.canary import ClientReturn, Window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": float("nan")}, "value=nan"),
        ({"part": 0.0}, "part=0.0"),
        ({"part": 1.0}, "part=1.0"),
        ({"level": 3}, "level=3"),
    ],
)
def test_a_return_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"client": "", "level": 0, "canary": True, "part": 0.5, "value": 0.0}
    with pytest.raises(ValueError, match=message):
        ClientReturn(**fields | change)


@pytest.mark.parametrize(
    "fields",
    [
        {"answers": 0},
        {"answers": 1, "failed": 2},
        {"answers": 2, "failed": 1, "not_finite": 2},
        {"answers": 1, "slower": 1.5},
        {"answers": 1, "slower": float("nan")},
    ],
)
def test_a_window_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Window(**fields)
