"""Gymnasium environments as one vector of N: vectoriser, autoreset mode, spaces, target.

Where Gymnasium cannot make an environment, ConfigurationError names the setting.
"""

import difflib
from typing import Any

import gymnasium
from gymnasium import spaces as gym_spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.config.workload import module_of, moved
from penstock.protocol import spaces as wire_spaces
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.spaces import Dict, Space
from penstock.runtime.exit import one_line
from penstock.runtime.health import note_made
from penstock.workloads.control import atari, envpool_tasks
from penstock.workloads.control.slot import Slot

# ---- Gymnasium spaces as data: `penstock.protocol.spaces` has the kinds that a fragment can carry.


def to_space(field: str, space: gym_spaces.Space) -> Space:  # type: ignore[type-arg]
    """Return the space as data; raises ConfigurationError that names `field`, the space and what works."""
    match space:
        case gym_spaces.Box():
            return _box(field, space)
        case gym_spaces.Discrete():
            return wire_spaces.Discrete(int(space.n), int(space.start))
        case gym_spaces.MultiDiscrete():
            if space.nvec.ndim != 1 or space.start.any():
                raise ConfigurationError(
                    f"{field}={one_line(space)}: one axis that starts at 0 is supported; wrap the environment"
                )
            return wire_spaces.MultiDiscrete(tuple(int(n) for n in space.nvec))
        case gym_spaces.MultiBinary() if len(space.shape) == 1:
            return wire_spaces.MultiBinary(int(space.shape[0]))
        case gym_spaces.Dict():
            parts = space.spaces.items()
            return wire_spaces.Dict(tuple((_key(field, k), to_space(f"{field}/{k}", v)) for k, v in parts))
        case gym_spaces.Tuple():
            return wire_spaces.Tuple(
                tuple(to_space(f"{field}/{index}", part) for index, part in enumerate(space.spaces))
            )
        case _:
            raise ConfigurationError(
                f"{field}={one_line(space)}: not supported; use Box, Discrete, MultiDiscrete, MultiBinary "
                "of one axis (such as MultiBinary(6)), Dict or Tuple (a wrapper of gymnasium.wrappers may "
                "convert it)"
            )


def _box(field: str, space: gym_spaces.Box) -> Space:
    if space.low.nbytes > MAX_MESSAGE_BYTES:
        raise ConfigurationError(
            f"{field}: a Box of shape {space.shape} and {space.dtype} has {space.low.nbytes} bytes, "
            f"a message holds {MAX_MESSAGE_BYTES}; make it smaller in the environment"
        )
    try:
        return wire_spaces.Box(space.low.copy(), space.high.copy())
    except ValueError as error:
        raise ConfigurationError(f"{field}={one_line(space)}: {error}") from error


def _key(field: str, key: object) -> str:
    # Keys become parts of tensor names, where "/" separates.
    if not isinstance(key, str) or not key or "/" in key:
        raise ConfigurationError(
            f"{field}: key {key!r} is no text, is empty or holds '/'; rename it in the environment"
        )
    return key


def make(section: EnvironmentSection, count: int, seed: int) -> VectorEnv[Any, Any, Any]:
    del seed
    _check_atari(section)
    if section.vectorise == "envpool":
        return envpool_tasks.make(section, count)
    spec = _specification(section)
    kind = _vectoriser(section, spec)
    if atari.is_atari(section.id):
        return atari.make_with_ale(section, count, kind)
    match kind:
        case "vector":
            return _make_vec(section, count, "vector_entry_point", {})
        case "async":
            # Subprocesses return copies of observations: next-step autoreset keeps the true last one of an
            # episode. Never forked: the channel to the broker does not survive a fork.
            options = {"context": "spawn", "autoreset_mode": AutoresetMode.NEXT_STEP}
            return _make_vec(section, count, "async", options)
        case _:
            # Same-step autoreset returns the last observation by reference and resets, and a reset may write
            # into the same memory: the stepper copies first, then resets.
            options = {"copy": False, "autoreset_mode": AutoresetMode.DISABLED}
            return _make_vec(section, count, "sync", options)


def spaces(section: EnvironmentSection) -> tuple[Space, Space]:
    """Return the observation space without its mask, and the action space."""
    observation, action = _single_spaces(section)
    return (
        _without(section.mask_key, to_space("observation_space", observation)),
        to_space("action_space", action),
    )


def _single_spaces(section: EnvironmentSection) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    if section.vectorise == "envpool":
        _check_atari(section)
        return envpool_tasks.spaces(section)
    single = section if section.vectorise != "async" else section.model_copy(update={"vectorise": "sync"})
    environment = make(single, 1, 0)
    try:
        return environment.single_observation_space, environment.single_action_space
    finally:
        environment.close()


