"""A run on a file system that is only read can be looked at, played and served, and stays as it is."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.client import PolicyClient
from penstock.launch.cli.app import app
from penstock.launch.run.supervisor import penstock
from penstock.launch.ui.catalogue import Catalogue
from penstock.registry.registry import Registry
from tests.support.run import harness
from tests.support.run.serving_run import begun
from tests.support.run.solved_run import SOLVED_RUN
from tests.support.storage.small_disk import can_mount

ROW: Final = np.zeros(4, np.float32)


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file: when it was written, and what it holds."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """An empty folder to mount on; nothing is mounted there afterwards."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    yield folder
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


def mount_read_only(source: Path, target: Path) -> None:
    if not can_mount():
        pytest.skip("a read-only mount needs the right to mount")
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        (target / "written").touch()


COMMANDS: Final = {
    "list": ("policy", "list", "RUN"),
    "show": ("policy", "show", "RUN", "22"),
    "traffic": ("policy", "traffic", "RUN"),
    "evaluate": ("evaluate", "RUN", "--episodes", "1"),
    "plot": ("plot", "RUN", "-o", "OUT.png"),
    "export": ("policy", "export", "RUN", "22", "-o", "OUT.safetensors"),
    "audit": ("audit", "RUN"),
}


@pytest.mark.promise("run-read-listed-played")
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_commands_that_read_work_on_a_run_that_is_only_read(
    words: tuple[str, ...], mounted: Path, tmp_path: Path
) -> None:
    before = content(SOLVED_RUN)
    mount_read_only(SOLVED_RUN, mounted)
    given = [word.replace("RUN", str(mounted)).replace("OUT", str(tmp_path / "out")) for word in words]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, (done.output, done.exception)
    assert content(SOLVED_RUN) == before


@pytest.mark.parametrize(
    "words",
    [("plot", "RUN"), ("train", "--resume", "RUN"), ("policy", "promote", "RUN", "22", "--reason", "x")],
)
def test_what_would_write_there_says_so(words: tuple[str, ...], mounted: Path) -> None:
    mount_read_only(SOLVED_RUN, mounted)
    given = [str(mounted) if word == "RUN" else word for word in words]
    done = subprocess.run(penstock(*given), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "Read-only file system" in last or "only read" in last


def test_the_page_shows_it(mounted: Path) -> None:
    mount_read_only(SOLVED_RUN, mounted)
    (run,) = Catalogue(mounted).runs()
    assert run.facts().state in ("solved", "ended")
    assert run.curve()["env_steps"]


@pytest.mark.promise("run-read-listed-played")
def test_a_server_answers_from_it(mounted: Path, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    before = content(run.folder)
    mount_read_only(run.folder, mounted)
    with (
        harness.server(tmp_path / "server", mounted) as server,
        PolicyClient(server.address, deadline_s=60.0) as client,
    ):
        assert client.act(ROW).version > 0
        episode = client.start_episode()
        episode.act(ROW)
        episode.reward(1.0)
        episode.end(terminated=True)
        assert client.act(ROW).version > 0
    assert content(run.folder) == before


def test_an_empty_file_is_not_made_a_registry(tmp_path: Path) -> None:
    file = tmp_path / "empty.sqlite"
    file.touch()
    done = CliRunner().invoke(app, ("policy", "list", f"sqlite:///{file}"))
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert file.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [file]


def test_reading_a_registry_that_is_open_elsewhere_sees_what_was_committed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.sqlite'}"
    with Registry.open(url, migrate=True) as writer, Registry.read(url) as reader:
        written = writer.traffic("default")
        assert reader.traffic("default") == written
