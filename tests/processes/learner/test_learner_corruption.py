"""Checkpoints that rot: a flipped bit or a cut end at any place is found, and the one before is taken.

The checkpoints are those of the shipped algorithm, with optimiser, normaliser and generators. Each damage
hits the newest one; the rule that a resuming learner follows (`choose` of the checkpointer) must begin
from the second.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from penstock.broker.log.replies import Commit, Lease, LogState, Totals
from penstock.learner.checkpoint.checkpointer import Beginning, choose
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.learner.ledger import Progress, sections
from penstock.learner.model import make_model
from penstock.runtime.exit import Fatal
from tests.support.run.learner_run import settings

FILES = ("tensors.safetensors", "state.json", "manifest.json")
COUNT = 3


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was committed COUNT times. commits: oldest first."""

    store: CheckpointStore
    commits: tuple[Commit, ...]

    def begin(self, *, redis_lost: bool) -> Beginning:
        committed = () if redis_lost else self.commits
        lease = Lease(epoch=2, fresh=redis_lost, closed=redis_lost, committed=committed)
        return choose(lease, self.store, ResumeOptions(resume=True))

    def path(self, name: str, back: int = 1) -> Path:
        return self.store.directory / self.commits[-back].checkpoint_id / name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    given = settings(policy={"hidden_sizes": [32, 32], "normalise_observations": True})
    algorithm = make_model(given).algorithm
    store = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints", COUNT)
    commits: list[Commit] = []
    for serial in range(1, COUNT + 1):
        totals = Totals(trained=4 * serial, env_steps=32 * serial)
        progress = Progress(
            run=given.run,
            sections=sections(given),
            position=4 * serial,
            totals=totals,
            log=LogState(run=given.run, epoch=1, commits=tuple(commits)),
        )
        with torch.no_grad():
            for parameter in algorithm.published_modules()["default"].parameters():
                parameter.add_(0.125)
        state, checkpoint_id = algorithm.state(), f"{1:012d}-{serial:08d}"
        digest = store.write(checkpoint_id, state.tensors, progress.to_json() | {"numbers": state.numbers})
        commit = Commit(
            checkpoint_id=checkpoint_id, manifest_sha256=digest, position=4 * serial, trim=0, totals=totals
        )
        commits.append(commit)
    return Run(store, tuple(commits))


@contextmanager
def damaged(path: Path, damage: Callable[[bytes], bytes]) -> Iterator[None]:
    before = path.read_bytes()
    after = damage(before)
    assert after != before
    path.write_bytes(after)
    try:
        yield
    finally:
        path.write_bytes(before)


def flip(data: bytes, draw: random.Random) -> bytes:
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def check_fell_back(run: Run, beginning: Beginning, back: int = 2) -> None:
    expected = run.commits[-back]
    assert beginning.checkpoint is not None
    assert beginning.checkpoint.id == expected.checkpoint_id
    assert beginning.checkpoint.manifest_sha256 == expected.manifest_sha256
    assert beginning.ledger.position == expected.position
    assert beginning.ledger.totals() == expected.totals
    assert beginning.lineage[-1].checkpoint_id == expected.checkpoint_id


@pytest.mark.parametrize("times", [50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("redis_lost", [False, True], ids=["committed", "redis-lost"])
def test_every_damage_is_found_and_the_checkpoint_before_is_taken(
    run: Run, times: int, redis_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(times)
    check_fell_back(run, run.begin(redis_lost=redis_lost), back=1)
    for turn in range(times):
        how, name = draw.choice((flip, cut)), FILES[turn % len(FILES)]
        caplog.clear()
        with damaged(run.path(name), lambda data, how=how: how(data, draw)):  # type: ignore[misc]
            check_fell_back(run, run.begin(redis_lost=redis_lost))
        assert any("falling back" in record.message for record in caplog.records)
    check_fell_back(run, run.begin(redis_lost=redis_lost), back=1)


def test_two_damaged_ones_cost_two(run: Run) -> None:
    draw = random.Random(0)
    with (
        damaged(run.path(FILES[0]), lambda data: flip(data, draw)),
        damaged(run.path(FILES[1], back=2), lambda data: cut(data, draw)),
    ):
        check_fell_back(run, run.begin(redis_lost=False), back=3)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(run: Run, name: str) -> None:
    path = run.path(name)
    aside = path.with_name("aside")
    path.rename(aside)
    try:
        check_fell_back(run, run.begin(redis_lost=False))
    finally:
        aside.rename(path)


def test_a_whole_checkpoint_under_another_name_is_found(run: Run) -> None:
    newest, older = run.path(""), run.path("", back=2)
    aside = newest.with_name("aside")
    newest.rename(aside)
    shutil.copytree(older, newest)
    try:
        check_fell_back(run, run.begin(redis_lost=False))
        check_fell_back(run, run.begin(redis_lost=True))
    finally:
        shutil.rmtree(newest)
        aside.rename(newest)


def test_another_checkpoint_of_the_same_name_is_found(run: Run, tmp_path: Path) -> None:
    newest, other = run.path(""), CheckpointStore(tmp_path, COUNT)
    other.write(newest.name, {"weight": torch.ones(1)}, {"numbers": {}})
    aside = newest.with_name("aside")
    newest.rename(aside)
    shutil.copytree(tmp_path / newest.name, newest)
    try:
        check_fell_back(run, run.begin(redis_lost=False))
    finally:
        shutil.rmtree(newest)
        aside.rename(newest)


def test_without_a_whole_one_nothing_is_begun(run: Run) -> None:
    draw = random.Random(1)
    with (
        damaged(run.path(FILES[0], back=1), lambda data: flip(data, draw)),
        damaged(run.path(FILES[0], back=2), lambda data: flip(data, draw)),
        damaged(run.path(FILES[0], back=3), lambda data: flip(data, draw)),
        pytest.raises(Fatal, match="--allow-loss"),
    ):
        run.begin(redis_lost=True)
