"""What an environment is asked for and what is kept of it, whatever memory it uses again."""

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from penstock.actor.acting.masks import Masks
from penstock.actor.acting.stepper import Stepper
from penstock.config.settings import EnvironmentSection
from penstock.protocol.spaces import Discrete
from penstock.workloads.control.environment import make, spaces
from tests.support.experience.held_memory import FIRST, LATER, LENGTH, TASK, WAYS

SLOTS = 3


def held(**arguments: Any) -> tuple[Stepper, list[Any]]:
    """Slots by default settings, and their environments."""
    section = EnvironmentSection(id=TASK, kwargs=arguments, mask_key="mask")
    environment = make(section, SLOTS, 0)
    assert isinstance(environment, SyncVectorEnv)
    stepper = Stepper(environment, spaces(section)[0], Masks("mask", Discrete(2), SLOTS))
    return stepper, [one.unwrapped for one in environment.envs]


@pytest.mark.promise("last-observation-episode-mask")
@pytest.mark.parametrize("mask", ["array", "list"])
@pytest.mark.parametrize("way", WAYS)
def test_a_last_observation_and_its_mask_are_not_those_of_the_next_episode(way: str, mask: str) -> None:
    stepper, _ = held(way=way, mask=mask)
    actions, ends = np.ones(SLOTS, np.int64), 0
    shown = stepper.reset(range(SLOTS))
    for step in range(1, 3 * LENGTH + 1):
        is_first = step % LENGTH == 1
        assert all((rows == (FIRST if is_first else LATER)).all() for rows in shown.values()), step
        stepped = stepper.step(actions)
        shown = stepped.observation
        if stepped.ended is not None:
            assert len(stepped.ended.observation) == 2
            assert all((rows == LATER).all() for rows in stepped.ended.observation.values())
            ends += len(stepped.ended.slots)
    assert ends == 3 * SLOTS


@pytest.mark.parametrize("way", WAYS)
def test_observations_of_a_slot_are_not_those_of_the_next_one(way: str) -> None:
    stepper, environments = held(way=way)
    stepper.reset(range(SLOTS))
    for slot, one in enumerate(environments):
        one.observes = np.full(2, (slot + 1) / SLOTS, np.float32)
    expected = np.arange(1, SLOTS + 1, dtype=np.float32) / SLOTS
    for _ in range(LENGTH):
        stepped = stepper.step(np.ones(SLOTS, np.int64))
        last = stepped.ended
        rows = stepped.observation if last is None else last.observation
        (path,) = (path for path in rows if "mask" not in path)
        assert np.array_equal(rows[path], np.repeat(expected[:, None], 2, 1))


def test_an_environment_is_asked_for_nothing_before_the_first_reset() -> None:
    stepper, environments = held()
    assert [one.calls for one in environments] == [[]] * SLOTS
    stepper.reset(range(SLOTS))
    for _ in range(LENGTH):
        stepper.step(np.ones(SLOTS, np.int64))
    expected = [("reset", None), *[("step", 1)] * LENGTH, ("reset", None)]
    assert [one.calls for one in environments] == [expected] * SLOTS
