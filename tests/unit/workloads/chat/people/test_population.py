"""Who rates what: liars say the opposite, one floods, and what is said comes late."""

from collections import Counter

import numpy as np
import pytest

from penstock.workloads.chat.people import Person, draw_prompt, draw_response, population
from tests.support.chat.opinions import CRITERIA, DELAY_S, FLOODER, feedback, flood, prefers_first, rate


def test_kinds_are_equally_many_and_few_lie() -> None:
    people = population(60, seed=7).people
    assert set(Counter(one.kind for one in people).values()) == {20}
    assert sum(one.is_liar for one in people) == 3
    assert people == population(60, seed=7).people
    with pytest.raises(ValueError, match="count=0: a population has at least one person"):
        population(0, seed=0)


def test_a_liar_says_the_opposite_with_the_same_chance() -> None:
    people = population(3, seed=0)
    honest, liar = Person("a", 1, is_liar=False), Person("b", 1, is_liar=True)
    for seed in range(200):
        prompt = draw_prompt(np.random.default_rng(seed))
        one, two = (draw_response(np.random.default_rng(seed + more), prompt) for more in (1, 1000))
        told = []
        for person in (honest, liar):
            rng = np.random.default_rng(seed)
            told.append(
                (
                    people.thumb(rng, person, prompt, one),
                    rate(rng, person, CRITERIA[0], prompt, one),
                    prefers_first(people, rng, person, prompt, one, two),
                )
            )
        assert told[1] == (not told[0][0], 6 - told[0][1], not told[0][2])


def test_rows_are_those_of_feedback_files() -> None:
    people, rng = population(20, seed=0), np.random.default_rng(0)
    rows = list(feedback(people, rng, rated=300, compared=100))
    keys = Counter(row.get("key") for row in rows)
    assert keys["thumb"] == 300
    assert keys[None] == 100
    assert all(130 < keys[one.name] < 230 for one in CRITERIA)
    assert all(row["chosen"] != row["rejected"] for row in rows if "chosen" in row)
    late = [row["at_s"] for row in rows]
    assert DELAY_S[0] <= min(late) < 600
    assert 86_400 < max(late) <= DELAY_S[1]


def test_a_flood_is_of_one_rater() -> None:
    rows = list(flood("how soil rose", "seed"))
    assert len(rows) == 500
    assert {row["rater"] for row in rows} == {FLOODER}
    assert not any(row["score"] for row in rows)
