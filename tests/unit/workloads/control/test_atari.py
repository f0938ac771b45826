"""Atari games show and pay the same by ale-py and by EnvPool, and lives end episodes of training alone."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from penstock.actor.acting.stepper import Stepped, Stepper
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.spaces import Box, Discrete
from penstock.workloads.control import environment as control
from penstock.workloads.control.defaults import for_environment

pytest.importorskip("ale_py", reason="Atari games need the extra atari")
pytest.importorskip("cv2", reason="Atari games need the extra atari")


BREAKOUT = "ALE/Breakout-v5"


def games(vectorise: Any = "sync", *, whole: bool = False, count: int = 2, **changes: Any) -> Stepper:
    """`count` games of Breakout that all begin after one frame, so that nothing is drawn."""
    atari = {"noop_max": 1} | changes.pop("atari", {})
    section = EnvironmentSection(id=BREAKOUT, vectorise=vectorise, atari=atari, **changes)
    section = section.for_evaluation() if whole else section
    return Stepper(control.make(section, count, 0), control.spaces(section)[0])


def played(stepper: Stepper, steps: int, seed: int = 5) -> list[Stepped]:
    random, taken = np.random.default_rng(seed), []
    for _ in range(steps):
        stepped = stepper.step(random.integers(0, 4, stepper.slots))
        shown = {path: array.copy() for path, array in stepped.observation.items()}
        taken.append(replace(stepped, observation=shown))
    return taken


def test_both_implementations_give_equal_frames_and_rewards() -> None:
    pytest.importorskip("envpool", reason="EnvPool is an extra")
    steppers = [games("sync"), games("envpool")]
    first = [stepper.reset([1, 2])["observation"] for stepper in steppers]
    np.testing.assert_array_equal(first[0], first[1])
    ends = 0
    for one, other in zip(*[played(stepper, 450) for stepper in steppers], strict=True):
        np.testing.assert_array_equal(one.observation["observation"], other.observation["observation"])
        np.testing.assert_array_equal(one.reward, other.reward)
        np.testing.assert_array_equal(one.terminated, other.terminated)
        assert not one.truncated.any()
        assert not other.truncated.any()
        ends += int(one.terminated.sum())
    assert ends > 2 * 5, "more than the five lives of each game"
    for stepper in steppers:
        stepper.close()


WAYS = pytest.mark.parametrize(
    "vectorise",
    [
        "sync",
        pytest.param(
            "envpool", marks=pytest.mark.skipif(find_spec("envpool") is None, reason="EnvPool is an extra")
        ),
    ],
)


@WAYS
def test_a_lost_life_ends_an_episode_of_training_and_the_game_continues(vectorise: Any) -> None:
    lives, whole = games(vectorise, count=1), games(vectorise, count=1, whole=True)
    lives.reset([3])
    whole.reset([3])
    of_lives, of_game = played(lives, 400), played(whole, 400)
    over = next(step for step, stepped in enumerate(of_game) if stepped.terminated[0])
    ended = [step for step, stepped in enumerate(of_lives) if stepped.terminated[0] and step <= over]
    assert len(ended) == 5
    assert ended[-1] == over
    for step in range(over):  # one game, whatever counts as an episode
        np.testing.assert_array_equal(
            of_lives[step].observation["observation"], of_game[step].observation["observation"]
        )
    assert [step for step in range(over + 1) if of_game[step].terminated[0]] == [over]
    assert sum(stepped.reward[0] for stepped in of_lives[: over + 1]) == sum(
        stepped.reward[0] for stepped in of_game[: over + 1]
    )
    begins = of_lives[ended[0]]
    assert begins.ended is not None
    np.testing.assert_array_equal(begins.ended.observation["observation"], begins.observation["observation"])


def test_every_algorithm_gets_stacks_and_clipped_rewards() -> None:
    for algorithm in ("ppo", "dqn", "random"):
        layer = for_environment(BREAKOUT, algorithm)
        assert layer["environment"]["reward"] == [{"clip": [-1.0, 1.0]}]
        assert layer["policy"]["frame_stack"] == 4
    section = EnvironmentSection(id=BREAKOUT)
    observation, action = control.spaces(section)
    assert isinstance(observation, Box)
    assert (observation.shape, observation.dtype) == ((84, 84), "uint8")
    assert (action, control.target(section)) == (Discrete(4), None)


@WAYS
def test_the_start_of_a_game_is_drawn_from_the_seed(vectorise: Any) -> None:
    stepper = games(vectorise, atari={"noop_max": 30, "sticky_actions": 0.25})

    def shown(*seeds: int) -> Any:
        stepper.reset(seeds)
        return np.stack([stepped.observation["observation"] for stepped in played(stepper, 30)])

    first = shown(2**32 - 1, 7)
    np.testing.assert_array_equal(first, shown(2**32 - 1, 7))
    assert (first != shown(2**32 - 2, 8)).any()
    stepper.close()


@WAYS
def test_a_limit_counts_the_steps_of_a_whole_game(vectorise: Any) -> None:
    stepper = games(vectorise, max_episode_steps=60)
    stepper.reset([1, 2])
    steps = played(stepper, 130)
    assert [step for step, one in enumerate(steps, 1) if one.truncated.all()] == [60, 120]
    assert any(one.terminated.any() for one in steps)
    stepper.close()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kwargs": {"frameskip": 2}}, r"kwargs\.frameskip=2.*set environment\.atari\.frame_skip"),
        (
            {"kwargs": {"obs_type": "ram"}},
            r"kwargs\.obs_type='ram'.*take difficulty, full_action_space, mode",
        ),
        ({"vectorise": "vector"}, r"vectorise='vector'.*'sync', 'async' or 'envpool'"),
        ({"id": "ALE/Brekout-v5"}, r"ALE/Brekout-v5.*did you mean ALE/Breakout-v5"),
        ({"id": "CartPole-v1", "atari": {}}, r"environment\.atari.*'CartPole-v1' is no Atari game"),
        ({"kwargs": {"mode": "hard"}}, r"environment\.kwargs=\{'mode': 'hard'\}.*cannot be made"),
    ],
)
def test_a_setting_that_does_not_fit_the_game_is_named(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        control.target(EnvironmentSection(**{"id": BREAKOUT, **section}))
