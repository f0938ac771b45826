from functools import cache
from itertools import product

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
from penstock.workloads.goals.host import (
    ACTIONS,
    HEALTHY,
    STATES,
    GoalReward,
    Outcome,
    SimulatedHost,
    host_model,
)
from penstock.workloads.prompts.categories import QualityReward
from penstock.workloads.prompts.features import mutate
from penstock.workloads.prompts.task_parts import PromptSource
from tests.support.chat.opinions import CRITERIA, FEATURES, PROFILES, opinions, profile_chances
from tests.support.chat.satisfaction import (
    ceilings,
    expected_auc,
    expected_pair_accuracy,
    expected_rating,
    tilted,
)
from tests.support.prompts.judged_prompts import text_graph
from tests.support.serving.goals_run import optimum

EPISODES = 400
STEPS = 50


def test_the_tables_are_probabilities() -> None:
    model = host_model()
    assert len(STATES) == 72
    assert np.allclose(model.arrivals.sum(1), 1)
    assert ((model.success >= 0) & (model.success <= 1)).all()
    assert (model.arrivals >= 0).all()
    assert (model.success[0] == 0).all(), "doing nothing mends nothing"


def test_the_optimum_equals_a_search_through_all_futures() -> None:
    reward, model = GoalReward(), host_model()

    @cache
    def best(state: int, left: int) -> float:
        return max(worth(action, state, left) for action in range(len(ACTIONS))) if left else 0.0

    def worth(action: int, state: int, left: int) -> float:
        chance, took_s = model.success[action, state], model.took_s[action, state]
        total = 0.0
        for success, weight in ((True, chance), (False, 1 - chance)):
            earned = reward.of(Outcome(success=success, took_s=took_s) if action else None)
            mended = model.mended[action, state] if success else state
            after = sum(one * best(to, left - 1) for to, one in enumerate(model.arrivals[mended]) if one > 0)
            total += weight * (earned + after)
        return float(total)

    assert optimum(3, reward).value == pytest.approx(best(STATES.index(HEALTHY), 3), rel=1e-9)


def test_the_optimal_policy_earns_the_optimum() -> None:
    found = optimum(STEPS, GoalReward())
    mean, error = play(found.policy)
    assert abs(mean - found.value) < 4 * error
    random = np.random.default_rng(0).integers(len(ACTIONS), size=(STEPS, len(STATES)))
    for other in (random, np.zeros_like(random), np.ones_like(random)):
        assert play(other)[0] < 0.3 * found.value


def play(policy: np.ndarray) -> tuple[float, float]:
    """Mean return and its standard error; policy: the action by step and state."""
    host, reward, returns = SimulatedHost(), GoalReward(), []
    for seed in range(EPISODES):
        host.reset(seed)
        earned = 0.0
        for step in range(STEPS):
            action = int(policy[step, STATES.index(host.state)])
            if action == 0:
                host.idle()
                earned += reward.of(None)
            else:
                outcome = host.carry_out(ACTIONS[action])
                earned += reward.of(outcome)
        returns.append(earned)
    return float(np.mean(returns)), float(np.std(returns) / np.sqrt(EPISODES))


REWARD = QualityReward()


def test_the_optimum_is_the_best_of_all_paths() -> None:
    random, source = np.random.default_rng(5), PromptSource()
    for _ in range(5):
        graph = text_graph(source.draw(random)[0], REWARD)
        earned = [graph.followed(way) for way in product(range(5), repeat=5)]
        assert len(graph.texts) <= 32
        assert graph.optimum(5) == pytest.approx(max(earned))
        assert graph.expected(5) == pytest.approx(sum(earned) / len(earned))


def test_a_path_through_the_graph_earns_what_its_texts_earn() -> None:
    start = text = "Please, write a Python script."
    graph, total = text_graph(start, REWARD), 0.0
    policy = np.zeros((len(graph.texts), 5))
    for action in (4, 2, 1, 3, 0):
        after = mutate(text, action)
        total += REWARD.of(start, text, after)
        policy[graph.texts.index(text), action] = 1.0
        text = after
    assert graph.followed((4, 2, 1, 3, 0)) == pytest.approx(total)
    assert graph.expected(5, policy) == pytest.approx(total)


TASTES = pytest.mark.parametrize("taste", [USUAL, CHANGED], ids=["usual", "changed"])


@TASTES
def test_half_of_the_references_answers_are_liked(taste: Taste) -> None:
    liked = taste.thumb_chance(FEATURES)
    assert float(profile_chances(REFERENCE) @ liked) == pytest.approx(0.5, abs=0.02)
    assert liked.max() > 0.87


def test_a_changed_taste_makes_the_old_best_no_better_than_the_reference() -> None:
    best = tilted(profile_chances(REFERENCE), USUAL.thumb_chance(FEATURES), 0.1)
    assert best @ USUAL.thumb_chance(FEATURES) > 0.75
    assert best @ CHANGED.thumb_chance(FEATURES) < 0.55


@TASTES
def test_drawn_opinions_average_to_the_expected_ratings(taste: Taste) -> None:
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


def test_the_area_under_the_curve_without_knowledge_is_a_half() -> None:
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
