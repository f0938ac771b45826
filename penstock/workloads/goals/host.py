"""The simulated host: tables of the effect of every goal in each of its 72 states, and of arriving faults.

    cache    0–2, leaks by one level     log   0–3, grows by one level, hard to rotate under load
    load     0–2, comes and goes         service   up or down; with a full log it hardly starts

Neglect never pays: where a level is full, no further fault arrives whose repair would earn a reward.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

# ---- What every executor, simulated or of a live host, returns: readings and outcomes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Shares from 0 to 1 of a host, day and week included; `processes`: hundreds of them."""

    cpu: float
    memory: float
    disk: float
    processes: float
    day: float
    weekday: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a goal. took_s: seconds. output, error: bounded by the executor."""

    success: bool
    took_s: float
    output: str = ""
    error: str = ""


# ---- The observation of a host: its readings, and the outcomes of earlier goals.

NUMBERS: Final = 10
_RECENT: Final = 10
_LONG_STEPS: Final = 50


class History:
    """The outcomes of an episode's goals, as numbers."""

    def __init__(self, goals: tuple[str, ...]) -> None:
        self._goals = goals
        self.clear()

    @property
    def width(self) -> int:
        return NUMBERS + len(self._goals)

    def clear(self) -> None:
        self._recent: deque[Outcome] = deque(maxlen=_RECENT)
        self._since, self._last = 0, ""

    def idle(self) -> None:
        self._since += 1

    def note(self, goal: str, outcome: Outcome) -> None:
        self._recent.append(outcome)
        self._since, self._last = 0, goal

    def observation(self, readings: Readings) -> NDArray[np.float32]:
        """Return the observation, float32 [width], each number from 0 to about 1."""
        count = len(self._recent) or 1
        numbers = [
            readings.cpu,
            readings.memory,
            readings.disk,
            readings.processes,
            sum(one.success for one in self._recent) / count,
            min(sum(one.took_s for one in self._recent) / count / 5, 1.0),
            sum(bool(one.error) for one in self._recent) / count,
            min(self._since / _LONG_STEPS, 1.0),
            readings.day,
            readings.weekday,
        ]
        return np.array([*numbers, *(float(goal == self._last) for goal in self._goals)], np.float32)


# ---- The goals of the simulated host, in the order of the actions of `Goals-v0`; 0 is to do nothing.

NOTHING: Final = "nothing"
GOALS: Final = (
    "rotate_logs",
    "archive_logs",
    "clear_cache",
    "compact_memory",
    "restart_service",
    "reinstall_service",
    "shed_load",
    "add_workers",
    "check_disks",
    "write_report",
)
ACTIONS: Final = (NOTHING, *GOALS)
CACHES: Final = 3
LOGS: Final = 4
LOADS: Final = 3


class HostState(NamedTuple):
    """A state of the host, with the levels of the module's table; `down` 0 or 1."""

    cache: int
    log: int
    load: int
    down: int


