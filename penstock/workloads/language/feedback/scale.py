"""Scores of a source's own scale, mapped to [−1, 1].

thumbs      true, 1, "up" → 1;  false, −1, "down" → −1
stars       1 … 5        → (x − 3) / 2
percent     0 … 100      → (x − 50) / 50
LOW:HIGH    low … high   → 2 (x − low) / (high − low) − 1
none        any finite number, as it is
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_THUMBS: Final[dict[str, float]] = {"up": 1.0, "down": -1.0}


@dataclass(frozen=True, slots=True)
class Scale:
    """A declared mapping. name: as it was declared, kept beside what was learned by it."""

    name: str
    to_score: Callable[[Any], float]
    """A raw score, normalised; raises ValueError that says why it is none of this scale."""


def parse_scale(name: str) -> Scale:
    """Return the scale of that name; raises ValueError that lists the names."""
    if name == "thumbs":
        return Scale(name, _thumb)
    if name == "none":
        return Scale(name, _number)
    bounds = {"stars": (1.0, 5.0), "percent": (0.0, 100.0)}.get(name) or _bounds(name)
    return Scale(name, lambda value: _within(value, *bounds, name=name))


def _bounds(name: str) -> tuple[float, float]:
    low, _, high = name.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1]) and bounds[0] < bounds[1]):
        raise ValueError(f"scale={name!r}: use thumbs, stars, percent, LOW:HIGH (such as 0:10), or none")
    return bounds


def _within(value: Any, low: float, high: float, *, name: str) -> float:
    number = _number(value)
    if not low <= number <= high:
        raise ValueError(f"score={number:g} is outside {low:g} to {high:g} (scale {name})")
    return 2 * (number - low) / (high - low) - 1


def _thumb(value: Any) -> float:
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    if isinstance(value, str) and value.lower() in _THUMBS:
        return _THUMBS[value.lower()]
    if isinstance(value, int | float) and value in (1, -1):
        return float(value)
    # A 0 is a thumb down to some and no opinion to others.
    raise ValueError(
        f"score={value!r} is no thumb: use true, false, 1, -1, up or down (for 0 and 1 scale 0:1)"
    )


def _number(value: Any) -> float:
    if value is None:
        raise ValueError("no score")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"score={value!r} is {type(value).__name__}, not a number")  # noqa: TRY004
    if not math.isfinite(value):
        raise ValueError(f"score={value} is not finite")
    return float(value)
