"""Every algorithm learns a task whose reward comes late, in seconds, from experience that lags behind."""

from collections import deque
from typing import Any, Final

import numpy as np
import pytest
import torch

from penstock.config.settings import load
from penstock.learner.algorithms.registry import ALGORITHMS
from penstock.learner.batch import assemble
from penstock.policy.weights import encode, load_into
from penstock.protocol.tensor import Array
from tests.support.experience.experience import Collector, small_policy

LENGTH, LIMIT, LAG, UPDATES = 5, 30, 2, 60
OPTIMUM: Final = 1 / LENGTH


class Corridor:
    """Reward 1 at the end of a corridor of LENGTH steps, where the episode terminates; 0 on the way and back.

    A policy that tosses a coin gets about 0.035 per step.
    """

    def __init__(self) -> None:
        self._place = self._step = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """To its beginning."""
        self._place = self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """1: forwards, 0: backwards."""
        self._step += 1
        self._place = max(0, self._place + (1 if action else -1))
        done = self._place == LENGTH
        return self._observe(), float(done), done, self._step == LIMIT and not done, {}

    def _observe(self) -> Array:
        return np.array([self._place / LENGTH, 1.0, self._place % 2, 0.0], np.float32)


NUMBERS: dict[str, dict[str, Any]] = {
    "ppo": {"learning_rate": 3e-3},
    "impala": {"learning_rate": 1e-2, "entropy_coefficient": 0.003},
    "reinforce": {"learning_rate": 1e-2, "entropy_coefficient": 0.003},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_late_reward_is_learned_from_lagging_experience(name: str, seed: int) -> None:
    section = load([{"algorithm": {"name": name, "discount": 0.95, **NUMBERS[name]}}]).algorithm
    algorithm = ALGORITHMS[name](small_policy(seed), section, seed=seed)
    behaviour = small_policy(seed)
    behaviour.seed_actions(seed)
    collector = Collector([Corridor() for _ in range(8)])
    waiting = deque([encode(algorithm.published_modules()["default"])], maxlen=LAG + 1)
    rates = []
    for _ in range(UPDATES):
        load_into(behaviour, waiting[0])
        batch = assemble([collector.fragment(behaviour, 32)], torch.device("cpu"))
        rates.append(float(batch.reward.mean()))
        assert algorithm.update(batch, progress=0.0).applied
        waiting.append(encode(algorithm.published_modules()["default"]))
    assert np.mean(rates[:5]) < 0.4 * OPTIMUM, "too easy to tell anything"
    assert np.mean(rates[-5:]) > 0.85 * OPTIMUM, [round(rate, 3) for rate in rates]
