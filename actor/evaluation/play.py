"""Plays whole episodes to measure a policy: seeded environments, one episode of each counts."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.actor.acting.stepper import Stepped, Stepper
from penstock.policy.acting.acting_policy import ActingPolicy, begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode: undiscounted return, length in steps.

    start: number of what it began with, such as a prompt, where several may begin with the same; None: with a
    seed of its own.
    """

    episode_return: float
    length: int
    terminated: bool
    start: int | None = None


def play(
    stepper: Stepper,
    policy: ActingPolicy,
    *,
    episodes: int,
    seed: int,
    deterministic: bool,
    stop: threading.Event,
    on_step: Callable[[], None] = lambda: None,
) -> list[Played] | None:
    """`episodes` episodes in waves of as many as there are slots, the i-th seeded with `seed` + i.

    Each slot plays one episode per wave and what it does afterwards is ignored, so short episodes are not
    counted more often. None when `stop` was set first. A vector entry point takes one seed per wave.
    """
    played: list[Played] = []
    while len(played) < episodes:
        first = seed + len(played)
        wave = _Wave(stepper.slots)
        observation = stepper.reset(range(first, first + stepper.slots)) | policy.initial_state(stepper.slots)
        while wave.is_running:
            if stop.is_set():
                return None
            acted = policy.act(observation, deterministic=deterministic)
            stepped = stepper.step(policy.environment_action(acted.action))
            wave.add(stepped)
            on_step()
            observation = stepped.observation | begun(acted.state, stepped.begins)
        played += wave.episodes()
    return played[:episodes]


class _Wave:
    """The first episode of every slot."""

    def __init__(self, slots: int) -> None:
        self._alive = np.ones(slots, np.bool_)
        self._return = np.zeros(slots, np.float64)
        self._length = np.zeros(slots, np.int64)
        self._terminated: Any = np.zeros(slots, np.bool_)

    @property
    def is_running(self) -> bool:
        return bool(self._alive.any())

    def add(self, stepped: Stepped) -> None:
        self._return += np.where(self._alive, stepped.reward, 0.0)
        self._length += self._alive
        self._terminated |= self._alive & stepped.terminated
        if stepped.ended is not None:
            self._alive[stepped.ended.slots] = False

    def episodes(self) -> list[Played]:
        rows = zip(self._return.tolist(), self._length.tolist(), self._terminated.tolist(), strict=True)
        return [Played(episode_return=r, length=n, terminated=t) for r, n, t in rows]
