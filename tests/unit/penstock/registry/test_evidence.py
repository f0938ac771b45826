"""Evidence is a fair game's capital: its mean stays 1, it is rarely large, and it never tires."""

import itertools
import math
from functools import reduce

import pytest

from penstock.registry.canary import BETS, NONE, Evidence


def after(*gains: float) -> Evidence:
    """The evidence of these gains."""
    return reduce(Evidence.bet, gains, NONE)


def by_equation(gains: list[float]) -> float:
    """M_t, as it is written."""
    count = len(gains)
    started = sum(
        1 / (j * (j + 1)) * math.prod(1 + bet * gain for gain in gains[j - 1 :])
        for bet in BETS
        for j in range(1, count + 1)
    )
    return started / len(BETS) + 1 / (count + 1)


def test_the_code_computes_what_the_equation_says() -> None:
    gains = [0.5, -1.0, 0.25, 200.0, -0.1, 0.0, 1.0]
    for count in range(len(gains) + 1):
        assert math.isclose(after(*gains[:count]).value, by_equation(gains[:count]), rel_tol=1e-12)


@pytest.mark.promise("canary-equals-active-version")
@pytest.mark.parametrize(("win", "chance"), [(1.0, 0.5), (9.0, 0.1), (1 / 9, 0.9)])
def test_fair_bets_leave_its_mean_at_one_and_make_it_rarely_large(win: float, chance: float) -> None:
    mean, largest = 0.0, {2.0: 0.0, 5.0: 0.0, 20.0: 0.0}
    for sequence in itertools.product((True, False), repeat=10):
        probability = math.prod(chance if won else 1 - chance for won in sequence)
        path = list(
            itertools.accumulate((win if won else -1.0 for won in sequence), Evidence.bet, initial=NONE)
        )
        mean += probability * path[-1].value
        for level in largest:
            largest[level] += probability * (max(each.value for each in path) >= level)
    # A loss of 1 and a gain of (1 - chance) / chance are fair.
    assert math.isclose(win * chance, 1 - chance)
    assert math.isclose(mean, 1.0, rel_tol=1e-9)
    assert all(share <= 1 / level for level, share in largest.items())


def test_it_finds_what_goes_wrong_after_a_long_time() -> None:
    tired, fresh = NONE, NONE
    for _ in range(100_000):
        tired = tired.bet(-0.5)
    needed = {"tired": 0, "fresh": 0}
    while tired.value < 100.0:
        tired, needed["tired"] = tired.bet(1.0), needed["tired"] + 1
    while fresh.value < 100.0:
        fresh, needed["fresh"] = fresh.bet(1.0), needed["fresh"] + 1
    assert needed["fresh"] < 15
    assert needed["tired"] < needed["fresh"] + 50


def test_no_gain_makes_it_infinite_and_no_loss_is_below_the_stake() -> None:
    assert math.isfinite(after(*[1e200] * 5).value)
    for gain in (-1.01, math.nan):
        with pytest.raises(ValueError, match="gain="):
            NONE.bet(gain)
