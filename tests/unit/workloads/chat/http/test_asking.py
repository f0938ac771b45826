"""Somebody is asked about one answer in five, those of which least is known."""

import random

from penstock.workloads.chat.http.chat_api import LEAST, RatingRequests


def test_one_in_five_is_asked_about_and_they_are_the_least_sure() -> None:
    draw, asking = random.Random(1), RatingRequests()
    seen = [(one, asking.is_wanted(one)) for one in (draw.gauss(0.2, 0.05) for _ in range(1000))]
    assert not any(is_asked for _, is_asked in seen[:LEAST])
    asked, others = ([one for one, given in seen[LEAST:] if given is wanted] for wanted in (True, False))
    assert 0.15 < len(asked) / len(seen) < 0.25
    assert sorted(asked)[len(asked) // 10] > sorted(others)[9 * len(others) // 10]


def test_nobody_is_asked_where_nothing_is_known() -> None:
    asking = RatingRequests()
    assert not any(asking.is_wanted(None) for _ in range(100))
    assert not any(asking.is_wanted(0.1) for _ in range(100))
