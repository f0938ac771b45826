"""Prompts with eight candidates each, and the best policy among them."""

import numpy as np
import pytest

from penstock.workloads.chat.people import CHANGED, USUAL, read_profile
from penstock.workloads.chat.tasks import CANDIDATES, PROMPTS, liked, questions
from tests.support.chat.ceilings import best_policy, total_variation


def test_every_prompt_has_eight_different_responses() -> None:
    assert len(questions()) == PROMPTS
    for one in questions():
        assert len(set(one.candidates)) == CANDIDATES
        for features, response in zip(one.features, one.candidates, strict=True):
            assert tuple(features) == read_profile(one.prompt, response)
    assert len({one.features.tobytes() for one in questions()}) == PROMPTS


def test_there_is_something_to_learn() -> None:
    usual, changed = liked(USUAL), liked(CHANGED)
    assert usual.shape == (PROMPTS, CANDIDATES)
    best = best_policy(usual, 0.1)
    assert best.sum(1) == pytest.approx(1)
    assert (best * usual).sum(1).mean() - usual.mean() > 0.2
    assert (best * changed).sum(1).mean() < (best_policy(changed, 0.1) * changed).sum(1).mean() - 0.2


def test_a_heavy_weight_keeps_the_policy_even() -> None:
    usual, even = liked(USUAL), np.full((PROMPTS, CANDIDATES), 1 / CANDIDATES)
    assert total_variation(best_policy(usual, 100.0), even).max() < 0.01
    alone = np.eye(CANDIDATES)[usual.argmax(1)]
    assert total_variation(best_policy(usual, 1e-4), alone).mean() < 0.1
    assert total_variation(alone, np.roll(alone, 1, axis=1)) == pytest.approx(1)
