"""A running `penstock train` under a test's hands."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.run.supervisor import penstock

LONG = ("--actors", "2", "--total-steps", "100000000", "--set", "learner.stop_at_target=false")
"""A run that ends when it is asked to."""
OFTEN = ("--set", "learner.checkpoint_interval_s=1")
PATIENCE_S = 240.0
GONE_S = 20.0


class Training:
    """A running `penstock train`."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            penstock("train", "--run-dir", str(run_dir), *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.began_steps = self.steps()

    def steps(self) -> int:
        """Environment steps in the newest whole line of `metrics.jsonl`."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        whole = [line for line in lines if line.endswith("\n")]
        return int(json.loads(whole[-1])["env_steps"]) if whole else 0

    def until_steps(self, steps: int) -> None:
        """Wait until training has come this far beyond where this launcher found it."""
        self.until(lambda: self.steps() >= self.began_steps + steps)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition` while the launcher lives and the run makes progress."""
        steps, deadline = -1, 0.0
        pause = threading.Event()
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode}: {self.process.communicate()}")
            if self.steps() > steps:
                steps, deadline = self.steps(), time.monotonic() + PATIENCE_S
            assert time.monotonic() < deadline, f"no step within {PATIENCE_S:.0f} s after {steps}"
            pause.wait(0.05)

    def pids(self) -> dict[str, int]:
        """Every process of the run by name; Redis by its server's own pid."""
        return _pids(json.loads((self.run_dir / "endpoints.json").read_text()))

    def announced(self) -> dict[str, int]:
        """The same of those that have said so, also before the launcher has heard of them."""
        files = (self.run_dir / "endpoints").glob("*.json")
        return _pids({file.stem: json.loads(file.read_text()) for file in files})

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, within_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, err

    def completed(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Its summary, when it has ended well; its books balance."""
        code, _, errors = self.end(within_s)
        assert code == 0, errors
        summary = self.summary()
        assert summary["ledger"]["balanced"], summary["ledger"]
        return summary

    def audited(self) -> dict[str, Any]:
        """What `penstock audit` reports of a run that has ended; nothing is wrong."""
        command = penstock("audit", str(self.run_dir), "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        return dict(json.loads(done.stdout))

    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        return dict(json.loads((self.run_dir / "summary.json").read_text()))


@contextmanager
def trainings(run_dir: Path) -> Iterator[Callable[..., Training]]:
    """Starts trainings in one run folder, one after the other; nothing of them is left afterwards."""
    started: list[Training] = []

    def start(*arguments: str) -> Training:
        started.append(Training(run_dir, *arguments))
        return started[-1]

    yield start
    for training in started:
        training.process.kill()
        training.process.communicate()
    if started:
        wait_until_gone(started[-1])


def wait_until_gone(training: Training) -> float:
    """Wait until no process of the run is left; seconds that took."""
    began = time.monotonic()
    pause = threading.Event()
    left = set(training.announced().values())
    while left := {pid for pid in left if is_alive(pid)}:
        assert time.monotonic() - began < GONE_S, left
        pause.wait(0.05)
    return time.monotonic() - began


def _pids(endpoints: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {name: one["server_pid"] or one["pid"] for name, one in endpoints.items()}


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found
