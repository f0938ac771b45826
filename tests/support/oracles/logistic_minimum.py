"""What is true at the minimum of a logistic regression with a ridge, in plain Python: each slope is 0."""

import math
from collections.abc import Sequence
from typing import Any


def check_minimum(
    inputs: Any, shares: Any, ridge: Sequence[float] | Any, towards: Sequence[float] | Any, found: Any
) -> None:
    chances = []
    for row in inputs:
        score = math.fsum(float(one) * float(weight) for one, weight in zip(row, found, strict=True))
        small = math.exp(-abs(score))
        chances.append(1 / (1 + small) if score >= 0 else small / (1 + small))
    for place, weight in enumerate(found):
        column = [float(row[place]) for row in inputs]
        pull = float(ridge[place]) * (float(weight) - float(towards[place]))
        parts = [
            one * (chance - float(share)) for one, chance, share in zip(column, chances, shares, strict=True)
        ]
        size = max(math.fsum(map(abs, column)), 1.0)
        assert abs(math.fsum([*parts, pull])) <= 1e-6 * size, (place, list(found))
