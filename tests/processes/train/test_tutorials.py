"""Every tutorial is tried as it is written: its files are made and its commands run, in order, in one folder.

The word behind the language of a block, which a reader of the page does not see, says how a block is tried:

    python               the first line is "# PATH": the file is written, later commands use it
    toml                 the first line is "# PATH": the file is written; a pyproject.toml is installed
                         from the folder
    diff                 its lines are found in the file and replaced
    sh                   runs to its end with exit status 0
    sh server            goes on until the next server starts or the page ends; then Ctrl-C stops it
    sh interrupt         Ctrl-C stops it as soon as it trains; exit status 130
    sh solved            trains CartPole-v1 as the first page does, where it is tried; here a run that was
                         solved is laid into its folder
    sh setup             the installation, which the tests have behind them

The tutorial of an algorithm changes the source, so it runs in a copy of it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from penstock import PolicyClient
from tests.support.run.harness import PATIENCE_S
from tests.support.run.solved_run import SOLVED_RUN

ROOT: Final = Path(__file__).resolve().parents[3]
PACKAGES: Final = ("penstock", "broker", "actor", "learner")
TUTORIALS: Final = ROOT / "docs" / "tutorials"
ADDRESS: Final = "127.0.0.1:50052"
"""Where the pages serve.

The tests use a socket in the folder of the page instead, which no other test has.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    mark: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*) ?(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [Block(*parts) for parts in found]


class Reader:
    """Someone who does what a page says, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._address = f"unix:{folder}/s"
        self._server: subprocess.Popen[str] | None = None
        self.output = ""
        """What the commands printed, those of servers left out."""

    def follow(self, page: Path) -> None:
        for block in blocks(page):
            text = block.text.replace(ADDRESS, self._address)
            match block.language, block.mark:
                case "python", "":
                    self._write(text)
                case "toml", "":
                    self._install(self._write(text))
                case "diff", "":
                    self._change(text)
                case "sh", "":
                    self.output += self._run(text)
                case "sh", "solved":
                    self._take_solved_run(text)
                case "sh", "server":
                    self._serve(text)
                case "sh", "interrupt":
                    self._interrupt(text)
                case ("sh", "setup") | ("", ""):
                    pass
                case _:
                    pytest.fail(f"{page.name}: a block of {block.language!r} {block.mark!r}")

    def summary(self, run: str) -> dict[str, Any]:
        return dict(json.loads((self._folder / "runs" / run / "summary.json").read_text()))

    def close(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGINT)
        try:
            _, err = server.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise
        assert server.returncode in (0, 130), err

    def _write(self, text: str) -> Path:
        name = re.match(r"# ([\w/]+\.(?:py|toml))\n", text)
        assert name is not None, f"the first line names no file: {text[:40]!r}"
        path = self._folder / name[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def _install(self, project: Path) -> None:
        """Leave the metadata of an editable install beside the package, which is on the path of modules."""
        declared = tomllib.loads(project.read_text())["project"]
        metadata = project.parent / f"{declared['name']}-{declared['version']}.dist-info"
        metadata.mkdir()
        described = f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n"
        (metadata / "METADATA").write_text(described)
        groups = [
            "\n".join([f"[{group}]", *(f"{name} = {place}" for name, place in points.items())])
            for group, points in declared["entry-points"].items()
        ]
        (metadata / "entry_points.txt").write_text("\n".join(groups) + "\n")

    def _change(self, text: str) -> None:
        name = re.search(r"^\+\+\+ b/(.+)$", text, flags=re.MULTILINE)
        assert name is not None, text
        path = self._folder / name[1]
        source = path.read_text()
        for hunk in re.split(r"^@@.*\n", text, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] != "+")
            assert source.count(old) == 1, f"{name[1]}: {source.count(old)} places for\n{old}"
            source = source.replace(old, "".join(line[1:] for line in lines if line[0] != "-"))
        path.write_text(source)

    def _take_solved_run(self, command: str) -> None:
        assert command in (TUTORIALS / "train.md").read_text()
        shutil.copytree(SOLVED_RUN, self._folder / "runs" / "first")

    def _run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", command],
            check=False,
            cwd=self._folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, command: str) -> None:
        self.close()
        self._server = self._start(command)
        with PolicyClient(self._address, deadline_s=PATIENCE_S) as client:
            client.describe()

    def _interrupt(self, command: str) -> None:
        process = self._start(command)
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if line.endswith(" training\n"):
                os.killpg(process.pid, signal.SIGINT)
                break
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, seen + out + err

    def _start(self, command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-euc", f"exec {command}"],
            cwd=self._folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        """As of a reader with an activated environment, whose Python imports from the folder first."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(self._folder)}


@pytest.fixture
def reader(short_folder: Path) -> Iterator[Reader]:
    reader = Reader(short_folder)
    yield reader
    reader.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train(reader: Reader) -> None:
    reader.follow(TUTORIALS / "train.md")
    assert reader.summary("first")["solved"]
    assert reader.summary("pendulum")["env_steps"] >= 20_000
    assert reader.summary("pendulum")["ledger"]["balanced"]


@pytest.mark.timeout(900)
def test_your_own_environment(reader: Reader) -> None:
    reader.follow(TUTORIALS / "your-own-environment.md")
    assert [reader.summary(run)["solved"] for run in ("corridor", "longer")] == [True, True]


@pytest.mark.timeout(900)
def test_ask_for_actions(reader: Reader) -> None:
    reader.follow(TUTORIALS / "ask-for-actions.md")
    assert re.search(r"^action [01] of version \d+$", reader.output, flags=re.MULTILINE)
    assert "actions (64,)" in reader.output
    versions = [
        int(version)
        for version in re.findall(r"^episode .* version (\d+)$", reader.output, flags=re.MULTILINE)
    ]
    assert len(versions) == 10
    assert versions[-1] > versions[0]
    reader.close()
    assert reader.summary("served")["ledger"]["trained"] > 0


@pytest.mark.timeout(900)
def test_add_an_algorithm(reader: Reader, short_folder: Path) -> None:
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, short_folder / package, symlinks=True, ignore=ignored)
    reader.follow(TUTORIALS / "add-an-algorithm.md")
    summary = reader.summary("a2c")
    assert summary["ledger"]["balanced"]
    assert summary["updates"] > 1
    last = json.loads((short_folder / "runs" / "a2c" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"policy_loss", "value_loss", "entropy", "gradient_norm"} <= last.keys()


@pytest.mark.timeout(900)
def test_add_a_workload(reader: Reader) -> None:
    reader.follow(TUTORIALS / "add-a-workload.md")
    summary = reader.summary("signals")
    assert summary["solved"]
    assert summary["mean_return"] > 0.5 * 64  # one in four signals is named by chance
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["trained"] > 0
