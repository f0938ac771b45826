"""Checkpoints that have names: a folder each, bounded, never replaced."""

import errno
from pathlib import Path

import pytest
import torch

from penstock.learner.checkpoint import store
from penstock.learner.checkpoint.store import (
    FOLDER,
    CheckpointStore,
    Damaged,
    NamedCheckpoints,
    NameRefused,
    NoRoom,
)

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
