"""Atari games (`ALE/…`) after Mnih et al. 2015: what a step is and shows, by ale-py or by EnvPool.

Either shows uint8 [84, 84], the same for the same actions; only how many frames without an action a game
begins with is drawn by another generator. `policy.frame_stack` stacks frames, so that each is sent once, and
`environment.reward` clips what the learner is given: episodes and evaluations count the score.
"""

import importlib
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing

from penstock.config.configuration_error import how_to_install
from penstock.config.settings import AtariSection, ConfigurationError, EnvironmentSection
from penstock.workloads.control.vector_rules import EpisodicLife, StepLimit, Vector

PREFIX: Final = "ALE/"
LONGEST: Final = 27_000
"""Steps of a game unless `environment.max_episode_steps` says otherwise: half an hour of four frames each."""
SCREEN: Final = Box(0, 255, (84, 84), np.uint8)
_OPTIONS: Final = frozenset({"mode", "difficulty", "full_action_space"})
"""Arguments that ale-py and EnvPool both take, by the same names."""
_DECLARED: Final = {
    "frameskip": "frame_skip",
    "repeat_action_probability": "sticky_actions",
    "noop_max": "noop_max",
    "episodic_life": "episodic_life",
    "terminal_on_life_loss": "episodic_life",
}


def is_atari(environment_id: str) -> bool:
    return environment_id.startswith(PREFIX)


def section_of(section: EnvironmentSection) -> AtariSection:
    """Return how a game is shown and played; raises ConfigurationError for arguments that say it as well."""
    for key in section.kwargs:
        if key in _DECLARED:
            raise ConfigurationError(
                f"environment.kwargs.{key}={section.kwargs[key]!r}: is declared for Atari games; set "
                f"environment.atari.{_DECLARED[key]}"
            )
        if key not in _OPTIONS and not (key == "num_threads" and section.vectorise == "envpool"):
            raise ConfigurationError(
                f"environment.kwargs.{key}={section.kwargs[key]!r}: Atari games take "
                f"{', '.join(sorted(_OPTIONS))} there; leave it out"
            )
    return section.atari or AtariSection()


def register(environment_id: str) -> None:
    """Have Gymnasium know the games; raises ConfigurationError where ale-py is absent."""
    try:
        ale: Any = importlib.import_module("ale_py")
    except ImportError as error:
        raise ConfigurationError(
            f"environment.id={environment_id!r}: needs ale-py ({error}); {_REMEDY}, or use "
            "environment.vectorise='envpool'"
        ) from error
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)  # else each game greets on stderr
    gymnasium.register_envs(ale)


def make_with_ale(section: EnvironmentSection, count: int, mode: str) -> Vector:
    """Return `count` games as one; mode: "sync" or "async"."""
    asked = section_of(section)
    options: dict[str, Any] = {"context": "spawn"} if mode == "async" else {"copy": False}
    shown = partial(AtariPreprocessing, noop_max=asked.noop_max, frame_skip=asked.frame_skip)
    try:
        made = gymnasium.make_vec(
            section.id,
            count,
            mode,
            vector_kwargs={**options, "autoreset_mode": AutoresetMode.DISABLED},
            wrappers=[shown],
            frameskip=1,
            repeat_action_probability=asked.sticky_actions,
            max_num_frames_per_episode=0,  # the limit is one of steps, and the same by EnvPool
            disable_env_checker=True,
            **section.kwargs,
        )
    except (TypeError, ValueError, gymnasium.error.Error) as error:
        raise ConfigurationError(
            f"environment.id={section.id!r} environment.kwargs={section.kwargs!r}: cannot be made: {error}; "
            f"correct them, or where a package is absent {_REMEDY}"
        ) from error
    return with_rules(section, made)


def with_rules(section: EnvironmentSection, games: Vector) -> Vector:
    """Return the games under their limit of steps, and with episodes of one life where that is asked for."""
    limited = StepLimit(games, section.max_episode_steps or LONGEST)
    return EpisodicLife(limited) if section_of(section).episodic_life else limited


def envpool_options(section: EnvironmentSection) -> dict[str, Any]:
    """Return what EnvPool is asked for, so that it shows what ale-py shows.

    Its own `episodic_life` is not: what it resets when told to begins a new game, with lives left as well.
    """
    asked = section_of(section)
    return {
        "frame_skip": asked.frame_skip,
        "noop_max": asked.noop_max,
        "repeat_action_probability": asked.sticky_actions,
        "stack_num": 1,
        "episodic_life": False,
        "reward_clip": False,
        "use_fire_reset": False,
    }


_REMEDY: Final = how_to_install("atari")