def _without(mask_key: str, space: Space) -> Space:
    if not mask_key or not isinstance(space, Dict):
        return space
    rest = tuple((key, part) for key, part in space.spaces if key != mask_key)
    if not rest:
        raise ConfigurationError(
            f"environment.mask_key={mask_key!r}: the observation has no other key; the policy needs one"
        )
    return Dict(rest)


def target(section: EnvironmentSection) -> float | None:
    """Return the registered reward threshold; raises ConfigurationError where the environment is unknown."""
    if section.vectorise == "envpool" or atari.is_atari(section.id):
        spaces(section)
        registered = gymnasium.registry.get(section.id)
        threshold = None if registered is None else registered.reward_threshold
    else:
        _check_atari(section)
        threshold = _specification(section).reward_threshold
    return None if threshold is None else float(threshold)


def _check_atari(section: EnvironmentSection) -> None:
    if section.atari is not None and not atari.is_atari(section.id):
        raise ConfigurationError(
            f"environment.atari: environment.id={section.id!r} is no Atari game; leave it out, or use an id "
            f"that begins with {atari.PREFIX}"
        )


def _specification(section: EnvironmentSection) -> EnvSpec:
    module, _, name = section.id.rpartition(":")
    if not module and name not in gymnasium.registry:
        module = module_of(name)
    if atari.is_atari(section.id):
        atari.register(section.id)
    try:
        if module:
            __import__(module)
        return gymnasium.spec(name)
    except ImportError as error:
        if moved(module, error):
            raise ConfigurationError(f"environment.id={section.id!r}: it is {name!r}") from error
        raise ConfigurationError(
            f"environment.id={section.id!r}: {error}; install what it needs, or add its folder to PYTHONPATH"
        ) from error
    except gymnasium.error.Error as error:
        close = difflib.get_close_matches(name, list(gymnasium.registry), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "write module:Id for one of your own"
        why = str(error).rstrip(".")
        raise ConfigurationError(f"environment.id={section.id!r}: {why}; {hint}") from error


def _vectoriser(section: EnvironmentSection, spec: EnvSpec) -> str:
    if atari.is_atari(section.id):
        if section.vectorise == "vector":
            raise ConfigurationError(
                f"environment.vectorise='vector': {section.id} is stepped by 'sync', 'async' or 'envpool'; "
                "use one of them"
            )
        return "async" if section.vectorise == "async" else "sync"
    has_vector = spec.vector_entry_point is not None and not spec.additional_wrappers
    if section.vectorise == "vector" and not has_vector:
        raise ConfigurationError(
            f"environment.vectorise='vector': {section.id} has no vector entry point; use 'auto' or 'sync'"
        )
    if section.vectorise == "async" and spec.entry_point is None:
        raise ConfigurationError(
            f"environment.vectorise='async': {section.id} has only a vector entry point; use 'vector'"
        )
    if section.vectorise == "auto" or spec.entry_point is None:
        return "vector" if has_vector else "sync"
    return section.vectorise


class _InSlot:
    """A wrapper for `gymnasium.make_vec`, which is also sent to the processes of 'async'."""

    def __init__(self, section: EnvironmentSection) -> None:
        self._id, self._mask_key = section.id, section.mask_key

    def __call__(self, env: gymnasium.Env[Any, Any]) -> Slot:
        note_made()
        action_space = to_space("action_space", env.action_space)
        return Slot(env, name=self._id, mask_key=self._mask_key, action_space=action_space)


def _make_vec(
    section: EnvironmentSection, count: int, mode: str, options: dict[str, Any]
) -> VectorEnv[Any, Any, Any]:
    arguments: dict[str, Any] = dict(section.kwargs)
    if section.max_episode_steps is not None:
        arguments["max_episode_steps"] = section.max_episode_steps
    if mode != "vector_entry_point":
        arguments.setdefault("disable_env_checker", True)
        arguments["wrappers"] = [_InSlot(section)]
    try:
        return gymnasium.make_vec(section.id, count, mode, vector_kwargs=options, **arguments)
    except (TypeError, gymnasium.error.Error, ImportError) as error:
        raise ConfigurationError(
            f"environment.id={section.id!r}: cannot be made with {_stated(section)}: {one_line(error)}"
        ) from error


def _stated(section: EnvironmentSection) -> str:
    limit = section.max_episode_steps
    stated = f"environment.kwargs={section.kwargs!r}"
    return stated if limit is None else f"{stated} environment.max_episode_steps={limit}"
