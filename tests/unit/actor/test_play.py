"""An evaluation counts one whole episode of each seeded environment."""

import threading
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from penstock.actor.acting.stepper import Stepper
from penstock.actor.evaluator import Played, Playing, in_waves, play_wave
from penstock.config.settings import PolicySection
from penstock.policy.policy import build
from penstock.protocol.spaces import Discrete
from tests.support.experience.counting_environments import LENGTHS, OBSERVATION, vector

POLICY = build(OBSERVATION, Discrete(2), PolicySection(), 0)


def evaluate(mode: AutoresetMode, slots: int, episodes: int, stop: threading.Event) -> list[Played] | None:
    """Counting environments, played with any policy."""
    stepper = Stepper(vector(mode, slots), OBSERVATION)
    how = Playing(deterministic=True, stop=stop)
    return in_waves(episodes, (play_wave(stepper, POLICY, 5 + first, how) for first in count(0, slots)))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_only_the_first_episode_of_each_environment_counts(mode: AutoresetMode) -> None:
    played = evaluate(mode, 4, 4, threading.Event())
    assert played is not None
    assert [one.length for one in played] == list(LENGTHS)
    assert [one.episode_return for one in played] == [n * (n + 1) / 2 for n in LENGTHS]
    assert all(one.terminated for one in played)


def test_more_episodes_than_environments_are_played_in_waves() -> None:
    played = evaluate(AutoresetMode.SAME_STEP, 2, 5, threading.Event())
    assert played is not None
    assert [one.length for one in played] == [3, 1, 3, 1, 3]


def test_the_seeds_are_those_of_the_episodes() -> None:
    seen: list[int] = []

    class Recording(Stepper):
        def reset(self, seeds: Any) -> Mapping[str, Any]:  # type: ignore[override]
            seen.extend(seeds)
            return super().reset(seeds)

    stepper = Recording(vector(AutoresetMode.SAME_STEP, 2), OBSERVATION)
    how = Playing(deterministic=False, stop=threading.Event())
    in_waves(4, (play_wave(stepper, POLICY, 100 + first, how) for first in count(0, 2)))
    assert seen == [100, 101, 102, 103]


def test_a_drain_ends_an_evaluation_without_a_result() -> None:
    stop = threading.Event()
    stop.set()
    assert evaluate(AutoresetMode.SAME_STEP, 2, 2, stop) is None


def test_equal_seeds_give_equal_results() -> None:
    first, second = (evaluate(AutoresetMode.DISABLED, 4, 4, threading.Event()) for _ in range(2))
    assert first == second
    assert np.mean([one.length for one in first or []]) == np.mean(LENGTHS)
