"""Checkpoints: whole or refused, whatever happened to their bytes."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.learner.checkpoint.store import CheckpointStore, Damaged

TENSORS = {
    "weights": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "moment": torch.tensor(0.25, dtype=torch.float64),
    "generator": torch.Generator().manual_seed(3).get_state(),
    "empty": torch.zeros(0),
}
STATE = {"position": 7, "text": "ε"}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """An empty directory."""
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def test_what_is_written_is_read_back(store: CheckpointStore) -> None:
    digest = store.write("a", TENSORS, STATE)
    checkpoint = store.read("a", digest)
    assert checkpoint.state == STATE
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.tensors[name], tensor)


def test_compressed_ones_are_smaller_and_either_kind_is_read(tmp_path: Path) -> None:
    zeros = {**TENSORS, "moments": torch.zeros(50_000)}
    raw, small = (CheckpointStore(tmp_path / "checkpoints", 3, compress=one) for one in (False, True))
    raw.write("a", zeros, STATE)
    digest = small.write("b", zeros, STATE)
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
def test_a_missing_file_is_damage(store: CheckpointStore, name: str) -> None:
    store.write("a", TENSORS, STATE)
    (store.directory / "a" / name).unlink()
    with pytest.raises(Damaged, match=name):
        store.read("a")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), name=st.sampled_from(["tensors.safetensors", "state.json", "manifest.json"]))
def test_one_flipped_bit_or_a_truncation_is_never_loaded(
    store: CheckpointStore, data: st.DataObject, name: str
) -> None:
    if not store.ids():
        store.write("a", TENSORS, STATE)
    digest = store.read("a").manifest_sha256
    path = store.directory / "a" / name
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
            store.read("a", digest)
    finally:
        path.write_bytes(whole)


def test_the_newest_whole_one_is_taken_and_the_others_named(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    good = store.write("a", TENSORS, STATE)
    damaged = store.write("b", TENSORS, STATE)
    (store.directory / "b" / "state.json").write_bytes(b"{}")
    store.write("c", TENSORS, STATE)
    with caplog.at_level(logging.ERROR):
        found = store.newest([("d", "0" * 64), ("c", "0" * 64), ("b", damaged), ("a", good)])
    assert found is not None
    assert found.id == "a"
    assert len(caplog.records) == 3


def test_what_is_spared_outlives_the_newest(store: CheckpointStore) -> None:
    assert store.best() == ""
    for name in "abcdef":
        store.write(name, TENSORS, STATE)
    store.name_best("b")
    store.prune(list("abcdef"), {"b", ""})
    assert store.ids() == ["f", "e", "d", "b"]
    store.prune(list("abcdef"))
    assert store.ids() == ["f", "e", "d"]
    assert CheckpointStore(store.directory, 3).best() == "b"
    for torn in (b"", b"[]", b"\xff"):
        (store.directory / "best.json").write_bytes(torn)
        assert store.best() == ""
    store.name_best("b")
    assert store.best() == "b"


def test_a_crash_while_writing_leaves_nothing_that_counts(store: CheckpointStore) -> None:
    half = store.directory / ".tmp-a"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert store.ids() == []
    store.write("a", TENSORS, STATE)
    (store.directory / ".tmp-b").mkdir()
    store.name_ignored(["a"])
    assert [path.name for path in store.directory.iterdir()] == ["a"]


@pytest.mark.promise("files-directory-name-checkpoint")
def test_every_byte_is_on_the_disk_before_the_name_is(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        happened.append(str(synced.relative_to(store.directory.parent)))
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        happened.append(f"{path.name} becomes {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    store.write("a", TENSORS, STATE)
    half = f"{store.directory.name}/.tmp-a"
    files = {f"{half}/{name}" for name in ("tensors.safetensors", "state.json", "manifest.json")}
    assert set(happened[:3]) == files
    assert happened[3:] == [half, ".tmp-a becomes a", store.directory.name]


def test_the_newest_of_the_lineage_are_kept(store: CheckpointStore) -> None:
    for name in "abcde":
        store.write(name, TENSORS, STATE)
    store.prune(["b", "c", "d"])
    assert store.ids() == ["e", "d", "c", "b"]
    store.prune(["d"])
    assert store.ids() == ["e", "d", "c", "b"]
