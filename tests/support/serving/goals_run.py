"""A served run whose policy proposes goals that are commands: each leaves a file every time it runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from penstock.config.settings import ActorSection, PolicySection
from penstock.launch.run.supervisor import penstock
from penstock.policy.policy import Policy, build
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.specification import Probe, RunSpecification
from penstock.workloads.goals.host import NUMBERS
from tests.support.run.serving_run import RUN, ServedRun

GOALS: Final = ("leave_a_file", "leave_another")
WIDTH: Final = NUMBERS + len(GOALS)
OBSERVATION: Final = Box(np.full(WIDTH, -1e6, np.float32), np.full(WIDTH, 1e6, np.float32))
ACTION: Final = Discrete(len(GOALS) + 1)


@dataclass(frozen=True)
class GoalsRun(ServedRun):
    """A run whose policy draws `leave_a_file` in nine of ten cases, *nothing* hardly ever."""

    def specification(self) -> RunSpecification:
        """The spaces of two goals."""
        return RunSpecification(
            run=RUN, seed=0, environment_json="{}", policy_json=self.section.canonical_json(),
            actor_json=ActorSection().canonical_json(), evaluation_json="{}", workload="control",
            observation_space=OBSERVATION, action_space=ACTION, schema=fragment_schema(OBSERVATION, ACTION),
            probe=Probe({}, {}), unroll_length=4, lock_step=False, session_timeout_ms=30_000,
        )  # fmt: skip

    def build(self, seed: int) -> Policy:
        """What it sees hardly matters; the bias does."""
        policy = build(OBSERVATION, ACTION, self.section, seed)
        with torch.no_grad():
            policy.actor_head.weight.zero_()
            policy.actor_head.bias.copy_(torch.tensor([-6.0, 0.0, -2.2]))
        return policy


def goals_run(folder: Path, **policy: Any) -> GoalsRun:
    """A run with version 1, active."""
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
    """How often a goal ran."""
    return len(list((folder / "place").glob("done.*")))


def injector_words(address: str, folder: Path, *words: str) -> tuple[str, ...]:
    """A command that injects as fast as it can."""
    return penstock(
        "inject", "--server", address, "--goals", str(folder / "goals.toml"), "--folder",
        str(folder / "injector"), "--interval", "0", *words,
    )  # fmt: skip


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Of a file of the injector."""
    path = folder / "injector" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
