"""Trainings in the background: `penstock train` in a session of its own, which ends with no terminal.

    RUNS/NAME/job.json    the command, and which process it is
    RUNS/NAME/train.log   what it says

Whether one goes on is told by the lock of its folder, which its launcher holds as long as it lives.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import LOCK_FILE, make_private
from penstock.launch.run.summary import SUMMARY_FILE
from penstock.launch.run.supervised_service import last_line, penstock
from penstock.registry.weight_files import replace_file
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint

JOB_FILE: Final = "job.json"
LOG_FILE: Final = "train.log"
ASKED_FILE: Final = "job.stop"
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is stored of a job. born: of its process, in clock ticks since the machine was started."""

    command: list[str]
    started: float
    pid: int
    born: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundJob:
    """A job as it is now. state: running, finished, interrupted or failed. cause: of a failure, in words."""

    name: str
    state: str
    started: float
    command: list[str]
    cause: str


def folder_of(runs: Path, name: str) -> Path:
    """Return the folder of a job; raises ConfigurationError for a name that leads elsewhere."""
    if not name or Path(name).name != name or name.startswith((".", "-")):
        raise ConfigurationError(f"--name {name!r}: is no name of a folder")
    return runs / name


def start(runs: Path, name: str, arguments: Sequence[str]) -> BackgroundJob:
    """Start a training and return when it has its folder in hand.

    Raises ConfigurationError for a name that is taken or is none, Fatal where it ended before it had begun.
    """
    folder = folder_of(runs, name)
    if folder.exists():
        raise ConfigurationError(f"--name {name}: {folder} is there already; give another name")
    make_private(folder)
    command = [*penstock("train", *arguments, "--run-dir", str(folder))]
    # Before there is a process: if this one is killed in between, the job is listed all the same.
    _keep(folder, Started(command=list(arguments), started=time.time(), pid=0, born=0))
    with (folder / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    failpoint("jobs.started")
    born = _born(process.pid) or 0
    _keep(folder, Started(command=list(arguments), started=time.time(), pid=process.pid, born=born))
    pause = threading.Event()
    while process.poll() is None:
        if is_held(folder):
            return look(folder)
        pause.wait(_LOOK_S)
    if process.returncode:
        why = last_line(folder / LOG_FILE)
        shutil.rmtree(folder)  # nothing was begun: the name is free again
        raise Fatal(f"{name} ended with {process.returncode}: {why}")
    return look(folder)


def _keep(folder: Path, said: Started) -> None:
    """Store it whole or not at all: others list jobs meanwhile, and this process may be killed."""
    replace_file(folder / JOB_FILE, json.dumps(asdict(said)).encode())


def read_jobs(runs: Path) -> list[BackgroundJob]:
    """Return the jobs of a folder of runs, newest first."""
    found = [_listed(file) for file in runs.glob(f"*/{JOB_FILE}")]
    return sorted(found, key=lambda one: -one.started)


def _listed(file: Path) -> BackgroundJob:
    """Return a job, or what is left of one: a file that cannot be read hides no other job."""
    folder = file.parent
    try:
        return look(folder)
    except ConfigurationError:
        cause = f"{JOB_FILE} cannot be read"
        state = "running" if is_held(folder) else "failed"
        return BackgroundJob(name=folder.name, state=state, started=0.0, command=[], cause=cause)


def look(folder: Path) -> BackgroundJob:
    """Return a job as it is now; raises ConfigurationError for a folder that is none of a job."""
    said = _started(folder)
    state, cause = _state(folder)
    return BackgroundJob(
        name=folder.name, state=state, started=said.started, command=said.command, cause=cause
    )


def stop(folder: Path) -> None:
    """Ask a job to end, as Ctrl-C does; one that has ended, or was asked, stays as it is.

    Raises ConfigurationError for a folder that is none of a job, Fatal where its process is not known.
    """
    said = _started(folder)
    if not said.pid and is_held(folder):
        raise Fatal(
            f"{folder.name}: was started by a command that was killed, so its process is not known; end the "
            f"`penstock train` whose --run-dir is {folder}, or `penstock control stop {folder}`"
        )
    # The number of a process may by now be another's, which was born at another time.
    if is_held(folder) and _born(said.pid) == said.born:
        try:
            (folder / ASKED_FILE).touch(exist_ok=False)
        except FileExistsError:
            return  # a second signal would end it at once, without its last checkpoint
        os.kill(said.pid, signal.SIGTERM)


def is_held(folder: Path) -> bool:
    """Return whether a launcher has a folder in hand."""
    try:
        with (folder / LOCK_FILE).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except FileNotFoundError:
        pass
    return False


def _started(folder: Path) -> Started:
    try:
        stored: dict[str, Any] = json.loads((folder / JOB_FILE).read_text())
        said = Started(**stored | {"started": float(stored["started"]), "command": list(stored["command"])})
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigurationError(
            f"{folder}: is no job; `penstock jobs list` names those that there are"
        ) from error
    return said


def _state(folder: Path) -> tuple[str, str]:
    if is_held(folder):
        return "running", ""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        return "failed", last_line(folder / LOG_FILE)
    if summary.get("interrupted"):
        return "interrupted", ""
    failure = str(summary.get("failure") or "")
    return ("failed", failure) if failure else ("finished", "")


def _born(pid: int) -> int | None:
    try:
        # The name of the process, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
