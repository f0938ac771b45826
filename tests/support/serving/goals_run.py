import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.settings import PolicySection
from penstock.launch.run.supervisor import penstock
from penstock.policy.policy import Policy, build
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.specification import RunSpecification
from penstock.workloads.goals.host import HEALTHY, NUMBERS, STATES, GoalReward, host_model
from tests.support.run.serving_run import ServedRun


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """value: mean return of an episode that begins healthy. policy: int64 [steps, S], the best actions."""

    value: float
    policy: NDArray[np.int64]


def optimum(steps: int, reward: GoalReward) -> Optimum:
    """Return the optimum of episodes of so many steps, without discounting, backwards from their end."""
    model = host_model()
    succeeds = model.success
    expected = _rewards(reward, succeeds, model.took_s)
    value = np.zeros(len(STATES))
    policy = np.zeros((steps, len(STATES)), np.int64)
    for step in reversed(range(steps)):
        arrived = model.arrivals @ value
        after = succeeds * arrived[model.mended] + (1 - succeeds) * arrived
        best = expected + after
        policy[step] = best.argmax(0)
        value = best.max(0)
    return Optimum(float(value[STATES.index(HEALTHY)]), policy)


def _rewards(
    reward: GoalReward, success: NDArray[np.float64], took_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Expected rewards [A, S]. success: probabilities, took_s: seconds, both [A, S]."""
    well = reward.success + reward.fast * (took_s < reward.fast_s)
    rewards = reward.step + success * well + (1 - success) * reward.failure
    rewards[0] = reward.step
    return rewards


GOALS: Final = ("leave_a_file", "leave_another")
WIDTH: Final = NUMBERS + len(GOALS)
OBSERVATION: Final = Box(np.full(WIDTH, -1e6, np.float32), np.full(WIDTH, 1e6, np.float32))
ACTION: Final = Discrete(len(GOALS) + 1)


@dataclass(frozen=True)
class GoalsRun(ServedRun):
    """A run whose policy draws `leave_a_file` in nine of ten cases, *nothing* hardly ever."""

    def specification(self) -> RunSpecification:
        """The spaces of two goals."""
        return replace(
            super().specification(),
            observation_space=OBSERVATION,
            action_space=ACTION,
            schema=fragment_schema(OBSERVATION, ACTION),
        )

    def build(self, seed: int) -> Policy:
        """What it sees hardly matters; the bias does."""
        policy = build(OBSERVATION, ACTION, self.section, seed)
        with torch.no_grad():
            policy.actor_head.weight.zero_()
            policy.actor_head.bias.copy_(torch.tensor([-6.0, 0.0, -2.2]))
        return policy


def goals_run(folder: Path, **policy: Any) -> GoalsRun:
    made = GoalsRun(folder, section=PolicySection(hidden_sizes=(8,), **policy))
    made.describe()
    made.promote(made.next_version())
    return made


def goals_file(folder: Path, names: tuple[str, ...] = GOALS) -> Path:
    """A file of goals; `done(folder)` counts how often they ran."""
    place = folder / "place"
    place.mkdir()
    goals = "".join(
        f'[[goal]]\nname = "{name}"\nsafe = true\ncommand = ["/usr/bin/mktemp", "done.XXXXXXXX"]\n'
        for name in names
    )
    file = folder / "goals.toml"
    file.write_text(f'folder = "{place}"\nallow = ["/usr/bin/mktemp"]\n{goals}')
    return file


def done(folder: Path) -> int:
    return len(list((folder / "place").glob("done.*")))


def injector_words(address: str, folder: Path, *words: str) -> tuple[str, ...]:
    return penstock(
        "inject", "--server", address, "--goals", str(folder / "goals.toml"), "--folder",
        str(folder / "injector"), "--interval", "0", *words,
    )  # fmt: skip


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "injector" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
