"""EnvPool as one vector; an id that Gymnasium knows has the spaces, limit and target of Gymnasium."""

import difflib
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from penstock.config.configuration_error import how_to_install
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.workloads.control import atari
from penstock.workloads.control.atari import StepLimit, Vector, chosen

_FIELD: Final = "environment.vectorise='envpool'"
_MOST_STEPS: Final = 2**31 - 1
"""EnvPool counts steps in int32; this limit means none."""
_OURS: Final = {
    "max_episode_steps": "environment.max_episode_steps",
    "num_envs": "environment.count",
    "seed": "seed",
    "env_seed": "seed",
    "frame_stack": "policy.frame_stack",
    "stack_num": "policy.frame_stack",
    "reward_clip": "environment.reward",
}
"""Arguments of EnvPool that a setting of Penstock decides."""
_CLOSED: Final = frozenset(
    {"base_path", "batch_size", "env_type", "gym_reset_return_info", "max_num_players", "reward_threshold"}
    | {"from_pixels", "render_mode", "render_env_id", "render_width", "render_height", "render_camera_id"}
    | {"thread_affinity_offset", "xml_file"}
)
_MUJOCO: Final = "envpool.mujoco.gym"
_ATARI: Final = "envpool.atari"


def longest(section: EnvironmentSection) -> int | None:
    """Return the steps after which an episode is truncated, by Gymnasium where it has the id; None: never."""
    if section.max_episode_steps is not None:
        return section.max_episode_steps
    if atari.is_atari(section.id):
        return atari.LONGEST
    registered = gymnasium.registry.get(section.id)
    if registered is not None and registered.max_episode_steps is not None:
        return registered.max_episode_steps
    own = int(_made(section, task_of(section), {}).config.max_episode_steps)
    return own if own < _MOST_STEPS else None


def spaces(section: EnvironmentSection) -> tuple[gym_spaces.Space[Any], gym_spaces.Space[Any]]:
    """Return observation and action space, which are Gymnasium's where it has the id."""
    task = task_of(section)
    specification, family = _made(section, task, options_of(section)), _family(task)
    with without_warnings_of_bounds():
        observation, action = specification.gymnasium_observation_space, specification.gymnasium_action_space
    if family == _ATARI:
        return atari.SCREEN, action
    if family == _MUJOCO:
        # Gymnasium's action spaces are float32 and otherwise equal; to make them would need MuJoCo itself.
        return observation, gym_spaces.Box(action.low, action.high, action.shape, np.float32)
    if section.id not in gymnasium.registry:
        return _with_true_bounds(observation), action
    known_observation, known_action = _of_gymnasium(section)
    for name, here, known in (
        ("observation_space", observation, known_observation),
        ("action_space", action, known_action),
    ):
        if not _alike(here, known):
            raise ConfigurationError(
                f"{_FIELD}: {section.id} has {name}={here} in EnvPool and {known} in Gymnasium; use 'sync'"
            )
    return known_observation, known_action


