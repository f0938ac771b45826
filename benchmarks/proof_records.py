"""Records of learning proofs.

One JSON line each in `benchmarks/results/proofs.jsonl`, only ever appended to.
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.proofs import Proof

ROOT = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
RESULTS: Final = ROOT / "benchmarks" / "results"
CURVE_POINTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of a proof.

    passed: the evaluation reached the threshold within the steps. result: the fields of `summary.json`
    that say how. curve: (environment steps, mean return of the last 100 episodes), at most CURVE_POINTS.
    """

    task: str
    algorithm: str
    variant: str
    seed: int
    command: str
    commit: str
    date: str
    machine: str
    passed: bool
    result: dict[str, Any]
    curve: list[tuple[int, float]]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the same key as the proof's."""
        return self.task, self.algorithm, self.variant, self.seed


Records = dict[tuple[str, str, str, int], Record]
"""By task, algorithm, variant and seed."""


def read(path: Path) -> Records:
    """Return the newest record of every entry; an absent file holds none."""
    if not path.exists():
        return {}
    records = (Record(**json.loads(line)) for line in path.read_text().splitlines() if line)
    return {record.key: record for record in records}


def append(path: Path, record: Record) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def standing(proofs: Iterable[Proof], records: Records) -> Records:
    """Return the records that prove the proofs as they are now.

    A record of another threshold, or of other steps, proves nothing.
    """
    return {
        proof.key: records[proof.key]
        for proof in proofs
        if proof.key in records and records[proof.key].command == proof.command
    }


def missing(proofs: Sequence[Proof], records: Records, *, retry: bool) -> list[Proof]:
    """Return proofs without a record; with `retry` also those whose newest record did not pass."""
    stand = standing(proofs, records)
    return [proof for proof in proofs if proof.key not in stand or (retry and not stand[proof.key].passed)]


def thin(points: Sequence[tuple[int, float]], count: int = CURVE_POINTS) -> list[tuple[int, float]]:
    """Return at most `count` of the points, evenly, with the first and the last."""
    if len(points) <= count:
        return list(points)
    return [points[round(index * (len(points) - 1) / (count - 1))] for index in range(count)]


def commit() -> str:
    """Return the commit, with a "+" when the tree holds changes that it does not."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":!docs", ":!benchmarks/results")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")


def machine() -> str:
    """Return a description of this machine."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