STATES: Final = tuple(
    HostState(*levels) for levels in itertools.product(range(CACHES), range(LOGS), range(LOADS), range(2))
)
HEALTHY: Final = HostState(0, 0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class HostModel:
    """The host's tables, over A actions and S states.

    success: float64 [A, S], probability of success. took_s: float64 [A, S], seconds that the action takes.
    mended: int64 [A, S], state after a success. arrivals: float64 [S, S], which state faults lead to.
    """

    success: NDArray[np.float64]
    took_s: NDArray[np.float64]
    mended: NDArray[np.int64]
    arrivals: NDArray[np.float64]


@cache
def host_model() -> HostModel:
    outcomes = [[_outcome(action, state) for state in STATES] for action in ACTIONS]
    return HostModel(
        success=np.array([[one[0] for one in row] for row in outcomes]),
        took_s=np.array([[one[1] for one in row] for row in outcomes]),
        mended=np.array([[STATES.index(one[2]) for one in row] for row in outcomes]),
        arrivals=np.array([_arrivals(state) for state in STATES]),
    )


def _outcome(action: str, state: HostState) -> tuple[float, float, HostState]:
    """Return the probability of success, the seconds, and the state after a success."""
    match action:
        case "rotate_logs":
            works = 0.95 if state.load < LOADS - 1 else 0.6
            return works * (state.log > 0), 0.1 + 0.2 * state.log, state._replace(log=0)
        case "archive_logs":
            return 0.98 * (state.log > 1), 2.0, state._replace(log=max(state.log - 1, 0))
        case "clear_cache":
            return 0.95 * (state.cache > 0), 0.1, state._replace(cache=0)
        case "compact_memory":
            return 0.8 * (state.cache > 0), 1.0, state._replace(cache=0)
        case "restart_service":
            works = 0.9 if state.log < LOGS - 1 else 0.05
            return works * state.down, 0.3, state._replace(down=0)
        case "reinstall_service":
            return 0.95 * state.down, 4.0, state._replace(down=0)
        case "shed_load":
            return 0.9 * (state.load == LOADS - 1), 0.1, state._replace(load=0)
        case "add_workers":
            return 0.5 * (state.load > 0), 1.5, state._replace(load=max(state.load - 1, 0))
        case _:
            return 0.0, 0.05, state


def _arrivals(state: HostState) -> NDArray[np.float64]:
    """Return the probability of every state after a step in which nothing was done, [S]."""
    cache = _rises(state.cache, CACHES, 0.15)
    log = _rises(state.log, LOGS, 0.2)
    load = dict.fromkeys(range(LOADS), 0.0)
    load[min(state.load + 1, LOADS - 1)] += 0.15
    load[max(state.load - 1, 0)] += 0.1
    load[state.load] += 0.75
    falls = 1.0 if state.down else 0.06
    down = {0: 1 - falls, 1: falls}
    return np.array(
        [cache.get(to.cache, 0) * log.get(to.log, 0) * load[to.load] * down[to.down] for to in STATES]
    )


def _rises(level: int, levels: int, chance: float) -> dict[int, float]:
    if level == levels - 1:
        return {level: 1.0}
    return {level: 1 - chance, level + 1: chance}


# ---- The executor `simulated`: this host, deterministic given its seed.

_STEP_S: Final = 30
"""Seconds of the host's day per step; its first day is a Monday and begins at midnight."""


class SimulatedHost:
    """A host in one of 72 states; begins healthy."""

    goals = GOALS

    def __init__(self) -> None:
        model = host_model()
        self._model = model
        self._arrivals = model.arrivals.cumsum(1)
        self.reset(0)

    @property
    def state(self) -> HostState:
        return STATES[self._state]

    def reset(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._state, self._steps = STATES.index(HEALTHY), 0

    def read(self) -> Readings:
        state = self.state
        return Readings(
            cpu=0.1 + 0.4 * state.load,
            memory=0.2 + 0.35 * state.cache,
            disk=0.1 + 0.28 * state.log,
            processes=1.0 - 0.5 * state.down,
            day=self._steps * _STEP_S / 86_400 % 1,
            weekday=0.0,
        )

    def idle(self) -> None:
        self._steps += 1
        drawn = np.searchsorted(self._arrivals[self._state], self._random.random(), side="right")
        self._state = min(int(drawn), len(STATES) - 1)

    def carry_out(self, goal: str) -> Outcome:
        action = ACTIONS.index(goal)
        success = bool(self._random.random() < self._model.success[action, self._state])
        took_s = float(self._model.took_s[action, self._state])
        if success:
            self._state = int(self._model.mended[action, self._state])
        self.idle()
        return Outcome(success=success, took_s=took_s, error="" if success else "there was nothing to mend")


# ---- Rewards: −0.01 for each step, +1 for success, −0.5 for failure, +0.2 for a fast success.


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalReward:
    """Rewards of a step, which add up. fast: of a success within `fast_s`. Doing nothing earns `step`."""

    step: float = -0.01
    success: float = 1.0
    failure: float = -0.5
    fast: float = 0.2
    fast_s: float = 0.5

    def of(self, outcome: Outcome | None) -> float:
        """Return the reward of one step. outcome: of the goal that was tried; None: nothing was done."""
        if outcome is None:
            return self.step
        if not outcome.success:
            return self.step + self.failure
        return self.step + self.success + (self.fast if outcome.took_s < self.fast_s else 0.0)
