"""What of people's ratings counts: floods, repetitions, liars, and people who are gone."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.people import (
    THUMB,
    USUAL,
    Population,
    draw_prompt,
    draw_response,
    population,
    read_profile,
)
from penstock.workloads.chat.ratings import DAY_S, RatingRules, Reason, filter_ratings
from tests.support.chat.opinions import FEATURES, FLOODER, PROFILES, flood

RULES = RatingRules()
CHANCES = dict(zip(PROFILES, USUAL.thumb_chance(FEATURES), strict=True))


def row(rater: str = "ann", **fields: Any) -> dict[str, Any]:
    """A thumb up."""
    return {"prompt": "a", "response": "b", "key": THUMB, "score": True, "rater": rater, **fields}


def thumbs(people: Population, seed: int, each: int, responses: int) -> list[dict[str, Any]]:
    """Of every person for so many of the responses, in the order of a day."""
    rng = np.random.default_rng(seed)
    prompts = [draw_prompt(rng) for _ in range(responses)]
    known = [(prompt, draw_response(rng, prompt)) for prompt in prompts]
    rows = []
    for person in people.people:
        for number in rng.choice(responses, each, replace=False):
            prompt, response = known[number]
            up = people.thumb(rng, person, prompt, response)
            rows.append(row(person.name, prompt=prompt, response=response, score=up))
    return [rows[number] for number in rng.permutation(len(rows))]


def expected(one: Any) -> float:
    """The true chance of a thumb."""
    return float(CHANCES[read_profile(one["prompt"], one["response"])])


def test_a_flood_counts_as_one_vote() -> None:
    others = [row(f"person-{number}", at_s=float(number)) for number in range(20)]
    found = filter_ratings([*others, *flood("a", "b")], RULES)
    assert found.dropped == {Reason.REPEATED: 499}
    assert found.raters == {FLOODER: Counter({Reason.REPEATED: 499})}
    assert sum(one["score"] for one in found.kept) == 20
    assert len(found.kept) == 21


def test_the_newest_of_the_same_counts() -> None:
    found = filter_ratings(
        [
            row(at_s=9.0, score=False),
            row(at_s=5.0),
            row(key="relevance", score=3),
            row("bob"),
            row(response=None, chosen="x", rejected="y"),
            row(response=None, chosen="y", rejected="x"),
        ],
        RULES,
    )
    assert found.dropped == {Reason.REPEATED: 2}
    assert found.kept[0]["score"] is False
    assert found.kept[-1]["chosen"] == "y"
    assert len(found.kept) == 4


def test_what_a_registry_numbers_is_newer_by_its_number() -> None:
    earlier, later = row(at_s=9.0, number=1), row(at_s=5.0, number=2, score=False)
    for rows in ([earlier, later], [later, earlier], [{**later, "at_s": 9.0}, earlier]):
        assert [one["number"] for one in filter_ratings(rows, RULES).kept] == [2]
    (kept,) = filter_ratings([earlier, {**later, "number": 1}], RULES).kept
    assert kept["at_s"] == 9.0
    (kept,) = filter_ratings([earlier, row(at_s=5.0)], RULES).kept
    assert kept["at_s"] == 9.0


def test_a_clock_that_was_ahead_takes_no_ratings_of_the_days_after() -> None:
    rules = RatingRules(daily_cap=2)
    ahead = [row(response=f"ahead-{number}", at_s=9 * DAY_S, number=number) for number in range(3)]
    after = [row(response=f"after-{number}", at_s=DAY_S, number=3 + number) for number in range(3)]
    found = filter_ratings([*ahead, *after], rules)
    assert [one["number"] for one in found.kept] == [0, 1, 3, 4]


def test_a_person_has_so_many_in_a_day() -> None:
    rules = RatingRules(daily_cap=3)
    rows = [row(response=str(number), at_s=float(number)) for number in range(5)]
    late = row(response="late", at_s=DAY_S + 1.5)
    found = filter_ratings([*rows, late], rules)
    assert [one["response"] for one in found.kept] == ["0", "1", "2", "late"]
    assert found.dropped == {Reason.OVER_CAP: 2}


def test_who_is_gone_is_gone_and_who_has_no_name_is_counted() -> None:
    found = filter_ratings([row(), row("bob"), row(""), row("")], RULES, deleted={"bob"})
    assert found.dropped == {Reason.DELETED: 1}
    assert found.unnamed == 2
    assert [one["rater"] for one in found.kept] == ["ann", "", ""]


@pytest.mark.parametrize("by", ["others", "chance"])
def test_liars_are_found_by_what_others_say(by: str) -> None:
    lying, caught, accused = 0, 0, 0
    for seed in range(5):
        people = population(60, seed=seed)
        liars = {one.name for one in people.people if one.is_liar}
        rows = thumbs(people, seed, each=80, responses=100)
        found = filter_ratings(rows, RULES, expected=expected if by == "chance" else None)
        lying += len(liars)
        caught += len(liars & found.evidence.keys())
        accused += len(found.evidence.keys() - liars)
        assert not {one["rater"] for one in found.kept} & found.evidence.keys()
        assert found.dropped[Reason.LIAR] == 80 * len(found.evidence)
    assert lying == 15
    assert caught >= 10, (caught, accused)
    assert accused <= 2, (caught, accused)


def test_a_few_thumbs_judge_no_rater() -> None:
    rows = [row("ann", response=str(number), score=False) for number in range(9)]
    agreed = [row(f"person-{other}", response=str(number)) for other in range(30) for number in range(9)]
    assert filter_ratings([*rows, *agreed], RULES).evidence == {}
    alone = [row("ann", response=str(number), score=number % 2 == 0) for number in range(150)]
    assert filter_ratings(alone, RULES).evidence == {}


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"daily_cap": 0}, "daily_cap=0: must be at least 1"),
        ({"false_alarms": 1.0}, "false_alarms=1.0: must lie between 0 and 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(numbers: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RatingRules(**numbers)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf"), 10**400])
def test_a_time_that_is_no_number_of_seconds_is_none(time: float) -> None:
    found = filter_ratings([row(at_s=time)], RULES)
    assert (len(found.kept), found.dropped) == (1, Counter())
    found = filter_ratings([row(at_s=time), row(score=False)], RULES)
    assert [one["score"] for one in found.kept] == [False]
