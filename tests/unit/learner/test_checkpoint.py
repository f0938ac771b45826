import errno
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.broker.log.replies import Commit, Lease
from penstock.config.settings import LearnerSection
from penstock.learner.checkpoint import store
from penstock.learner.checkpoint.checkpointer import _Consumed, choose
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import (
    FOLDER,
    CheckpointStore,
    Damaged,
    NamedCheckpoints,
    NameRefused,
    NoRoom,
)
from penstock.learner.ledger import Progress
from penstock.learner.publish.publisher import PendingPublication, PublishInterval, _merged
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.runtime.exit import Fatal


def test_bytes_are_known_at_the_ends_of_deliveries() -> None:
    consumed = _Consumed(trim=0, position=0, size=0)
    for last, size in ((4, 40), (8, 80), (9, 5)):
        consumed.add(last, size)
    assert [consumed.through(number) for number in (0, 3, 4, 7, 8, 9, 99)] == [0, 0, 40, 40, 120, 125, 125]


def test_what_lies_before_the_trim_is_forgotten() -> None:
    consumed = _Consumed(trim=0, position=0, size=0)
    for last in range(1, 1001):
        consumed.add(last, 10)
    consumed.forget_before(900)
    assert consumed.through(950) - consumed.through(900) == 500
    assert len(consumed._ends) == 101


def test_a_resumed_learner_takes_all_of_the_log_for_what_it_has_consumed() -> None:
    consumed = _Consumed(trim=10, position=30, size=500)
    assert [consumed.through(number) for number in (10, 20, 30)] == [0, 0, 500]


TENSORS = {"policy/w": torch.arange(3.0)}
STATE = {"updates": 7}


@pytest.mark.promise("named-checkpoints-bounded-never")
def test_a_name_is_taken_once_and_found_again(tmp_path: Path) -> None:
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


def test_beyond_the_bound_or_the_disk_there_is_no_room(
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
def resume_store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for position, name in ((4, COMMITTED), (8, WRITTEN)):
        made.write(name, {}, Progress(run="r", sections={}, position=position).to_json())
    return made


def committed(resume_store: CheckpointStore) -> Commit:
    digest = resume_store.read(COMMITTED).manifest_sha256
    return Commit(checkpoint_id=COMMITTED, manifest_sha256=digest, position=4, trim=0)


def test_a_checkpoint_that_was_written_and_never_committed_does_not_count(
    resume_store: CheckpointStore,
) -> None:
    lease = Lease(epoch=2, fresh=False, closed=False, committed=(committed(resume_store),), head=9)
    beginning = choose(lease, resume_store, RESUME)
    assert beginning.checkpoint is not None
    assert (beginning.checkpoint.id, beginning.ledger.position) == (COMMITTED, 4)
    assert [commit.checkpoint_id for commit in beginning.lineage] == [COMMITTED]


def test_nothing_was_committed_so_a_run_begins_at_its_first_entry(resume_store: CheckpointStore) -> None:
    beginning = choose(Lease(epoch=2, fresh=False, closed=False, head=9), resume_store, RESUME)
    assert (beginning.checkpoint, beginning.ledger.position) == (None, 0)


def test_a_redis_that_knows_older_checkpoints_alone_is_told_from_one_that_lost_nothing(
    resume_store: CheckpointStore,
) -> None:
    known = committed(resume_store)
    shutil.rmtree(resume_store.directory / COMMITTED)
    lease = Lease(epoch=2, fresh=False, closed=False, committed=(known,), head=9, trim_floor=3)
    with pytest.raises(Fatal, match=f"gone back in time.*{COMMITTED}.*{WRITTEN}.*empty its folder"):
        choose(lease, resume_store, RESUME)
    begun = choose(lease, resume_store, ResumeOptions(resume=True, allow_loss=True))
    assert (begun.checkpoint, begun.ledger.position) == (None, 3)
    untrimmed = Lease(epoch=2, fresh=False, closed=False, committed=(known,), head=9)
    begun = choose(untrimmed, resume_store, RESUME)  # the log still holds all of it
    assert (begun.checkpoint, begun.ledger.position) == (None, 0)


def test_the_newest_on_disk_counts_where_redis_holds_no_run(resume_store: CheckpointStore) -> None:
    beginning = choose(Lease(epoch=2, fresh=True, closed=True), resume_store, RESUME)
    assert beginning.checkpoint is not None
    assert (beginning.checkpoint.id, beginning.ledger.position) == (WRITTEN, 8)


STORE_TENSORS = {
    "weights": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "moment": torch.tensor(0.25, dtype=torch.float64),
    "generator": torch.Generator().manual_seed(3).get_state(),
    "empty": torch.zeros(0),
}
STORE_STATE = {"position": 7, "text": "ε"}


@pytest.fixture
def store_store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def test_what_is_written_is_read_back(store_store: CheckpointStore) -> None:
    digest = store_store.write("a", STORE_TENSORS, STORE_STATE)
    checkpoint = store_store.read("a", digest)
    assert checkpoint.state == STORE_STATE
    assert checkpoint.tensors.keys() == STORE_TENSORS.keys()
    for name, tensor in STORE_TENSORS.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.tensors[name], tensor)


def test_compressed_ones_are_smaller_and_either_kind_is_read(tmp_path: Path) -> None:
    zeros = {**STORE_TENSORS, "moments": torch.zeros(50_000)}
    raw, small = (CheckpointStore(tmp_path / "checkpoints", 3, compress=one) for one in (False, True))
    raw.write("a", zeros, STORE_STATE)
    digest = small.write("b", zeros, STORE_STATE)
    files = [tmp_path / "checkpoints" / "a" / "tensors.safetensors"]
    files.append(tmp_path / "checkpoints" / "b" / "tensors.safetensors.lz4")
    assert files[1].stat().st_size < files[0].stat().st_size / 20
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


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_missing_file_is_damage(store_store: CheckpointStore, name: str) -> None:
    store_store.write("a", STORE_TENSORS, STORE_STATE)
    (store_store.directory / "a" / name).unlink()
    with pytest.raises(Damaged, match=name):
        store_store.read("a")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), name=st.sampled_from(["tensors.safetensors", "state.json", "manifest.json"]))
