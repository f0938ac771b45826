"""Format returns for people: one decimal where they are hundreds, three where they are between −1 and 1."""

import math
from typing import Final

_SMALL: Final = 10.0


def shown(value: float | None, like: float | None = None) -> str:
    """Return a return as text, or with `like` a spread of returns around that one; "–" for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    digits = 3 if abs(value if like is None else like) < _SMALL else 1
    return f"{value:.{digits}f}"
