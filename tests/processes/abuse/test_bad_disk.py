"""Commands that write, on a disk without room and on a file system that is only read: told in words."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.solved_run import SOLVED_RUN
from tests.support.storage.small_disk import can_mount, small_disk

ENDS_S: Final = 120

WRITING: Final = {
    "plot": (("plot", "RUN", "-o", "DISK/x.png"), "-o DISK/x.png: "),
    "record": (("record", "RUN", "--out", "DISK/r", "--steps", "10"), "--out DISK/r: "),
    "export": (("policy", "export", "RUN", "22", "-o", "DISK/x"), "-o DISK/x: "),
    "certificates": (("certificates", "DISK/c", "--run", "r"), "DISK/c: "),
    "keys": (("gateway", "keys", "DISK/k"), "DISK/k: "),
    "train": (("train", "CartPole-v1", "--run-dir", "DISK/r"), "--run-dir DISK/r: "),
}
PLACES: Final = {
    "full": "No space left on device; make room",
    "only read": "Read-only file system; name a place",
}

pytestmark = pytest.mark.skipif(not can_mount(), reason="a disk of its own needs the right to mount")


@pytest.fixture(scope="module", params=PLACES)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("disk")
    with small_disk("tmpfs", folder, lambda: None) as small:
        small.fill(0)
        if request.param == "only read":
            small.free()
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield PLACES[request.param], folder


@pytest.mark.parametrize(("words", "named"), WRITING.values(), ids=WRITING.keys())
def test_a_disk_that_takes_nothing_is_told_with_the_word_that_named_it(
    words: tuple[str, ...], named: str, disk: tuple[str, Path]
) -> None:
    told, folder = disk
    given = [word.replace("RUN", str(SOLVED_RUN)).replace("DISK", str(folder)) for word in words]
    done = subprocess.run(penstock(*given), capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(named.replace("DISK", str(folder)) + told), last
    assert {file.name for file in folder.iterdir() if file.is_file()} <= {"ballast"}
    assert list(folder.rglob("*.tmp")) == []