def test_one_flipped_bit_or_a_truncation_is_never_loaded(
    store_store: CheckpointStore, data: st.DataObject, name: str
) -> None:
    if not store_store.ids():
        store_store.write("a", STORE_TENSORS, STORE_STATE)
    digest = store_store.read("a").manifest_sha256
    path = store_store.directory / "a" / name
    whole = path.read_bytes()
    content = bytearray(whole)
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    path.write_bytes(content)
    try:
        with pytest.raises(Damaged):
            store_store.read("a", digest)
    finally:
        path.write_bytes(whole)


def test_the_newest_whole_one_is_taken_and_the_others_named(
    store_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    good = store_store.write("a", STORE_TENSORS, STORE_STATE)
    damaged = store_store.write("b", STORE_TENSORS, STORE_STATE)
    (store_store.directory / "b" / "state.json").write_bytes(b"{}")
    store_store.write("c", STORE_TENSORS, STORE_STATE)
    with caplog.at_level(logging.ERROR):
        found = store_store.newest([("d", "0" * 64), ("c", "0" * 64), ("b", damaged), ("a", good)])
    assert found is not None
    assert found.id == "a"
    assert len(caplog.records) == 3


def test_what_is_spared_outlives_the_newest(store_store: CheckpointStore) -> None:
    assert store_store.best() == ""
    for name in "abcdef":
        store_store.write(name, STORE_TENSORS, STORE_STATE)
    store_store.name_best("b")
    store_store.prune(list("abcdef"), {"b", ""})
    assert store_store.ids() == ["f", "e", "d", "b"]
    store_store.prune(list("abcdef"))
    assert store_store.ids() == ["f", "e", "d"]
    assert CheckpointStore(store_store.directory, 3).best() == "b"
    for torn in (b"", b"[]", b"\xff"):
        (store_store.directory / "best.json").write_bytes(torn)
        assert store_store.best() == ""
    store_store.name_best("b")
    assert store_store.best() == "b"


def test_a_crash_while_writing_leaves_nothing_that_counts(store_store: CheckpointStore) -> None:
    half = store_store.directory / ".tmp-a"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert store_store.ids() == []
    store_store.write("a", STORE_TENSORS, STORE_STATE)
    (store_store.directory / ".tmp-b").mkdir()
    store_store.name_ignored(["a"])
    assert [path.name for path in store_store.directory.iterdir()] == ["a"]


@pytest.mark.promise("files-directory-name-checkpoint")
def test_every_byte_is_on_the_disk_before_the_name_is(
    store_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        happened.append(str(synced.relative_to(store_store.directory.parent)))
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        happened.append(f"{path.name} becomes {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    store_store.write("a", STORE_TENSORS, STORE_STATE)
    half = f"{store_store.directory.name}/.tmp-a"
    files = {f"{half}/{name}" for name in ("tensors.safetensors", "state.json", "manifest.json")}
    assert set(happened[:3]) == files
    assert happened[3:] == [half, ".tmp-a becomes a", store_store.directory.name]


def test_the_newest_of_the_lineage_are_kept(store_store: CheckpointStore) -> None:
    for name in "abcde":
        store_store.write(name, STORE_TENSORS, STORE_STATE)
    store_store.prune(["b", "c", "d"])
    assert store_store.ids() == ["e", "d", "c", "b"]
    store_store.prune(["d"])
    assert store_store.ids() == ["e", "d", "c", "b"]


LARGE = WEIGHT_CHUNK_BYTES + 1


class Run:
    def __init__(self, **section: float) -> None:
        self.now_s, self.fetched = 0.0, 1
        self.interval = PublishInterval(
            LearnerSection.model_validate(section), lambda: self.fetched, lambda: self.now_s
        )

    def is_over(self, passed_s: float) -> bool:
        self.now_s = passed_s
        return self.interval.is_over()


def test_the_first_publication_is_due_at_once_and_small_weights_are_always() -> None:
    run = Run()
    assert run.is_over(0.0)
    run.interval.published(WEIGHT_CHUNK_BYTES)
    assert run.is_over(0.0)


def test_large_weights_wait_for_fetches_up_to_a_bound() -> None:
    run = Run(publish_fetch_wait_s=2.0)
    run.interval.published(LARGE)
    assert not run.is_over(1.9)
    assert run.is_over(2.0)
    run.fetched = 0
    assert run.is_over(0.0)


def test_the_least_interval_holds_whatever_is_fetched() -> None:
    run = Run(publish_interval_ms=3000.0, publish_fetch_wait_s=2.0)
    run.fetched = 0
    run.interval.published(LARGE)
    assert not run.is_over(2.5)
    assert run.is_over(3.0)


WEIGHTS = {"w": np.zeros(1, np.float32)}


def offered(update: int, *, evaluate: bool = False) -> PendingPublication:
    return PendingPublication(settled=update * 10, weights=WEIGHTS, update=update, evaluate=evaluate)


def test_newer_weights_hold_the_updates_that_were_skipped() -> None:
    merged = _merged(_merged(offered(1, evaluate=True), offered(2)), offered(3))
    assert (merged.update, merged.settled, merged.evaluate) == (3, 30, True)


def test_settling_further_does_not_replace_weights() -> None:
    merged = _merged(offered(1), PendingPublication(settled=25))
    assert (merged.update, merged.settled) == (1, 25)
