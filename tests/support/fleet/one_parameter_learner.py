"""The shipped learner process with an algorithm of one parameter, and what tests look at.

Everything but the mathematics is what a run has: `penstock.learner.entry.main`, its threads, lease,
feed, checkpoints and publisher. The parameter is the sum of the valid rewards trained, in float64, and the
state counts the valid steps of each session: a fragment that was trained twice or left out shows.

    python -m tests.support.fleet.one_parameter_learner --redis URL --run-dir DIR [--run NAME] [--resume]
        [--allow-loss] [--set section.key=value ...] [--observation-floats K] [--pace FILE]

Observations are Box(K), actions Discrete(2). FILE holds the seconds that an update takes, and is read
before each one: a test makes the learner slow, and fast again. The run in Redis, its checkpoints and the
actors' journals are read from the stored data itself, not through the code under test.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import redis
import torch
from torch import Tensor, nn

from penstock.broker.log import keys
from penstock.broker.log.replies import Commit
from penstock.config import settings as configuration
from penstock.config.settings import OnPolicySection, Settings, dump
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Update
from penstock.learner.batch import Batch
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore
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


CHARGE: Final = int(DEFAULTS["environment"]["count"] * DEFAULTS["actor"]["unroll_length"])
"""Valid steps of a simulated actor's fragment, each with reward 1."""

_EXPIRING: Final = keys.STAGING.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The run in Redis at one instant."""

    epoch: int
    version: int
    update: int
    settled: int
    commits: tuple[Commit, ...]

    @property
    def committed(self) -> int:
        return self.commits[-1].position if self.commits else 0

    @property
    def newest_id(self) -> str:
        return self.commits[-1].checkpoint_id if self.commits else ""


class View:
    """Reads the run from Redis, beside everybody else; use as a context manager."""

    def __init__(self, url: str) -> None:
        self._redis: Any = redis.Redis.from_url(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._redis.close()

    def snapshot(self) -> RunSnapshot:
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(keys.STATE, "epoch", "version", "update", "settled")
            pipeline.lrange(keys.COMMITS, 0, -1)
            state, commits = pipeline.execute()
        epoch, version, update, settled = (int(value or 0) for value in state)
        return RunSnapshot(
            epoch=epoch,
            version=version,
            update=update,
            settled=settled,
            commits=tuple(Commit.decode(text) for text in commits),
        )

    def sessions(self) -> int:
        return int(self._redis.hget(keys.STATE, "session") or 0)

    def everything(self) -> dict[bytes, Any]:
        names = [name for name in self._redis.scan_iter(count=1000) if not name.startswith(_EXPIRING)]
        return {name: self._read(name) for name in names}

    def _read(self, name: bytes) -> Any:
        kind = self._redis.type(name)
        match kind:
            case b"string":
                return self._redis.get(name)
            case b"hash":
                return self._redis.hgetall(name)
            case b"set":
                return self._redis.smembers(name)
            case b"zset":
                return self._redis.zrange(name, 0, -1, withscores=True)
            case b"list":
                return self._redis.lrange(name, 0, -1)
            case b"stream":
                return self._redis.xrange(name)
            case b"none":
                return None  # it went between the list of names and now
        raise AssertionError(f"{name!r} is a {kind!r}")


class Versions:
    """Watches the pointer of the weights: it never goes back, and one version is one update for ever."""

    def __init__(self) -> None:
        self._update_of: dict[int, int] = {}
        self._newest = 0

    def see(self, snapshot: RunSnapshot) -> None:
        assert snapshot.version >= self._newest, f"version {snapshot.version} after {self._newest}"
        self._newest = snapshot.version
        assert self._update_of.setdefault(snapshot.version, snapshot.update) == snapshot.update


def newest(run_dir: Path, snapshot: RunSnapshot) -> Checkpoint:
    """The newest checkpoint that counts; raises Damaged unless it is whole."""
    commit = snapshot.commits[-1]
    return CheckpointStore(run_dir / "checkpoints", 3).read(commit.checkpoint_id, commit.manifest_sha256)


def last_on_disk(run_dir: Path) -> Checkpoint:
    store = CheckpointStore(run_dir / "checkpoints", 3)
    return store.read(store.ids()[0])


def journalled(folder: Path) -> Counter[int]:
    """Fragments that the actors saw acknowledged, by session; a resent one counts once."""
    seen: set[tuple[int, int]] = set()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry: dict[str, Any] = json.loads(line)
            seen.add((int(entry["session"]), int(entry["sequence"])))
    return Counter(session for session, _ in seen)


def check_trained_once(run_dir: Path, checkpoint: Checkpoint, account: Path | None = None) -> None:
    """The parameter, the steps of each session and the books of the last checkpoint say the same.

    account: `learner.json`. Nothing may have been dropped. What a session sent and the parameter lacks is
    still in the log.
    """
    totals, numbers = checkpoint.state["totals"], checkpoint.state["numbers"]
    assert totals["dropped"] == {}
    assert float(checkpoint.tensors["parameter"]) == totals["env_steps"] == CHARGE * totals["trained"]
    steps_of = {int(session): int(steps) for session, steps in numbers["steps_of"].items()}
    assert sum(steps_of.values()) == totals["env_steps"]
    acked = journalled(run_dir / "journals")
    assert steps_of.keys() <= acked.keys()
    lacking = {session: CHARGE * count - steps_of.get(session, 0) for session, count in acked.items()}
    assert all(steps >= 0 for steps in lacking.values()), f"trained more than was sent: {lacking}"
    ledger = json.loads((account or run_dir / "learner.json").read_text())["ledger"]
    assert ledger["balanced"], ledger
    assert sum(lacking.values()) == CHARGE * ledger["resident"], (lacking, ledger)


if __name__ == "__main__":
    leave(run_service(_body, "learner"))