@contextmanager
def without_warnings_of_bounds() -> Iterator[None]:
    """Silence Gymnasium's warning for every space of EnvPool, whose float32 bounds are written as float64."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Box .* precision lowered")
        yield


def module() -> Any:
    try:
        return importlib.import_module("envpool")
    except (ImportError, OSError) as error:  # OSError: a package of its assets is missing
        raise ConfigurationError(
            f"{_FIELD}: needs envpool ({error}); {how_to_install('envpool')}, or use 'auto'"
        ) from error


def _family(task: str) -> str:
    return str(module().registration.registry.specs[task][0])


def task_of(section: EnvironmentSection) -> str:
    task = section.id.removeprefix(atari.PREFIX)
    known = module().list_all_envs()
    if task not in known:
        close = difflib.get_close_matches(task, known, n=3, cutoff=0.6)
        hint = f"did you mean {', '.join(close)}, or " if close else ""
        raise ConfigurationError(
            f"{_FIELD}: environment.id={section.id!r} is none of EnvPool's {len(known)} ids; {hint}use 'auto'"
        )
    if (_family(task) == _ATARI) is not atari.is_atari(section.id):
        raise ConfigurationError(
            f"{_FIELD}: environment.id={section.id!r}: games are named as Gymnasium names them; write "
            f"'{atari.PREFIX}{task}'"
        )
    return task


def options_of(section: EnvironmentSection) -> dict[str, Any]:
    for key, value in section.kwargs.items():
        if key in _OURS or key in _CLOSED:
            remedy = f"set {_OURS[key]}" if key in _OURS else "leave it out"
            raise ConfigurationError(
                f"environment.kwargs.{key}={value!r}: cannot be combined with {_FIELD}; {remedy}"
            )
    own = atari.envpool_options(section) if atari.is_atari(section.id) else {}
    beyond = min(longest(section) or _MOST_STEPS, _MOST_STEPS - 1) + 1
    return {"max_episode_steps": beyond, **own, **section.kwargs}


def _made(section: EnvironmentSection, task: str, options: dict[str, Any]) -> Any:
    try:
        specification = module().make_spec(task, **options)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{_FIELD}: environment.id={section.id!r} environment.kwargs={section.kwargs!r}: cannot be made: "
            f"{str(error) or type(error).__name__}; correct them, or use 'auto'"
        ) from error
    if specification.config.max_num_players > 1:
        raise ConfigurationError(
            f"{_FIELD}: environment.id={section.id!r} has several players; choose one with a single player"
        )
    return specification


def _of_gymnasium(section: EnvironmentSection) -> tuple[gym_spaces.Space[Any], gym_spaces.Space[Any]]:
    arguments = {key: value for key, value in section.kwargs.items() if key != "num_threads"}
    try:
        single = gymnasium.make(section.id, disable_env_checker=True, **arguments)
    except (TypeError, ImportError, gymnasium.error.Error) as error:
        raise ConfigurationError(
            f"{_FIELD}: environment.id={section.id!r} environment.kwargs={section.kwargs!r}: its spaces are "
            f"Gymnasium's, which cannot make it: {error}"
        ) from error
    try:
        return single.observation_space, single.action_space
    finally:
        single.close()


def _alike(here: gym_spaces.Space[Any], known: gym_spaces.Space[Any]) -> bool:
    """Return whether two spaces have equal values, apart from bounds and dtypes of real numbers."""
    match here, known:
        case gym_spaces.Box(), gym_spaces.Box():
            kinds = {np.dtype(one.dtype).kind for one in (here, known)}
            return here.shape == known.shape and len(kinds) == 1
        case gym_spaces.Dict(), gym_spaces.Dict():
            return here.keys() == known.keys() and all(_alike(here[key], known[key]) for key in here)
        case _:
            return here == known


def _with_true_bounds(space: gym_spaces.Space[Any]) -> gym_spaces.Space[Any]:
    """Restore −∞: EnvPool writes the smallest positive number for an unknown bound."""
    match space:
        case gym_spaces.Dict():
            return gym_spaces.Dict({key: _with_true_bounds(part) for key, part in space.items()})
        case gym_spaces.Box() if space.dtype.kind == "f":
            is_unknown = space.low == np.finfo(space.dtype).tiny
            low, high = (
                np.where(is_unknown, bound, given).astype(space.dtype)
                for bound, given in ((-np.inf, space.low), (np.inf, space.high))
            )
            return gym_spaces.Box(low, high, space.shape, space.dtype.type)
        case _:
            return space


# ---- EnvPool's environments as one vector of N; the caller resets.

_SEED_BITS: Final = 2**31 - 1


def make(section: EnvironmentSection, count: int) -> Vector:
    pool: Vector = Pool(section, count)
    if atari.is_atari(section.id):
        return atari.with_rules(section, pool)
    limit = longest(section)
    return pool if limit is None else StepLimit(pool, limit)


class Pool(VectorEnv[Any, Any, Any]):
    """EnvPool's environments in Gymnasium's autoreset mode DISABLED."""

    metadata: dict[str, Any] = {  # noqa: RUF012 - Gymnasium declares it so
        "autoreset_mode": AutoresetMode.DISABLED,
        "seeds": "each",
    }

    def __init__(self, section: EnvironmentSection, count: int) -> None:
        self.num_envs = count
        self._task, self._options = task_of(section), options_of(section)
        self._pool: Any = None
        self._shown: Any = None
        self.single_observation_space, self.single_action_space = spaces(section)
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is None or "reset_mask" not in options:
            self._begin(seed)
            with without_warnings_of_bounds():
                shown, infos = self._pool.reset()
            self._shown = _shaped(self.single_observation_space, shown)
            return self._shown, infos
        slots = chosen(options, self.num_envs).nonzero()[0].astype(np.int32)
        first, infos = self._pool.reset(slots)
        rows = _shaped(self.single_observation_space, first)
        self._shown = _replaced(self._shown, rows, slots)
        arrays = {key: rows for key, rows in infos.items() if isinstance(rows, np.ndarray)}
        return self._shown, {key: _among(rows, slots, self.num_envs) for key, rows in arrays.items()}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        shown, reward, terminated, truncated, infos = self._pool.step(np.asarray(actions))
        self._shown = _shaped(self.single_observation_space, shown)
        return self._shown, reward, terminated, truncated, infos

    def close(self, **_: Any) -> None:
        self._pool = None

    def _begin(self, seed: Any) -> None:
        if seed is None:
            seed = np.random.SeedSequence().generate_state(self.num_envs)
        elif np.ndim(seed) == 0:
            seed = range(int(seed), int(seed) + self.num_envs)
        # Seeds are int32, and its games replace a negative one by the time of day.
        seeds = [int(one) & _SEED_BITS for one in seed]
        self._pool = None  # ends the threads of the previous pool first
        self._pool = module().make_gymnasium(self._task, num_envs=self.num_envs, seed=seeds, **self._options)


def _shaped(space: gym_spaces.Space[Any], rows: Any) -> Any:
    """Return rows [N, ...] of observations in the shape and dtype of their space."""
    if isinstance(space, gym_spaces.Dict):
        return {key: _shaped(part, rows[key]) for key, part in space.items()}
    return rows.astype(space.dtype, copy=False).reshape(len(rows), *(space.shape or ()))


def _replaced(rows: Any, first: Any, slots: NDArray[np.int32]) -> Any:
    if isinstance(rows, dict):
        return {key: _replaced(part, first[key], slots) for key, part in rows.items()}
    changed = rows.copy()
    changed[slots] = first
    return changed


def _among(rows: Any, slots: NDArray[np.int32], count: int) -> Any:
    every = np.zeros((count, *rows.shape[1:]), rows.dtype)
    every[slots] = rows
    return every
