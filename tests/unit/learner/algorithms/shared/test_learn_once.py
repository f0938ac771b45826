"""Minibatches of a flush have the steps of any other."""

from dataclasses import replace

import pytest

from penstock.config.settings import PPOSection
from penstock.learner.algorithms.ppo import PPO
from tests.support.experience.experience import collect, small_policy


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, 1), (25, 1), (26, 2), (50, 2), (75, 3), (99, 4), (100, 4)]
)
def test_a_flush_has_as_many_minibatches_as_it_fills(steps: int, expected: int) -> None:
    algorithm = PPO(small_policy(0), PPOSection(batch_steps=100, minibatches=4), seed=0)
    batch = collect(small_policy(1))
    assert algorithm.minibatches(replace(batch, is_flushed=True), steps) == expected
    assert algorithm.minibatches(batch, steps) == 4


def test_an_update_of_a_flush_makes_fewer_gradient_steps() -> None:
    batch = collect(small_policy(1))
    steps = int(batch.valid.sum())
    section = PPOSection(batch_steps=2 * steps, minibatches=4, epochs=3)
    for is_flushed, count in ((True, 2), (False, 4)):
        algorithm = PPO(small_policy(0), section, seed=0)
        update = algorithm.update(replace(batch, is_flushed=is_flushed), progress=0.0)
        assert update.gradient_steps == 3 * count
