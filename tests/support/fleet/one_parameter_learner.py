"""The shipped learner process with an algorithm of one parameter and no environment.

Everything but the mathematics is what a run has: `penstock.learner.entry.main`, its threads, lease,
feed, checkpoints and publisher. The parameter is the sum of the valid rewards trained, in float64, and the
state counts the valid steps of each session: a fragment that was trained twice or left out shows.

    python -m tests.support.fleet.one_parameter_learner --redis URL --run-dir DIR [--run NAME] [--resume]
        [--allow-loss] [--set section.key=value ...] [--observation-floats K] [--pace FILE]

Observations are Box(K), actions Discrete(2). FILE holds the seconds that an update takes, and is read
before each one: a test makes the learner slow, and fast again.
"""

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config import settings as configuration
from penstock.config.settings import OnPolicySection, Settings, dump
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Update
from penstock.learner.batch import Batch
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.entry import main
from penstock.learner.model import Model, model_of
from penstock.protocol.spaces import Box, Discrete, Space
from penstock.protocol.specification import Probe
from penstock.protocol.tensor import Array
from penstock.runtime.lifecycle import Lifecycle, leave, run_service

RUN: Final = "chaos"
DEFAULTS: Final[dict[str, Any]] = {
    "run": RUN,
    "environment": {"id": "none", "count": 2},
    "actor": {"unroll_length": 4, "count": 1},
    "algorithm": {"batch_steps": 32},
    "learner": {"checkpoint_interval_s": 0.5, "stop_at_target": False},
    "evaluation": {"timeout_s": 1},
}
"""Fragments of 4 × 2 steps, batches of four of them, no end; the layer below `--set`."""


class Parameter(nn.Module):
    """What is published."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)

    def log_prob(self, _observation: Mapping[str, Array], _action: Mapping[str, Array]) -> Array:
        return np.zeros(0, np.float32)


class OneParameter(Algorithm):
    """See the module. Nothing is stale unless `algorithm.stale_after` is set."""

    def __init__(self, section: OnPolicySection, pace: Path | None = None) -> None:
        self.stale_after = section.stale_after
        self._section = section
        self._pace = pace
        self._parameter = Parameter()
        self._steps_of: Counter[int] = Counter()

    def budget(self, fragment_charge: int) -> int:
        return max(fragment_charge, (self._section.staleness + 1) * self._section.batch_steps)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        return charge >= self._section.batch_steps

    def update(self, batch: Batch, *, progress: float) -> Update:
        if self._pace is not None:
            time.sleep(float(self._pace.read_text()))
        steps = int(batch.valid.sum())
        self._parameter.value.add_(batch.reward.double().sum())
        for (session, _), count in zip(batch.slots, batch.valid.sum(0).tolist(), strict=True):
            self._steps_of[session] += count
        self._updates += 1
        return Update(applied=True, reason="", steps=steps, gradient_steps=1, metrics={})

    def published_modules(self) -> dict[str, nn.Module]:
        return {"default": self._parameter}

    def state(self) -> AlgorithmState:
        steps_of = {str(session): steps for session, steps in self._steps_of.items()}
        return AlgorithmState(
            tensors={"parameter": self._parameter.value.clone()},
            numbers={"updates": self._updates, "steps_of": steps_of},
        )

    def load(self, state: AlgorithmState) -> None:
        value: Tensor = state.tensors["parameter"]
        self._parameter.value.copy_(value)
        self._updates = int(state.numbers["updates"])
        self._steps_of = Counter({int(k): int(v) for k, v in state.numbers["steps_of"].items()})


def spaces(observation_floats: int) -> tuple[Space, Space]:
    bound = np.ones(observation_floats, np.float32)
    return Box(-bound, bound), Discrete(2)


def make_model(settings: Settings, observation_floats: int, pace: Path | None = None) -> Model:
    section = settings.algorithm
    assert isinstance(section, OnPolicySection)
    return model_of(
        settings,
        OneParameter(section, pace),
        Parameter(),
        spaces(observation_floats),
        Probe({}, {}),
        torch.device("cpu"),
        None,
    )


def resolve(run: str, assignments: Sequence[str]) -> Settings:
    said = [configuration.parse_assignment(text) for text in assignments]
    return configuration.load([DEFAULTS, configuration.from_environment(), {"run": run}, *said])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="one_parameter_learner")
    parser.add_argument("--redis", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--run", default=RUN)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--allow-loss", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--observation-floats", type=int, default=4)
    parser.add_argument("--pace", type=Path)
    return parser.parse_args()


def _body(lifecycle: Lifecycle) -> int:
    given = _arguments()
    settings = resolve(given.run, given.set)
    given.run_dir.mkdir(parents=True, exist_ok=True)
    config = given.run_dir / "config.toml"
    if not config.exists():
        config.write_text(dump(settings))
    return main(
        lifecycle,
        settings,
        redis_url=given.redis,
        run_dir=given.run_dir,
        resumption=ResumeOptions(resume=given.resume, allow_loss=given.allow_loss),
        make=lambda settings: make_model(settings, given.observation_floats, given.pace),
    )


if __name__ == "__main__":
    leave(run_service(_body, "learner"))
