"""Whichever way environments reset, the steps say what was experience and how episodes really ended."""

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box as GymnasiumBox
from gymnasium.spaces import Discrete as GymnasiumDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.actor.acting.stepper import Stepper, autoreset_mode
from penstock.config.settings import ConfigurationError
from penstock.protocol.spaces import Box
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


class ReusingArrays(VectorEnv[Any, Any, Any]):
    """Two slots that truncate at every second step, with one array each for all that a step returns."""

    def __init__(self) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.num_envs = 2
        self.single_observation_space = GymnasiumBox(-1, 20, (1,))
        self.single_action_space = GymnasiumDiscrete(2)
        self.observation, self.reward = np.zeros((2, 1), np.float32), np.zeros(2)
        self.ended, self.truncated = np.zeros(2, np.bool_), np.zeros(2, np.bool_)
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.steps = 0
        for one in (self.observation, self.reward, self.ended, self.truncated):
            one[:] = 0
        return self.observation, {}

    def step(self, actions: Any) -> Any:
        actions[:] = 7
        self.steps += 1
        self.observation[:], self.reward[:], self.truncated[:] = 5 * self.steps, 1.0, self.steps == 2
        return self.observation, self.reward, self.ended, self.truncated, {}


def test_a_reset_that_clears_arrays_of_the_step_changes_no_experience() -> None:
    space = Box(np.full(1, -1.0, np.float32), np.full(1, 20.0, np.float32))
    made, chosen = Stepper(ReusingArrays(), space), np.ones(2, np.int64)
    made.reset([0, 1])
    made.step(chosen)
    stepped = made.step(chosen)
    assert stepped.reward.tolist() == [1.0, 1.0]
    assert stepped.truncated.tolist() == [True, True]
    assert stepped.ended is not None
    assert stepped.ended.observation["observation"].tolist() == [[10.0], [10.0]]
    assert chosen.tolist() == [1, 1], "what the policy chose, whatever the environment writes in its action"
