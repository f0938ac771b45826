"""One of several environments in a process: what it returns is checked, what it raises is reported.

An environment that raises, or shows NaN or infinity, has failed in that step: the slot reports it as
`stepper.FAILED`, and is reset. What has another form than Gymnasium's is a ConfigurationError, which names
environment, method and value and ends the run. An environment that fails again and again ends the process.
"""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces
from numpy.typing import NDArray

from penstock.actor.acting.masks import flat_mask
from penstock.actor.acting.stepper import FAILED
from penstock.config.configuration_error import ConfigurationError
from penstock.protocol.spaces import Space
from penstock.runtime.exit import Fatal, RunFailed

_RAISED: Final = (Exception, KeyboardInterrupt, SystemExit)
_OURS: Final = (ConfigurationError, Fatal, RunFailed)
"""What an environment of this package raises to end the process: no failure of a step."""
_FORMS: Final = (
    ("reset", 2, "(observation, info)"),
    ("step", 5, "(observation, reward, terminated, truncated, info)"),
)
_TRUTH: Final = (bool, np.bool_)
_MOST_FAILURES: Final = 5
"""Failures in a row that end the process; an episode that ends, or SOUND_STEPS steps, end the row."""
_SOUND_STEPS: Final = 100
_MOST_SHOWN: Final = 200


