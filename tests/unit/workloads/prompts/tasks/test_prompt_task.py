"""The environment of prompts."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.prompts.task_parts import PromptSource, parts_of
from penstock.workloads.prompts.tasks import LENGTH, PromptTask


def test_it_is_an_environment_as_gymnasium_wants_it() -> None:
    task = gymnasium.make("penstock.workloads.prompts.tasks:Prompts-v0").unwrapped
    check_env(task, skip_render_check=True)
    assert task.observation_space == gymnasium.spaces.Box(-1.0, 1.0, (1536,), np.float32)
    assert task.action_space == gymnasium.spaces.Discrete(5)


def test_an_episode_ends_after_five_steps_by_itself() -> None:
    task = PromptTask()
    observation, info = task.reset(seed=1)
    assert np.linalg.norm(observation) == pytest.approx(1.0, abs=1e-6)
    ends = []
    for action in range(LENGTH):
        observation, _, terminated, truncated, info = task.step(np.int64(action))
        ends.append((terminated, truncated))
    assert ends == [(False, False)] * 4 + [(True, False)]
    assert "Work in steps" in info["prompt"]
    assert info["action_mask"].tolist() == [1] * 5


def test_seeds_repeat_prompts_and_tests_are_of_other_subjects() -> None:
    drawn = {}
    for split in ("train", "test"):
        random, source = np.random.default_rng(0), PromptSource("builtin", split)
        drawn[split] = [source.draw(random)[0] for _ in range(1000)]
    assert not set(drawn["train"]) & set(drawn["test"])
    one, other = PromptTask(), PromptTask()
    assert one.reset(seed=4)[1]["prompt"] == other.reset(seed=4)[1]["prompt"]


@pytest.mark.parametrize("argument", ["prompts", "split", "embedding", "reward"])
def test_arguments_are_refused_by_name(argument: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"environment\.kwargs\.{argument}='other'.*one of"):
        parts_of({argument: "other"})
