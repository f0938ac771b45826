"""What a log answers when another action is tried than the logged one: three declared modes.

matched  where the log has another action, nothing is known. In a log of independent decisions a logged
action is accepted with probability c / propensity, c the smallest propensity of the log, and
earns its reward / c; any other earns 0. So the expected reward of every action is the true one
(Li et al. 2011). In a log of longer episodes another action ends the episode.
full     `metadata.outcomes` of every line has the result of every action
model    a reward model that is fitted on the log answers, for better or worse
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.off_policy import ridge
from penstock.workloads.goals.traces.trace_index import Log
from penstock.workloads.goals.traces.trace_line import Result, RewardWeights, Trace

# ---- A trace as the vector that a policy sees.

GOAL_WIDTH: Final = 16
_LAST_WIDTH: Final = 4


@dataclass(frozen=True, slots=True)
class Encoding:
    """How traces become vectors, and actions numbers: names of both, in their order."""

    numbers: tuple[str, ...]
    actions: tuple[str, ...]

    @property
    def width(self) -> int:
        return len(self.numbers) + GOAL_WIDTH + _LAST_WIDTH

    def observation(self, trace: Trace, before: Result | None) -> NDArray[np.float32]:
        """Return what is seen, float32 [width]. before: result of the decision before it."""
        numbers = [trace.observation[name] for name in self.numbers]
        return np.array([*numbers, *_hashed(trace.goal), *_last(before)], np.float32)

    def episodes(self, episodes: Sequence[Sequence[Trace]]) -> NDArray[np.float32]:
        """Return what was seen at every decision, float32 [n, width], episode by episode."""
        rows = [
            self.observation(trace, episode[step - 1].result if step else None)
            for episode in episodes
            for step, trace in enumerate(episode)
        ]
        return np.stack(rows) if rows else np.zeros((0, self.width), np.float32)

    def action(self, name: str) -> int:
        """Return the number of an action; raises ValueError that lists the known ones."""
        if name not in self.actions:
            raise ValueError(f"action={name!r}: not one of {', '.join(self.actions)}")
        return self.actions.index(name)


@lru_cache(maxsize=1024)
def _hashed(goal: str) -> tuple[float, ...]:
    """Words of a text as a signed hash of length 1 (Weinberger et al. 2009); zeros without words."""
    vector = [0.0] * GOAL_WIDTH
    for word in re.findall(r"\w+", goal.lower()):
        digest = blake2b(word.encode(), digest_size=8).digest()
        vector[digest[0] % GOAL_WIDTH] += 1.0 if digest[1] & 1 else -1.0
    length = math.hypot(*vector) or 1.0
    return tuple(one / length for one in vector)


def _last(result: Result | None) -> list[float]:
    if result is None:
        return [0.0] * _LAST_WIDTH
    took = math.log1p(result.execution_time_ms or 0.0)
    return [1.0, float(result.success), float(bool(result.error)), took]


MODES: Final = ("matched", "full", "model")


@dataclass(frozen=True, slots=True)
class Reply:
    """reward: of the action. known: whether the log says what became of it; else the episode cannot go on."""

    reward: float
    known: bool


Answers = Callable[[Trace, NDArray[np.float32], int, float], Reply]
"""(decision of the log, what is seen, float32 [width], action, uniform draw in [0, 1)) → what it earns."""


def answers(mode: str, log: Log, encoding: Encoding, weights: RewardWeights) -> Answers:
    """Return the answers of a mode; raises ConfigurationError where the log does not have what it needs."""
    match mode:
        case "matched":
            return _accepted(log, encoding, weights) if log.independent else _matched(encoding, weights)
        case "full":
            return _full(log, encoding, weights)
        case "model":
            return _modelled(log, encoding, weights)
        case _:
            raise ConfigurationError(f"environment.kwargs.mode={mode!r}: must be one of {', '.join(MODES)}")


def _matched(encoding: Encoding, weights: RewardWeights) -> Answers:
    def reply(trace: Trace, _seen: NDArray[np.float32], action: int, _draw: float) -> Reply:
        if encoding.action(trace.action) != action:
            return Reply(0.0, known=False)
        return Reply(weights.reward(trace.result), known=True)

    return reply


def _accepted(log: Log, encoding: Encoding, weights: RewardWeights) -> Answers:
    lacking = next((one for one in log.traces if one.propensity is None), None)
    if lacking is not None:
        raise ConfigurationError(
            f"environment.kwargs.mode='matched': episode {lacking.episode!r} has no propensity, by which "
            "logged actions are accepted; log it, or use mode='model'"
        )
    least = min(one.propensity or 1.0 for one in log.traces)

    def reply(trace: Trace, _seen: NDArray[np.float32], action: int, draw: float) -> Reply:
        if encoding.action(trace.action) != action or draw >= least / (trace.propensity or 1.0):
            return Reply(0.0, known=False)
        return Reply(weights.reward(trace.result) / least, known=True)

    return reply


def _full(log: Log, encoding: Encoding, weights: RewardWeights) -> Answers:
    if not log.independent:
        raise ConfigurationError(
            "environment.kwargs.mode='full': the log has episodes of several decisions; what follows "
            "another action is not in it; use 'matched' or 'model'"
        )
    rewards = {trace.episode: _outcomes(trace, encoding.actions, weights) for trace in log.traces}
    return lambda trace, _seen, action, _draw: Reply(rewards[trace.episode][action], known=True)


def _outcomes(trace: Trace, actions: Sequence[str], weights: RewardWeights) -> list[float]:
    told: Any = trace.metadata.get("outcomes")
    try:
        return [weights.reward(Result.model_validate(told[name])) for name in actions]
    except (KeyError, TypeError, ValidationError) as error:
        raise ConfigurationError(
            f"environment.kwargs.mode='full': episode {trace.episode!r}: metadata.outcomes must have the "
            f"result of each of {', '.join(actions)}: {str(error)[:200]}"
        ) from error


def _modelled(log: Log, encoding: Encoding, weights: RewardWeights) -> Answers:
    seen = encoding.episodes(log.episodes).astype(np.float64)
    action = np.array([encoding.action(trace.action) for trace in log.traces])
    reward = np.array([weights.reward(trace.result) for trace in log.traces])
    centre, scale = seen.mean(0), seen.std(0) + 1e-6
    inputs, overall = np.clip((seen - centre) / scale, -10, 10), float(reward.mean())
    fitted = [action == one for one in range(len(encoding.actions))]
    # The regression is linear: its values at 0 and at the unit vectors say it all.
    asked = np.vstack([np.zeros(inputs.shape[1]), np.eye(inputs.shape[1])])
    values = [ridge(inputs[rows], reward[rows], asked, overall) for rows in fitted]
    level = np.array([one[0] for one in values])
    slope = np.array([one[1:] - one[0] for one in values])

    def reply(_trace: Trace, seen: NDArray[np.float32], action: int, _draw: float) -> Reply:
        inputs = np.clip((seen.astype(np.float64) - centre) / scale, -10, 10)
        return Reply(float(level[action] + slope[action] @ inputs), known=True)

    return reply
