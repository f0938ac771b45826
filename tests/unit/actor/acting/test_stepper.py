"""Whichever way environments reset, the steps say what was experience and how episodes really ended."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from penstock.actor.acting.stepper import Stepper, autoreset_mode
from penstock.config.settings import ConfigurationError
from tests.support.experience.counting_environments import LENGTHS, NESTED, OBSERVATION, vector

MODES = list(AutoresetMode)
ACTION = np.zeros(2, np.int64)


def stepper(mode: AutoresetMode, *, nested: bool = False) -> Stepper:
    """Two slots, reset: slot 0 ends first after 3 steps, slot 1 after 1."""
    made = Stepper(vector(mode, 2, nested=nested), NESTED if nested else OBSERVATION)
    made.reset([0, 0])
    return made


@pytest.mark.parametrize("mode", MODES)
def test_the_step_that_ends_an_episode_gives_its_true_last_observation(mode: AutoresetMode) -> None:
    stepped = stepper(mode).step(ACTION)
    assert stepped.terminated.tolist() == [False, True]
    assert stepped.ended is not None
    assert stepped.ended.slots.tolist() == [1]
    assert stepped.ended.observation["observation"].tolist() == [[1, 0, LENGTHS[1]]]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_an_environment_that_resets_within_the_step_wastes_none(mode: AutoresetMode) -> None:
    made = stepper(mode)
    stepped = made.step(ACTION)
    assert stepped.observation["observation"][1].tolist() == [1, 1, 0]
    assert all(made.step(ACTION).valid is None for _ in range(20))


def test_a_next_step_reset_is_no_experience() -> None:
    made = stepper(AutoresetMode.NEXT_STEP)
    assert made.step(ACTION).valid is None
    reset = made.step(ACTION)
    assert reset.valid is not None
    assert reset.valid.tolist() == [True, False]
    assert reset.reward.tolist() == [2.0, 0.0]
    assert reset.observation["observation"][1].tolist() == [1, 1, 0]


def test_a_reset_between_an_end_and_its_reset_step_starts_clean() -> None:
    made = stepper(AutoresetMode.NEXT_STEP)
    made.step(ACTION)
    made.reset([0, 0])
    assert made.step(ACTION).valid is None


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_nested_observations_come_by_path(mode: AutoresetMode) -> None:
    stepped = stepper(mode, nested=True).step(ACTION)
    assert set(stepped.observation) == {"observation/count", "observation/pair/0", "observation/pair/1"}
    assert stepped.ended is not None
    last = stepped.ended.observation
    assert last["observation/count"].tolist() == [[1, 0, 1]]
    assert last["observation/pair/0"].tolist() == [1]
    assert last["observation/pair/1"].tolist() == [[1.5, 0.5, 1.5]]


@pytest.mark.parametrize("mode", MODES)
def test_last_observations_are_not_overwritten_by_later_steps(mode: AutoresetMode) -> None:
    made = stepper(mode)
    ended = made.step(ACTION).ended
    assert ended is not None
    before = ended.observation["observation"].tolist()
    for _ in range(5):
        made.step(ACTION)
    assert ended.observation["observation"].tolist() == before


def test_a_vector_environment_that_does_not_say_how_it_resets_is_refused() -> None:
    environment = vector(AutoresetMode.NEXT_STEP, 1)
    environment.metadata = {"autoreset_mode": "Sometimes"}
    with pytest.raises(ConfigurationError, match=r"autoreset_mode.*'Sometimes'.*vectorise='sync'"):
        autoreset_mode(environment)
