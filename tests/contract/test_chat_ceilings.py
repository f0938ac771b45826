"""Ceilings by the definition, beside what drawn opinions give, and rules that cannot pass them."""

import numpy as np
import pytest

from penstock.workloads.chat.people import (
    CHANGED,
    REFERENCE,
    THUMB,
    USUAL,
    Taste,
    draw_prompt,
    draw_response,
    population,
    read_profile,
)
from tests.support.chat.ceilings import (
    ceilings,
    expected_auc,
    expected_pair_accuracy,
    expected_rating,
    tilted,
)
from tests.support.chat.opinions import CRITERIA, FEATURES, PROFILES, opinions, profile_chances

TASTES = pytest.mark.parametrize("taste", [USUAL, CHANGED], ids=["usual", "changed"])


@TASTES
def test_half_of_what_the_reference_says_is_liked(taste: Taste) -> None:
    liked = taste.thumb_chance(FEATURES)
    assert float(profile_chances(REFERENCE) @ liked) == pytest.approx(0.5, abs=0.02)
    assert liked.max() > 0.87


def test_a_changed_taste_makes_the_old_best_no_better_than_the_reference() -> None:
    best = tilted(profile_chances(REFERENCE), USUAL.thumb_chance(FEATURES), 0.1)
    assert best @ USUAL.thumb_chance(FEATURES) > 0.75
    assert best @ CHANGED.thumb_chance(FEATURES) < 0.55


@TASTES
def test_drawn_opinions_have_the_chances_that_the_ceilings_are_of(taste: Taste) -> None:
    people, rng = population(60, seed=0, taste=taste), np.random.default_rng(3)
    expected = {one.name: expected_rating(taste, one, FEATURES)[0] for one in CRITERIA}
    expected[THUMB] = taste.thumb_chance(FEATURES)
    said: dict[str, list[tuple[float, float]]] = {}
    for _ in range(4000):
        prompt = draw_prompt(rng)
        response = draw_response(rng, prompt)
        number = PROFILES.index(read_profile(prompt, response))
        for row in opinions(people, rng, people.somebody(rng), prompt, response):
            score = float(row["score"]) if row["key"] == THUMB else (row["score"] - 1) / 4
            said.setdefault(row["key"], []).append((score, expected[row["key"]][number]))
    assert len(said[THUMB]) == 4000
    for key, both in said.items():
        found, expected_mean = np.mean(both, 0)
        assert found == pytest.approx(expected_mean, abs=0.03), key
        if key != THUMB:
            assert len(both) == pytest.approx(0.6 * 4000, abs=150)
            errors = np.diff(np.array(both))[:, 0] ** 2
            assert errors.mean() == pytest.approx(ceilings(taste).squared_error[key], abs=0.004)


@TASTES
def test_no_order_of_profiles_passes_the_ceilings(taste: Taste) -> None:
    top, thumbs, rng = ceilings(taste), taste.thumb_chance(FEATURES), np.random.default_rng(4)
    assert 0.7 < top.auc < 0.85
    assert 0.7 < top.pair_accuracy < 0.8
    rivals = [rng.random(64), *FEATURES.T, USUAL.thumb_chance(FEATURES), CHANGED.thumb_chance(FEATURES)]
    weights = profile_chances(REFERENCE)
    assert max(expected_auc(one, thumbs, weights) for one in rivals) <= top.auc + 1e-12
    best = expected_pair_accuracy(taste, thumbs, FEATURES)
    assert all(expected_pair_accuracy(taste, one, FEATURES)[0] <= best[1] for one in rivals)
    assert best[0] == pytest.approx(best[1], abs=0.01)


def test_an_area_without_knowledge_is_a_half() -> None:
    thumbs = USUAL.thumb_chance(FEATURES)
    assert expected_auc(np.zeros(64), thumbs) == pytest.approx(0.5)
    up, down = expected_auc(thumbs, thumbs), expected_auc(-thumbs, thumbs)
    assert up + down == pytest.approx(1)


def test_the_tilted_policy_is_the_best_of_many() -> None:
    reference, rewards, rng = (
        profile_chances(REFERENCE),
        USUAL.thumb_chance(FEATURES),
        np.random.default_rng(5),
    )

    def worth(policy: np.ndarray, beta: float) -> float:
        return float(policy @ rewards - beta * (policy @ np.log(policy / reference)))

    for beta in (0.1, 0.5, 1.0):
        best = tilted(reference, rewards, beta)
        assert best.sum() == pytest.approx(1)
        for _ in range(50):
            near = best * np.exp(0.1 * rng.standard_normal(64))
            assert worth(near / near.sum(), beta) < worth(best, beta)