class Slot(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose steps fail without ending the process.

    Its observations are copied at once: the next slot may write into memory that all share. It resets without
    options: Gymnasium passes `{}` where it resets some of several. Of its infos only the masks are kept, as
    one flat array, since Gymnasium cannot stack every value.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], *, name: str, mask_key: str, action_space: Space
    ) -> None:
        """name: the environment's id. mask_key: as `environment.mask_key`. action_space: as data."""
        super().__init__(env)
        self._check_forms(env)
        self._name, self._mask_key, self._masked_space = name, mask_key, action_space
        space = env.observation_space
        self._is_array = isinstance(space, gym_spaces.Box)
        self._form = (space.shape, space.dtype)
        self._is_finite = _finite_check(space)
        self._observation: Any = None
        self._failures = self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self._steps = 0
        while True:
            try:
                observation, info = self.env.reset(seed=seed, options=options or None)
            except _OURS:
                raise
            except _RAISED as error:
                self._count("reset", _described(error))
                self._make_again()
                continue
            self._check_observation("reset", observation)
            if self._is_finite(observation):
                break
            self._count("reset", f"it showed {_shown(observation)}")
        self._observation = self._copied(observation)
        return self._observation, self._kept("reset", info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            returned: Any = self.env.step(action)
        except _OURS:
            raise
        except _RAISED as error:
            return self._failed(_described(error))
        observation, reward, terminated, truncated, info = returned
        if not isinstance(reward, float):
            reward = self._number("reward", reward)
        if not isinstance(terminated, _TRUTH):
            terminated = bool(self._number("terminated", terminated))
        if not isinstance(truncated, _TRUTH):
            truncated = bool(self._number("truncated", truncated))
        self._check_observation("step", observation)
        if not math.isfinite(reward):
            return self._failed(f"reward={reward}")
        # A terminated episode's last observation has no value and may be anything.
        if not terminated and not self._is_finite(observation):
            return self._failed(f"it showed {_shown(observation)}")
        self._steps += 1
        if terminated or truncated or self._steps == _SOUND_STEPS:
            self._failures = 0
        self._observation = self._copied(observation)
        return self._observation, reward, terminated, truncated, self._kept("step", info)

    def _check_forms(self, env: gymnasium.Env[Any, Any]) -> None:
        """Check what the environment returns before Gymnasium's wrappers unpack it."""
        while isinstance(env, gymnasium.Wrapper) and type(env).__module__.startswith("gymnasium.wrappers."):
            env = env.env
        for method, length, form in _FORMS:
            setattr(env, method, partial(self._formed, getattr(env, method), method, length, form))

    def _formed(
        self, call: Callable[..., Any], method: str, length: int, form: str, *given: Any, **by_name: Any
    ) -> Any:
        returned = call(*given, **by_name)
        is_formed = isinstance(returned, tuple) and len(returned) == length
        if not is_formed or (method == "reset" and not isinstance(returned[1], Mapping)):
            self._refuse(method, returned, f"return {form}, info a dict")
        return returned

    def _failed(self, why: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        cause = self._count("step", why)
        return self._observation, 0.0, False, True, {FAILED: cause}

    def _count(self, method: str, why: str) -> str:
        cause = f"environment.id={self._name!r}: {method}: {why}"
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            raise Fatal(f"{cause} ({self._failures} failures in a row); correct the environment")
        return cause

    def _make_again(self) -> None:
        """Replace an environment that cannot be reset."""
        specification = self.env.spec
        if specification is None:
            return
        try:
            self.env.close()
            self.env = gymnasium.make(specification)
            self._check_forms(self.env)
        except _RAISED as error:
            self._count("constructor", _described(error))

    def _kept(self, method: str, info: Any) -> dict[str, Any]:
        if not self._mask_key:
            return {}
        given = info.get(self._mask_key) if isinstance(info, Mapping) else None
        if given is None:
            return {}
        try:
            return {self._mask_key: flat_mask(self._masked_space, given)}
        except (TypeError, ValueError, KeyError) as error:
            key = self._mask_key
            self._refuse(method, given, f"info[{key!r}] is no mask of the action space ({error})", error)

    def _number(self, what: str, value: Any) -> float:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            self._refuse("step", value, f"{what} must be one number")
        return float(array.item())

    def _check_observation(self, method: str, observation: Any) -> None:
        if (
            self._is_array
            and isinstance(observation, np.ndarray)
            and (observation.shape, observation.dtype) == self._form
        ):
            return
        wrong = _difference(self.env.observation_space, observation, "observation")
        if wrong:
            self._refuse(method, observation, f"{wrong}; show what observation_space states")

    def _refuse(self, method: str, value: Any, remedy: str, error: BaseException | None = None) -> NoReturn:
        raise ConfigurationError(
            f"environment.id={self._name!r}: {method} returned {_shown(value)}: {remedy}, or wrap the "
            "environment"
        ) from error

    def _copied(self, observation: Any) -> Any:
        if self._is_array and isinstance(observation, np.ndarray):
            return observation.copy()
        return copy.deepcopy(observation)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _finite_check(space: gymnasium.Space[Any]) -> Callable[[Any], bool]:
    """Return a function of an observation: whether all of its real numbers are finite."""
    match space:
        case gym_spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return _is_finite
        case gym_spaces.Dict():
            return _all_of({key: _finite_check(part) for key, part in space.spaces.items()})
        case gym_spaces.Tuple():
            return _all_of({index: _finite_check(part) for index, part in enumerate(space.spaces)})
        case _:
            return _always


def _always(_: Any) -> bool:
    return True


def _all_of(checks: dict[Any, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    real = {key: check for key, check in checks.items() if check is not _always}
    if not real:
        return _always
    return lambda observation: all(check(observation[key]) for key, check in real.items())


def _is_finite(value: Any) -> bool:
    # The sum of squares is not finite where an element is not; a finite element may be too large to square.
    flat = np.asarray(value).reshape(-1)
    return math.isfinite(flat.dot(flat)) or bool(np.isfinite(flat).all())


def _difference(space: gymnasium.Space[Any], value: Any, path: str) -> str:
    """Return how the form of a value, not its range, differs from its space; "" where it does not."""
    match space:
        case gym_spaces.Dict():
            if not isinstance(value, Mapping):
                return f"{path} is no dict"
            missing = space.spaces.keys() - value.keys()
            if missing:
                return f"{path} lacks {sorted(map(str, missing))}"
            parts = ((part, value[key], f"{path}/{key}") for key, part in space.spaces.items())
        case gym_spaces.Tuple():
            if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
                return f"{path} is no tuple of {len(space.spaces)}"
            parts = (
                (part, one, f"{path}/{n}") for n, (part, one) in enumerate(zip(space, value, strict=True))
            )
        case _:
            return _array_difference(space, value, path)
    return next((wrong for part in parts if (wrong := _difference(*part))), "")


def _array_difference(space: gymnasium.Space[Any], value: Any, path: str) -> str:
    try:
        array: NDArray[Any] = np.asarray(value)
    except ValueError:
        return f"{path} is no array"
    if space.shape is not None and array.shape != space.shape:
        return f"{path} has shape {array.shape} and not {space.shape}"
    if space.dtype is not None and not np.can_cast(array.dtype, space.dtype, "same_kind"):
        return f"{path} has dtype {array.dtype}, which does not fit {space.dtype}"
    return ""
