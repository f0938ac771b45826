"""`Candidates-v0`: one prompt, one choice, and what it is worth."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.people import CHANGED, USUAL
from penstock.workloads.chat.tasks import CANDIDATES, liked, questions


@pytest.mark.parametrize("reward", ["chance", "thumb"])
def test_it_is_what_gymnasium_expects(reward: str) -> None:
    check_env(gymnasium.make("penstock.workloads.chat.tasks:Candidates-v0", reward=reward).unwrapped)


def test_a_choice_earns_how_likely_it_is_liked() -> None:
    environment = gymnasium.make("penstock.workloads.chat.tasks:Candidates-v0")
    for seed in range(20):
        seen, info = environment.reset(seed=seed)
        [number] = [
            index for index, one in enumerate(questions()) if (one.features.reshape(-1) == seen).all()
        ]
        assert info["prompt"] == questions()[number].prompt
        action = seed % CANDIDATES
        _, reward, terminated, truncated, info = environment.step(np.int64(action))
        assert (terminated, truncated) == (True, False)
        assert reward == pytest.approx(liked(USUAL)[number, action])
        assert info["response"] == questions()[number].candidates[action]


def test_thumbs_are_up_as_often_as_the_chance_says() -> None:
    environment = gymnasium.make("penstock.workloads.chat.tasks:Candidates-v0", reward="thumb")
    environment.reset(seed=3)
    rewards = []
    for _ in range(4000):
        environment.reset()
        rewards.append(float(environment.step(np.int64(0))[1]))
    assert set(rewards) == {0.0, 1.0}
    assert np.mean(rewards) == pytest.approx(liked(USUAL)[:, 0].mean(), abs=0.03)


def test_taste_changes_after_so_many_episodes() -> None:
    environment = gymnasium.make("penstock.workloads.chat.tasks:Candidates-v0", changes_after=3)
    for episode in range(6):
        _, info = environment.reset(seed=7)
        [number] = [index for index, one in enumerate(questions()) if one.prompt == info["prompt"]]
        _, reward, *_ = environment.step(np.int64(2))
        taste = USUAL if episode < 3 else CHANGED
        assert reward == pytest.approx(liked(taste)[number, 2])


def test_what_it_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="taste='sour': must be one of usual, changed"):
        gymnasium.make("penstock.workloads.chat.tasks:Candidates-v0", taste="sour")
    with pytest.raises(ConfigurationError, match="reward='stars': must be one of chance, thumb"):
        gymnasium.make("penstock.workloads.chat.tasks:Candidates-v0", reward="stars")
    with pytest.raises(ConfigurationError, match="changes_after=-1: must be at least 0"):
        gymnasium.make("penstock.workloads.chat.tasks:Candidates-v0", changes_after=-1)
