"""Steps any Gymnasium VectorEnv and hides when it resets.

Gymnasium 1.x resets an ended episode in one of three ways, named in `metadata["autoreset_mode"]`:

  NEXT_STEP   the step that ends returns the true last observation; the next step ignores its action,
              returns the first observation of the new episode and is not experience (`valid` False)
  SAME_STEP   the step that ends returns the new episode's first observation, the true last one lies
              in `infos["final_obs"]`
  DISABLED    the step that ends returns the true last observation and the caller resets

In every mode `Stepped` holds what to act on next, what was experience, where episodes begin, and the true
last observation of every episode that ended. Action masks, where the environment gives some, are part of the
observation to act on. A slot whose step failed (`FAILED`) is reset: the step is not experience (`valid`
False), and its episode is dropped (`lost`). Waits only for the environment; its errors pass through.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from penstock.actor.acting.masks import Masks
from penstock.config.settings import ConfigurationError
from penstock.protocol.spaces import Dict, Space, Tuple, flatten, leaves
from penstock.protocol.tensor import Array
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal

Observation = dict[str, Any]
OBSERVATION = "observation"
FAILED: Final = "penstock.failed"
"""Key of infos: object array [N], for each slot the cause for which its step failed, or None.

A step that failed is reported as truncated, and is not experience.
"""
_COMPLAIN_EVERY_S: Final = 10.0
_END_S: Final = 1.0
"""How long exit codes are awaited, in all, after a pipe was closed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """K episodes that ended in one step: slots int [K] ascending, true last observations by path [K, ...].

    Masks are among them where the environment gave some.
    """

    slots: NDArray[np.intp]
    observation: Observation


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of N slots.

    observation: by path [N, ...], what to act on next, masks among it; may be overwritten by the next step.
    reward: float [N].  terminated, truncated: bool [N].
    valid: bool [N], False where the step only reset; None: all are experience.
    ended: None when no episode ended.
    begins: bool [N], slots whose episode begins with `observation`; None: none.
    lost: bool [N], slots whose step failed, so that their episode is dropped; None: none.
    """

    observation: Observation
    reward: NDArray[np.floating[Any]]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_] | None
    ended: Ended | None
    begins: NDArray[np.bool_] | None = None
    lost: NDArray[np.bool_] | None = None


class Stepper:
    """A vector environment whose observations are dictionaries by path. masks: None where it gives none."""

    def __init__(
        self, environment: VectorEnv[Any, Any, Any], observation_space: Space, masks: Masks | None = None
    ) -> None:
        self.environment = environment
        self._masks = masks
        self.slots = int(environment.num_envs)
        self._space = observation_space
        self._action_space = batch_space(environment.single_action_space, self.slots)
        self._nested = isinstance(observation_space, Dict | Tuple)
        self._paths = [path for path, _ in leaves(observation_space, OBSERVATION)]
        self._resetting: NDArray[np.bool_] | None = None
        self._complained_s, self._failures = -_COMPLAIN_EVERY_S, 0
        self._finish = self._finisher(autoreset_mode(environment))

    def reset(self, seeds: Sequence[int]) -> Observation:
        """First observations. seeds: per slot; an entry point without `seeds`="each" takes the first."""
        self._resetting = None
        own_loop = hasattr(self.environment.unwrapped, "env_fns")  # SyncVectorEnv and AsyncVectorEnv
        takes_each = own_loop or self.environment.metadata.get("seeds") == "each"
        seed: Any = list(seeds) if takes_each else seeds[0]
        first = self._flat(*self.environment.reset(seed=seed))
        if self._masks is not None:
            self._masks.check(first, np.ones(self.slots, np.bool_))
        return first

    def step(self, action: Any) -> Stepped:
        own = _typed(self._action_space, action)
        try:
            observation, reward, terminated, truncated, infos = self.environment.step(own)
        except (EOFError, ConnectionError) as error:
            raise Fatal(self._of_processes(error)) from error
        slots = np.logical_or(terminated, truncated).nonzero()[0]
        flat = self._flat(observation, infos)
        if FAILED in infos:
            stepped = self._without_failed(flat, reward, terminated, truncated, infos)
        elif slots.size or self._resetting is not None:
            stepped = self._finish(flat, reward, terminated, truncated, infos, slots)
        else:
            stepped = Stepped(flat, reward, terminated, truncated, None, None)
        if self._masks is not None:
            self._masks.check(stepped.observation, stepped.begins)
        return stepped

    def close(self) -> None:
        try:
            self.environment.close()
        except (EOFError, ConnectionError):  # AsyncVectorEnv waits for the step of a process that has ended
            of_processes: Any = self.environment.unwrapped
            of_processes.closed = True
            for process in of_processes.processes:
                process.terminate()

    def _of_processes(self, error: Exception) -> str:
        """Say how the processes of AsyncVectorEnv ended; an exception of an environment comes as itself."""
        processes = getattr(self.environment.unwrapped, "processes", ())
        for process in processes:
            process.join(_END_S / len(processes))
        ends = {process.exitcode for process in processes if process.exitcode is not None}
        if not ends:
            return f"{self.environment}: step: {error!r}"
        return (
            f"{self.environment}: step: a process of an environment ended with exit code "
            f"{', '.join(map(str, sorted(ends)))}; correct the environment, or see what it prints with "
            "environment.vectorise='sync'"
        )

    def _without_failed(
        self, observation: Observation, reward: Any, terminated: Any, truncated: Any, infos: dict[str, Any]
    ) -> Stepped:
        """Finish a step in which slots failed, as if their episodes had ended, and leave these out."""
        causes = infos[FAILED]
        lost = np.array([cause is not None for cause in causes])
        self._complain(int(lost.sum()), str(next(cause for cause in causes if cause is not None)))
        over = np.logical_or(terminated, truncated).nonzero()[0]
        stepped = self._finish(observation, reward, terminated, truncated, infos, over)
        valid = ~lost if stepped.valid is None else stepped.valid & ~lost
        ended = stepped.ended
        if ended is not None:
            kept = ~lost[ended.slots]
            rows = {path: array[kept] for path, array in ended.observation.items()}
            ended = Ended(ended.slots[kept], rows) if kept.any() else None
        return Stepped(
            stepped.observation,
            np.where(valid, stepped.reward, 0.0),
            stepped.terminated & ~lost,
            stepped.truncated & ~lost,
            valid,
            ended,
            stepped.begins,
            lost,
        )

    def _complain(self, count: int, cause: str) -> None:
        metrics.ENV_FAILURES.inc(count)
        self._failures += count
        if time.monotonic() - self._complained_s >= _COMPLAIN_EVERY_S:
            words = {"cause": cause, "failures": self._failures}
            log.warning("a step of an environment failed; it is reset, its episode is dropped", extra=words)
            self._complained_s = time.monotonic()

    def _flat(self, observation: Any, infos: dict[str, Any]) -> Observation:
        flat = flatten(self._space, observation, OBSERVATION) if self._nested else {OBSERVATION: observation}
        return flat if self._masks is None else flat | self._masks.read(observation, infos)

    def _finisher(self, mode: AutoresetMode) -> Callable[..., Stepped]:
        match mode:
            case AutoresetMode.NEXT_STEP:
                return self._next_step
            case AutoresetMode.SAME_STEP:
                return self._same_step
            case AutoresetMode.DISABLED:
                return self._reset_ended

    def _next_step(
        self, observation: Observation, reward: Any, terminated: Any, truncated: Any, _: Any, slots: Any
    ) -> Stepped:
        valid, begins = self._resetting, None
        if valid is not None:
            reward, begins = np.where(valid, reward, 0.0), ~valid
        self._resetting = None
        ended = None
        if slots.size:
            ended = Ended(slots, _rows(observation, slots))
            if self._masks is not None:
                self._masks.free(observation, slots)
            self._resetting = np.ones(self.slots, np.bool_)
            self._resetting[slots] = False
        return Stepped(observation, reward, terminated, truncated, valid, ended, begins)

    def _same_step(
        self, observation: Observation, reward: Any, terminated: Any, truncated: Any, infos: Any, slots: Any
    ) -> Stepped:
        ended = Ended(slots, self._final(infos, slots))
        return Stepped(observation, reward, terminated, truncated, None, ended, self._are(slots))

    def _reset_ended(
        self, observation: Observation, reward: Any, terminated: Any, truncated: Any, _: Any, slots: Any
    ) -> Stepped:
        ended = Ended(slots, _rows(observation, slots))
        begins = self._are(slots)
        # The reset may write in the arrays that the step returned.
        reward, terminated, truncated = np.array(reward), np.array(terminated), np.array(truncated)
        first = self._flat(*self.environment.reset(options={"reset_mask": begins.copy()}))
        if self._masks is not None:
            self._masks.keep(first, observation, begins)
        return Stepped(first, reward, terminated, truncated, None, ended, begins)

    def _are(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        mask = np.zeros(self.slots, np.bool_)
        mask[slots] = True
        return mask

    def _final(self, infos: dict[str, Any], slots: NDArray[np.intp]) -> Observation:
        """Stack `infos["final_obs"]`, an object array of single observations, by path, with their masks."""
        if "final_obs" not in infos:
            raise ConfigurationError(
                f"{self.environment}: an episode ended without infos['final_obs'], which "
                "AutoresetMode.SAME_STEP promises; return it, or set environment.vectorise='sync'"
            )
        final = infos["final_obs"]
        masks = {} if self._masks is None else self._masks.last(final, infos.get("final_info", {}), slots)
        if not self._nested:
            return {OBSERVATION: np.stack([final[slot] for slot in slots])} | masks
        single = [flatten(self._space, final[slot], OBSERVATION) for slot in slots]
        return {path: np.stack([one[path] for one in single]) for path in self._paths} | masks


def autoreset_mode(environment: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return how the environment resets; raises ConfigurationError when it does not say."""
    mode = environment.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
        raise ConfigurationError(
            f"{environment}: metadata['autoreset_mode']={mode!r}: not one of {known}; "
            "set it in the environment's metadata, or environment.vectorise='sync'"
        ) from None


def _typed(space: gym_spaces.Space[Any], action: Any) -> Any:
    """Copy an action, since the environment may write in it, in the dtypes of its space."""
    match space:
        case gym_spaces.Dict():
            return {key: _typed(part, action[key]) for key, part in space.spaces.items()}
        case gym_spaces.Tuple():
            return tuple(_typed(part, one) for part, one in zip(space.spaces, action, strict=True))
        case _:
            return np.array(action, space.dtype)


def _rows(observation: Observation, slots: NDArray[np.intp]) -> dict[str, Array]:
    # Indexing by an array copies: what the environment writes next does not change it.
    return {path: np.asarray(array)[slots] for path, array in observation.items()}
