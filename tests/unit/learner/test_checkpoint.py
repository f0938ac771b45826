import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.broker.log.replies import Commit, Lease, LogState, Totals
from penstock.config.settings import LearnerSection
from penstock.learner.checkpoint import store
from penstock.learner.checkpoint.checkpointer import Beginning, _Consumed, choose
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import (
    FOLDER,
    CheckpointStore,
    Damaged,
    NamedCheckpoints,
    NameRefused,
    NoRoom,
)
from penstock.learner.ledger import Progress, sections
from penstock.learner.model import make_model
from penstock.learner.publish.publisher import PendingPublication, PublishInterval, _merged
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.runtime.exit import Fatal
from tests.support.run import learner_run


def test_consumed_bytes_are_known_at_the_ends_of_deliveries() -> None:
    consumed = _Consumed(trim=0, position=0, size=0)
    for last, size in ((4, 40), (8, 80), (9, 5)):
        consumed.add(last, size)
    assert [consumed.through(number) for number in (0, 3, 4, 7, 8, 9, 99)] == [0, 0, 40, 40, 120, 125, 125]
    consumed = _Consumed(trim=0, position=0, size=0)
    for last in range(1, 1001):
        consumed.add(last, 10)
    consumed.forget_before(900)
    assert consumed.through(950) - consumed.through(900) == 500
    assert len(consumed._ends) == 101
    resumed = _Consumed(trim=10, position=30, size=500)
    assert [resumed.through(number) for number in (10, 20, 30)] == [0, 0, 500]


TENSORS = {"policy/w": torch.arange(3.0)}
STATE = {"updates": 7}


@pytest.mark.promise("named-checkpoints-bounded-never")
def test_a_name_is_given_once_and_found_again(tmp_path: Path) -> None:
    named = NamedCheckpoints(tmp_path)
    assert named.names() == []
    named.keep("good", "id-1", TENSORS, STATE)
    named.keep("good", "id-1", {"policy/w": torch.zeros(3)}, STATE)
    assert torch.equal(named.read("good").tensors["policy/w"], TENSORS["policy/w"])
    with pytest.raises(NameRefused, match=r"good.*choose another, or remove"):
        named.keep("good", "id-2", TENSORS, STATE)
    assert named.names() == ["good"]


