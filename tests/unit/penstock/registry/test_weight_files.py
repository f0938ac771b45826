import hashlib
import os
import threading
from pathlib import Path

import pytest

from penstock.registry.weight_files import (
    FOLDER,
    LATEST,
    forget_kept,
    forget_unfinished,
    hold,
    kept_files,
    name_latest,
    path_of,
    read_kept,
    read_specification,
    registry_url,
    write_kept,
)
from penstock.runtime.output_file import replace_file

BLOB = b"weights" * 100
DIGEST = hashlib.sha256(BLOB).hexdigest()


def test_what_was_written_is_read_by_its_digest(tmp_path: Path) -> None:
    write_kept(tmp_path, 7, BLOB)
    assert read_kept(tmp_path, 7, DIGEST) == BLOB
    assert kept_files(tmp_path) == {7}
    with pytest.raises(ValueError, match=r"7\.safetensors: damaged: its SHA-256 is .*retire this one"):
        read_kept(tmp_path, 7, "0" * 64)
    path_of(tmp_path, 7).write_bytes(BLOB[:-1])
    with pytest.raises(ValueError, match="damaged"):
        read_kept(tmp_path, 7, DIGEST)


def test_weights_that_are_not_there_are_told_with_what_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"8\.safetensors: No such file.*is the version not retired"):
        read_kept(tmp_path, 8, DIGEST)


def test_a_file_half_written_is_not_taken_for_a_version(tmp_path: Path) -> None:
    write_kept(tmp_path, 1, BLOB)
    (tmp_path / "policies" / "2.safetensors.tmp").write_bytes(BLOB[:5])
    (tmp_path / "policies" / "final.safetensors").write_bytes(BLOB)
    assert kept_files(tmp_path) == {1}
    forget_unfinished(tmp_path)
    forget_kept(tmp_path, 1)
    forget_kept(tmp_path, 1)
    assert [path.name for path in (tmp_path / "policies").iterdir()] == ["final.safetensors"]


@pytest.mark.parametrize("name", ["2.safetensors.tmp", "2.safetensors.77-1.tmp"])
def test_what_a_crash_left_is_removed_whoever_wrote_it(tmp_path: Path, name: str) -> None:
    write_kept(tmp_path, 1, BLOB)
    (tmp_path / "policies" / name).write_bytes(BLOB[:5])
    forget_unfinished(tmp_path)
    assert {path.name for path in (tmp_path / "policies").iterdir()} == {"1.safetensors", "latest"}


def test_two_who_replace_a_file_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sync = tmp_path / "paused.json", os.fsync
    other = threading.Thread(target=replace_file, args=(file, b"of the other"))

    def first_sync(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        other.start()
        other.join()
        assert file.read_bytes() == b"of the other"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", first_sync)
    replace_file(file, b"mine")
    assert file.read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["paused.json"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    learner = hold(tmp_path)
    assert learner is not None
    assert hold(tmp_path) is None
    learner.close()
    other = hold(tmp_path)
    assert other is not None
    other.close()


def test_a_folder_without_a_description_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="whose learner has begun"):
        read_specification(tmp_path)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "policy.json").write_text('{"run": "a"}')
    with pytest.raises(ValueError, match="cannot be read as the description of a run"):
        read_specification(tmp_path)


def test_the_registry_lies_in_the_runs_folder_unless_another_is_named(tmp_path: Path) -> None:
    assert registry_url(tmp_path) == f"sqlite:///{tmp_path}/registry.sqlite"
    assert registry_url(tmp_path, "postgresql://ada@db/penstock") == "postgresql://ada@db/penstock"


def test_latest_is_the_newest_that_is_kept(tmp_path: Path) -> None:
    latest = tmp_path / FOLDER / LATEST
    for version in (3, 9, 5):
        write_kept(tmp_path, version, b"%d" % version)
    assert latest.read_bytes() == b"9"
    forget_kept(tmp_path, 9)
    assert latest.read_bytes() == b"5"
    for version in (3, 5):
        forget_kept(tmp_path, version)
    assert not latest.is_symlink()
    (tmp_path / FOLDER / "final.safetensors").write_bytes(b"end")
    name_latest(tmp_path, "final.safetensors")
    assert latest.read_bytes() == b"end"
