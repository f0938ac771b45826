"""Atari games (`ALE/…`) after Mnih et al. 2015, by ale-py or by EnvPool.

Both give observations uint8 [84, 84], equal for equal actions; only the number of frames without an action at
the start of a game comes from different generators. `policy.frame_stack` stacks frames, so that each is sent
once. `environment.reward` clips the learner's rewards: episodes and evaluations count the score.
"""

import importlib
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers import AtariPreprocessing
from numpy.typing import NDArray

from penstock.config.configuration_error import how_to_install
from penstock.config.settings import AtariSection, ConfigurationError, EnvironmentSection

# ---- A limit of steps, and lives, for a vector environment that resets the rows of `reset_mask`.

Vector = VectorEnv[Any, Any, Any]
Wrapper = VectorWrapper[Any, Any, Any, Any, Any]
Result = tuple[Any, Any, Any, Any, dict[str, Any]]


class StepLimit(Wrapper):
    """Truncates an episode after `limit` steps, even where it terminates with the last of them."""

    def __init__(self, env: Vector, limit: int) -> None:
        super().__init__(env)
        self._limit = limit
        self._steps = np.zeros(env.num_envs, np.int64)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps[chosen(options, self.num_envs)] = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Result:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        self._steps += 1
        return observation, reward, terminated, truncated | (self._steps >= self._limit), infos


class EpisodicLife(Wrapper):
    """A lost life, by `infos["lives"]` int [N], ends the episode and not the game (Mnih et al. 2015)."""

    def __init__(self, env: Vector) -> None:
        super().__init__(env)
        self._lives = np.zeros(env.num_envs, np.int64)
        self._is_over = np.ones(env.num_envs, np.bool_)
        self._shown: tuple[Any, dict[str, Any]] = (None, {})

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new games; with `reset_mask` only those of its rows whose game is over."""
        begins = chosen(options, self.num_envs)
        if options is not None and "reset_mask" in options:
            begins = begins & self._is_over
            if not begins.any():
                return self._shown
            options = {**options, "reset_mask": begins}
        observation, infos = self.env.reset(seed=seed, options=options)
        self._lives[begins] = infos["lives"][begins]
        return observation, infos

    def step(self, actions: Any) -> Result:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        lives = infos["lives"]
        self._is_over = terminated | truncated
        is_lost = (lives < self._lives) & (lives > 0)
        self._lives[:] = lives
        self._shown = observation, infos
        return observation, reward, terminated | is_lost, truncated, infos


def chosen(options: dict[str, Any] | None, count: int) -> NDArray[np.bool_]:
    """Return which of `count` environments a reset concerns, bool [count]: `reset_mask`, else all."""
    if options is None or "reset_mask" not in options:
        return np.ones(count, np.bool_)
    return np.array(options["reset_mask"], np.bool_)


# ---- Observations and rules of a game.

PREFIX: Final = "ALE/"
LONGEST: Final = 27_000
"""Steps of a game unless `environment.max_episode_steps` says otherwise: half an hour of four frames each."""
SCREEN: Final = Box(0, 255, (84, 84), np.uint8)
_OPTIONS: Final = frozenset({"mode", "difficulty", "full_action_space"})
"""Arguments with the same names in ale-py and EnvPool."""
_SETTINGS: Final = {
    "frameskip": "frame_skip",
    "repeat_action_probability": "sticky_actions",
    "noop_max": "noop_max",
    "episodic_life": "episodic_life",
    "terminal_on_life_loss": "episodic_life",
}


def is_atari(environment_id: str) -> bool:
    return environment_id.startswith(PREFIX)


def section_of(section: EnvironmentSection) -> AtariSection:
    for key in section.kwargs:
        if key in _SETTINGS:
            raise ConfigurationError(
                f"environment.kwargs.{key}={section.kwargs[key]!r}: is another setting for Atari games; set "
                f"environment.atari.{_SETTINGS[key]}"
            )
        if key not in _OPTIONS and not (key == "num_threads" and section.vectorise == "envpool"):
            raise ConfigurationError(
                f"environment.kwargs.{key}={section.kwargs[key]!r}: Atari games take "
                f"{', '.join(sorted(_OPTIONS))} there; leave it out"
            )
    return section.atari or AtariSection()


def register(environment_id: str) -> None:
    try:
        ale: Any = importlib.import_module("ale_py")
    except ImportError as error:
        raise ConfigurationError(
            f"environment.id={environment_id!r}: needs ale-py ({error}); {_REMEDY}, or use "
            "environment.vectorise='envpool'"
        ) from error
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)  # else each game writes a banner to stderr
    gymnasium.register_envs(ale)


def make_with_ale(section: EnvironmentSection, count: int, mode: str) -> Vector:
    """Return `count` games as one; mode: "sync" or "async"."""
    rules = section_of(section)
    options: dict[str, Any] = {"context": "spawn"} if mode == "async" else {"copy": False}
    screen = partial(AtariPreprocessing, noop_max=rules.noop_max, frame_skip=rules.frame_skip)
    try:
        made = gymnasium.make_vec(
            section.id,
            count,
            mode,
            vector_kwargs={**options, "autoreset_mode": AutoresetMode.DISABLED},
            wrappers=[screen],
            frameskip=1,
            repeat_action_probability=rules.sticky_actions,
            max_num_frames_per_episode=0,  # `StepLimit` limits steps, as with EnvPool
            disable_env_checker=True,
            **section.kwargs,
        )
    except (TypeError, ValueError, gymnasium.error.Error) as error:
        raise ConfigurationError(
            f"environment.id={section.id!r} environment.kwargs={section.kwargs!r}: cannot be made: {error}; "
            f"correct them, or if a package is missing {_REMEDY}"
        ) from error
    return with_rules(section, made)


def with_rules(section: EnvironmentSection, games: Vector) -> Vector:
    """Return the games with their limit of steps, and episodes of one life where the section says so."""
    limited = StepLimit(games, section.max_episode_steps or LONGEST)
    return EpisodicLife(limited) if section_of(section).episodic_life else limited


def envpool_options(section: EnvironmentSection) -> dict[str, Any]:
    """Return EnvPool's arguments for the observations of ale-py.

    EnvPool's own `episodic_life` is off: its resets begin a new game even where lives are left.
    """
    rules = section_of(section)
    return {
        "frame_skip": rules.frame_skip,
        "noop_max": rules.noop_max,
        "repeat_action_probability": rules.sticky_actions,
        "stack_num": 1,
        "episodic_life": False,
        "reward_clip": False,
        "use_fire_reset": False,
    }


_REMEDY: Final = how_to_install("atari")
