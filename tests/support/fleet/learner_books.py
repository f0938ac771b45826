"""What a test of the one-parameter learner looks at: the run in Redis, its checkpoints, the actors' journals.

Read from the stored data itself, not through the code under test where that can be helped.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import redis

from penstock.broker.log import keys
from penstock.broker.log.replies import Commit
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore
from tests.support.fleet.one_parameter_learner import DEFAULTS

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
