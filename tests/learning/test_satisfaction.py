"""People get what they like: a language model learns it from what they say, and from nothing else.

The long form is what a user does: conversations, ratings of what the base answers, a reward model, PPO as
processes. The short form is one process, with the chance itself as the reward.
"""

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock.workloads.chat.people import LONG, draw_prompt
from tests.learning.small_words import Batch, learned, settings_of
from tests.support.chat.liked_answers import LIKED, OF_OTHERS
from tests.support.chat.opinions import make_people_base
from tests.support.chat.satisfaction import BETA, Pleased, optimum, ppo, prepare, supervised

UPDATES: Final = 24
SHORT_BETA: Final = 0.1
SHORT: Final = {"learning_rate": 2e-3, "critic_learning_rate": 2e-3, "kl_coefficient": SHORT_BETA}
BEGIN: Final = 0.05
"""How far the base may be from the half of thumbs up that the reference has."""
ENOUGH: Final = 0.75


def in_short(base: Path, folder: Path, reward: str) -> list[Batch]:
    """What each update found, in one process."""
    rng = np.random.default_rng(0)
    asked = [draw_prompt(rng) for _ in range(256)]
    return learned(settings_of(base, folder, 0, asked, reward, **SHORT), UPDATES).batches


def satisfaction(batches: list[Batch]) -> float:
    """The mean chance of a thumb up."""
    return (1 + float(np.mean([one.reward for one in batches]))) / 2


def check(found: Pleased) -> None:
    """Liked by most, near what it was, and no better than anything can be."""
    best, kl = optimum(BETA)
    assert found.satisfaction >= ENOUGH
    assert found.kl <= 1.5 * kl
    assert 2 * found.satisfaction - 1 - BETA * found.kl <= 2 * best - 1 - BETA * kl + 0.05
    assert 2 <= found.words <= LONG[1]
    assert found.ended >= 0.95


def test_people_like_more_in_short(tmp_path: Path) -> None:
    base = make_people_base(tmp_path / "base")
    batches = in_short(base, tmp_path, LIKED)
    others = in_short(base, tmp_path, OF_OTHERS)
    print([round(satisfaction([one]), 3) for one in batches], batches[-1].kl, satisfaction(others[-3:]))
    best, kl = optimum(SHORT_BETA)
    assert abs(satisfaction(batches[:2]) - 0.5) <= 0.1
    assert satisfaction(batches[-3:]) >= 0.65
    assert batches[-1].kl <= 1.5 * kl
    assert satisfaction(batches[-3:]) <= best
    assert abs(satisfaction(others[-3:]) - 0.5) <= 0.1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_people_get_what_they_like(tmp_path: Path, seed: int) -> None:
    stage = prepare(tmp_path / "stage", seed)
    began, found = supervised(stage), ppo(stage)
    print(f"{began}\n{found}")
    assert abs(began.satisfaction - optimum(1e6)[0]) <= BEGIN
    check(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_ratings_of_other_answers_teach_nothing(tmp_path: Path, seed: int) -> None:
    found = ppo(prepare(tmp_path / "stage", seed, is_mixed_up=True))
    print(found)
    assert found.satisfaction <= optimum(1e6)[0] + 2 * BEGIN