@pytest.mark.parametrize("name", ["", "../good", "/etc", "Good", "a b", "a" * 65, ".tmp-x", "a\0"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    named = NamedCheckpoints(tmp_path)
    with pytest.raises(ValueError, match="is not an id"):
        named.keep(name, "id-1", TENSORS, STATE)
    with pytest.raises(NameRefused, match="there are: none"):
        named.read(name)
    assert [path.name for path in tmp_path.rglob("*")] in ([], [FOLDER])


def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    named = NamedCheckpoints(tmp_path)
    for name in ("b", "a"):
        named.keep(name, name, TENSORS, STATE)
    with pytest.raises(NameRefused, match="there are: a, b"):
        named.read("c")
    (tmp_path / FOLDER / "a" / "state.json").write_text("{}")
    with pytest.raises(Damaged, match="state.json"):
        named.read("a")


def test_named_checkpoints_are_bounded_by_number_and_by_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_NAMED", 2)
    named = NamedCheckpoints(tmp_path)
    for name in ("a", "b"):
        named.keep(name, name, TENSORS, STATE)
    with pytest.raises(NoRoom, match=f"remove a folder from {tmp_path / FOLDER}"):
        named.keep("c", "c", TENSORS, STATE)
    monkeypatch.setattr(store, "MAX_NAMED", 3)

    def full(*_arguments: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "write", full)
    with pytest.raises(NoRoom, match="No space left"):
        named.keep("c", "c", TENSORS, STATE)
    assert named.names() == ["a", "b"]


COMMITTED, WRITTEN = "000001-1", "000001-2"
RESUME = ResumeOptions(resume=True)


@pytest.fixture
def written(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for position, name in ((4, COMMITTED), (8, WRITTEN)):
        made.write(name, {}, Progress(run="r", sections={}, position=position).to_json())
    return made


def committed(written: CheckpointStore) -> Commit:
    digest = written.read(COMMITTED).manifest_sha256
    return Commit(checkpoint_id=COMMITTED, manifest_sha256=digest, position=4, trim=0)


def test_a_checkpoint_that_was_never_committed_does_not_count(
    written: CheckpointStore,
) -> None:
    lease = Lease(epoch=2, fresh=False, closed=False, committed=(committed(written),), head=9)
    beginning = choose(lease, written, RESUME)
    assert beginning.checkpoint is not None
    assert (beginning.checkpoint.id, beginning.ledger.position) == (COMMITTED, 4)
    assert [commit.checkpoint_id for commit in beginning.lineage] == [COMMITTED]


def test_nothing_was_committed_so_a_run_begins_at_its_first_entry(written: CheckpointStore) -> None:
    beginning = choose(Lease(epoch=2, fresh=False, closed=False, head=9), written, RESUME)
    assert (beginning.checkpoint, beginning.ledger.position) == (None, 0)


def test_a_redis_with_older_checkpoints_only_is_distinguished(
    written: CheckpointStore,
) -> None:
    known = committed(written)
    shutil.rmtree(written.directory / COMMITTED)
    lease = Lease(epoch=2, fresh=False, closed=False, committed=(known,), head=9, trim_floor=3)
    with pytest.raises(Fatal, match=f"gone back in time.*{COMMITTED}.*{WRITTEN}.*empty its folder"):
        choose(lease, written, RESUME)
    begun = choose(lease, written, ResumeOptions(resume=True, allow_loss=True))
    assert (begun.checkpoint, begun.ledger.position) == (None, 3)
    untrimmed = Lease(epoch=2, fresh=False, closed=False, committed=(known,), head=9)
    begun = choose(untrimmed, written, RESUME)  # the log still holds all of it
    assert (begun.checkpoint, begun.ledger.position) == (None, 0)


def test_a_redis_that_forgot_commits_is_refused(written: CheckpointStore) -> None:
    known, state = committed(written), Progress(run="r", sections={}, position=12).to_json()
    written.write("000002-1", {}, state)  # of another learner, which died before it committed as well
    lease = Lease(epoch=3, fresh=False, closed=False, committed=(known,), head=9)
    assert choose(lease, written, RESUME).ledger.position == 4
    written.write("000002-2", {}, state)
    with pytest.raises(Fatal, match=f"gone back in time.*{COMMITTED}.*000002-2.*empty its folder"):
        choose(lease, written, RESUME)
    allowed = choose(lease, written, ResumeOptions(resume=True, allow_loss=True))
    assert allowed.ledger.position == 4


STORE_TENSORS = {
    "weights": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "moment": torch.tensor(0.25, dtype=torch.float64),
    "generator": torch.Generator().manual_seed(3).get_state(),
    "empty": torch.zeros(0),
}
STORE_STATE = {"position": 7, "text": "ε"}


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def test_written_data_is_read_back_and_compression_makes_it_smaller(tmp_path: Path) -> None:
    zeros = {**STORE_TENSORS, "moments": torch.zeros(50_000)}
    raw, small = (CheckpointStore(tmp_path / "checkpoints", 3, compress=one) for one in (False, True))
    raw.write("a", zeros, STORE_STATE)
    digest = small.write("b", zeros, STORE_STATE)
    files = [tmp_path / "checkpoints" / "a" / "tensors.safetensors"]
    files.append(tmp_path / "checkpoints" / "b" / "tensors.safetensors.lz4")
    assert files[1].stat().st_size < files[0].stat().st_size / 20
    assert raw.read("a").state == STORE_STATE
    for checkpoint in (small.read("a"), raw.read("b", digest)):
        assert checkpoint.tensors.keys() == zeros.keys()
        assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in zeros.items())
    manifest = tmp_path / "checkpoints" / "b" / "manifest.json"
    told = json.loads(manifest.read_text())
    for size in (told["files"]["tensors.safetensors.lz4"]["raw_size"] - 1, 0, "many", None):
        told["files"]["tensors.safetensors.lz4"]["raw_size"] = size
        manifest.write_text(json.dumps(told))
        with pytest.raises(Damaged, match="tensors.safetensors.lz4"):
            raw.read("b")


def test_the_newest_of_the_lineage_and_spared_checkpoints_are_kept(checkpoints: CheckpointStore) -> None:
    assert checkpoints.best() == ""
    for name in "abcdef":
        checkpoints.write(name, STORE_TENSORS, STORE_STATE)
    checkpoints.name_best("b")
    checkpoints.prune(["b", "c", "d"])
    assert checkpoints.ids() == ["f", "e", "d", "c", "b"]
    checkpoints.prune(["d"])
    assert checkpoints.ids() == ["f", "e", "d", "c", "b"]
    checkpoints.prune(list("abcdef"), {"b", ""})
    assert checkpoints.ids() == ["f", "e", "d", "b"]
    checkpoints.prune(list("abcdef"))
    assert checkpoints.ids() == ["f", "e", "d"]
    assert CheckpointStore(checkpoints.directory, 3).best() == "b"
    for torn in (b"", b"[]", b"\xff"):
        (checkpoints.directory / "best.json").write_bytes(torn)
        assert checkpoints.best() == ""
    checkpoints.name_best("b")
    assert checkpoints.best() == "b"


def test_a_crash_while_writing_leaves_no_valid_checkpoint(checkpoints: CheckpointStore) -> None:
    half = checkpoints.directory / ".tmp-a"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert checkpoints.ids() == []
    checkpoints.write("a", STORE_TENSORS, STORE_STATE)
    (checkpoints.directory / ".tmp-b").mkdir()
    checkpoints.name_ignored(["a"])
    assert [path.name for path in checkpoints.directory.iterdir()] == ["a"]


@pytest.mark.promise("files-directory-name-checkpoint")
def test_every_byte_is_on_disk_before_the_name(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        happened.append(str(synced.relative_to(checkpoints.directory.parent)))
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        happened.append(f"{path.name} becomes {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    checkpoints.write("a", STORE_TENSORS, STORE_STATE)
    half = f"{checkpoints.directory.name}/.tmp-a"
    files = {f"{half}/{name}" for name in ("tensors.safetensors", "state.json", "manifest.json")}
    assert set(happened[:3]) == files
    assert happened[3:] == [half, ".tmp-a becomes a", checkpoints.directory.name]


FILES = ("tensors.safetensors", "state.json", "manifest.json")
COUNT = 3


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the shipped algorithm that was committed COUNT times. commits: oldest first."""

    store: CheckpointStore
    commits: tuple[Commit, ...]

    def begin(self, *, redis_lost: bool = False) -> Beginning:
        committed = () if redis_lost else self.commits
        return choose(
            Lease(epoch=2, fresh=redis_lost, closed=redis_lost, committed=committed), self.store, RESUME
        )

    def path(self, name: str, back: int = 1) -> Path:
        """A file of the newest checkpoint, or of one further back."""
        return self.store.directory / self.commits[-back].checkpoint_id / name

    def check_begins(self, back: int, *, redis_lost: bool = False) -> None:
        """A learner that resumes now begins where an older checkpoint ended, with its bytes."""
        beginning, expected = self.begin(redis_lost=redis_lost), self.commits[-back]
        assert beginning.checkpoint is not None
        assert beginning.checkpoint.id == expected.checkpoint_id
        assert beginning.checkpoint.manifest_sha256 == expected.manifest_sha256
        assert beginning.ledger.position == expected.position
        assert beginning.ledger.totals() == expected.totals
        assert beginning.lineage[-1].checkpoint_id == expected.checkpoint_id


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """See `Run`; tests put back what they damage."""
    made = learner_run.settings(policy={"hidden_sizes": [32, 32], "normalise_observations": True})
    algorithm = make_model(made).algorithm
    kept = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints", COUNT)
    commits: list[Commit] = []
    for serial in range(1, COUNT + 1):
        totals = Totals(trained=4 * serial, env_steps=32 * serial)
        log = LogState(run=made.run, epoch=1, commits=tuple(commits))
        progress = Progress(
            run=made.run, sections=sections(made), position=4 * serial, totals=totals, log=log
        )
        with torch.no_grad():
            for parameter in algorithm.published_modules()["default"].parameters():
                parameter.add_(0.125)
        state, checkpoint_id = algorithm.state(), f"{1:012d}-{serial:08d}"
        digest = kept.write(checkpoint_id, state.tensors, progress.to_json() | {"numbers": state.numbers})
        commit = Commit(
            checkpoint_id=checkpoint_id, manifest_sha256=digest, position=4 * serial, trim=0, totals=totals
        )
        commits.append(commit)
    return Run(kept, tuple(commits))


@contextmanager
def damaged(path: Path, how: Callable[[bytes, random.Random], bytes], draw: random.Random) -> Iterator[None]:
    before = path.read_bytes()
    after = how(before, draw)
    assert after != before
    path.write_bytes(after)
    try:
        yield
    finally:
        path.write_bytes(before)


@contextmanager
def replaced(path: Path, by: Path | None = None) -> Iterator[None]:
    aside = path.with_name("aside")
    path.rename(aside)
    if by is not None:
        shutil.copytree(by, path)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)


def flip(data: bytes, draw: random.Random) -> bytes:
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


@pytest.mark.parametrize("times", [50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("redis_lost", [False, True], ids=["committed", "redis-lost"])
def test_every_damage_is_found_and_the_checkpoint_before_is_taken(
    run: Run, times: int, redis_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(times)
    run.check_begins(1, redis_lost=redis_lost)
    for turn in range(times):
        caplog.clear()
        with damaged(run.path(FILES[turn % len(FILES)]), draw.choice((flip, cut)), draw):
            run.check_begins(2, redis_lost=redis_lost)
        assert any("falling back" in record.message for record in caplog.records)
    run.check_begins(1, redis_lost=redis_lost)


def test_each_damaged_checkpoint_costs_one_and_without_an_intact_one_the_run_does_not_start(run: Run) -> None:
    draw = random.Random(0)
    with damaged(run.path(FILES[0]), flip, draw), damaged(run.path(FILES[1], back=2), cut, draw):
        run.check_begins(3)
        with damaged(run.path(FILES[0], back=3), flip, draw), pytest.raises(Fatal, match="--allow-loss"):
            run.begin(redis_lost=True)


def test_a_missing_file_and_another_checkpoint_of_the_same_name_are_found(run: Run, tmp_path: Path) -> None:
    for name in FILES:
        with replaced(run.path(name)):
            run.check_begins(2)
    newest = run.path("")
    with replaced(newest, by=run.path("", back=2)):
        run.check_begins(2)
        run.check_begins(2, redis_lost=True)
    CheckpointStore(tmp_path, COUNT).write(newest.name, {"weight": torch.ones(1)}, {"numbers": {}})
    with replaced(newest, by=tmp_path / newest.name):
        run.check_begins(2)


LARGE = WEIGHT_CHUNK_BYTES + 1
FETCHES, INTERVAL = {"publish_fetch_wait_s": 2.0}, {"publish_interval_ms": 3000.0}


@pytest.mark.parametrize(
    ("section", "size", "fetched", "due"),
    [
        ({}, WEIGHT_CHUNK_BYTES, 1, {0.0: True}),
        (FETCHES, LARGE, 1, {0.0: False, 1.9: False, 2.0: True}),
        (FETCHES, LARGE, 0, {0.0: True}),
        (FETCHES | INTERVAL, LARGE, 0, {2.5: False, 3.0: True}),
    ],
    ids=["small ones are always", "large ones wait for fetches", "nothing is fetched", "the least interval"],
)
def test_weights_are_published_again_when_they_are_due(
    section: dict[str, float], size: int, fetched: int, due: dict[float, bool]
) -> None:
    clock = iter([0.0, 0.0, *due])
    interval = PublishInterval(LearnerSection.model_validate(section), lambda: fetched, lambda: next(clock))
    assert interval.is_over(), "the first is due at once"
    interval.published(size)
    assert [interval.is_over() for _ in due] == list(due.values())


def test_an_offer_that_replaces_another_keeps_its_request_to_evaluate() -> None:
    weights = {"w": np.zeros(1, np.float32)}
    first, second = (PendingPublication(settled=10 * n, weights=weights, update=n) for n in (1, 2))
    merged = _merged(replace(first, evaluate=True), second)
    assert (merged.update, merged.settled, merged.evaluate) == (2, 20, True)
    settled = _merged(merged, PendingPublication(settled=25))
    assert (settled.update, settled.settled, settled.weights) == (2, 25, weights)
