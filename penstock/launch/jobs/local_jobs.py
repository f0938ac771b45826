"""Jobs of this machine: processes that outlive their starter, each with a folder that others find it by.

    FOLDER/lock            held by the processes of the job as long as one of them lives
    FOLDER/starts          a byte for each time that its process was started before it had begun
    FOLDER/begun.json      its process group      FOLDER/ended.json   its exit code
    FOLDER/train.log       what it says           FOLDER/job.json     the command, of a job of `penstock jobs`

A job whose lock is free and that has begun has ended, and is never begun again. One that has not begun has no
process that lives, because what is started inherits the lock before it does anything: it is started again, a
few times.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import LOCK_FILE as RUN_LOCK_FILE
from penstock.config.run_folder import NoPlainFile, make_private, open_regular, opener, read_whole
from penstock.launch.jobs.job_process import BEGUN_FILE, ENDED_FILE, LOG_FILE
from penstock.launch.run.memory import problem
from penstock.launch.run.summary import SUMMARY_FILE
from penstock.launch.run.supervisor import last_line, penstock
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.output_file import replace_file

LOCK_FILE: Final = "lock"
STARTS_FILE: Final = "starts"
MAX_STARTS: Final = 3
"""How often a job's process is started that ends before it has noted that it began."""


def start(
    folder: Path,
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes] | None":
    """Start a command as the job of a folder; returns None where it goes on, or has begun before.

    Raises Fatal where its process has ended MAX_STARTS times before it had begun, OSError.
    """
    folder = folder.absolute()
    with open(folder / LOCK_FILE, "a", opener=opener) as lock:
        if not try_lock(lock, fcntl.LOCK_EX) or has_begun(folder):
            return None
        _count_start(folder)
        around = (sys.executable, "-P", "-m", "penstock.launch.jobs.job_process", str(lock.fileno()))
        with open(folder / LOG_FILE, "ab", opener=opener) as log:
            return subprocess.Popen(
                (*around, str(folder), *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=cwd,
                env=env,
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )


def goes_on(folder: Path) -> bool | None:
    """Return whether the job of a folder goes on, None where none was ever started."""
    try:
        with open_regular(folder / LOCK_FILE) as lock:
            return not try_lock(lock, fcntl.LOCK_SH)
    except (FileNotFoundError, NoPlainFile):
        return None


def stop(folder: Path) -> bool:
    """Ask the processes of a job to end; False: none of them is known yet, or none lives any more."""
    begun = read_noted(folder / BEGUN_FILE)
    if begun is None or not goes_on(folder):
        return False
    os.killpg(begun["group"], signal.SIGTERM)  # the lock says that the group is there, and so its own
    return True


def forget(folder: Path) -> None:
    for name in (BEGUN_FILE, ENDED_FILE, STARTS_FILE):
        (folder / name).unlink(missing_ok=True)


def has_begun(folder: Path) -> bool:
    """Return whether a job has begun: whatever stands in the place of its note, it is not begun again."""
    return os.path.lexists(folder / BEGUN_FILE)


def try_lock(file: IO[Any], kind: int) -> bool:
    """Lock a file as `flock` does, and return whether it was free."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_noted(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is none."""
    try:
        return dict(json.loads(read_whole(file)))
    except (FileNotFoundError, NoPlainFile, ValueError, TypeError, RecursionError):
        return None


@contextmanager
def lifeline() -> Iterator[int]:
    """Yield a descriptor that a process may watch to see that this one, or the block, has ended."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _count_start(folder: Path) -> None:
    """Count a start durably; raises Fatal for one too many."""
    with open(folder / STARTS_FILE, "ab", opener=opener) as file:
        if file.tell() >= MAX_STARTS:
            said = problem((folder,)) or last_line(folder / LOG_FILE) or "it left no word"
            raise Fatal(f"its process ended {MAX_STARTS} times before it had begun: {said}")
        file.write(b".")
        file.flush()
        os.fsync(file.fileno())


# ---- The jobs of `penstock jobs`: the folder of each is that of its run.

JOB_FILE: Final = "job.json"
ASKED_FILE: Final = "job.stop"
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJob:
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


def start_named(runs: Path, name: str, arguments: Sequence[str]) -> None:
    """Start a training and return when it has its folder in hand.

    Raises ConfigurationError for a name that is taken or is none, Fatal where it ended before it had begun.
    """
    folder = folder_of(runs, name)
    if folder.exists():
        raise ConfigurationError(f"--name {name}: {folder} is there already; give another name")
    make_private(folder)
    # Before there is a process: if this one is killed in between, the job is listed all the same.
    said = {"command": list(arguments), "started": time.time()}
    replace_file(folder / JOB_FILE, json.dumps(said).encode())
    process = start(folder, penstock("train", *arguments, "--run-dir", str(folder)))
    assert process is not None
    failpoint("jobs.started")
    pause = threading.Event()
    while process.poll() is None:
        if _is_in_hand(folder):
            return
        pause.wait(_LOOK_S)
    if process.returncode:
        why = last_line(folder / LOG_FILE)
        shutil.rmtree(folder)  # nothing was begun: the name is free again
        raise Fatal(f"{name} ended with {process.returncode}: {why}")


def read_named(runs: Path) -> list[NamedJob]:
    """Return the jobs of a folder of runs, newest first; a file that cannot be read hides no other job."""
    found = list[NamedJob]()
    for file in runs.glob(f"*/{JOB_FILE}"):
        folder = file.parent
        try:
            found.append(look(folder))
        except ConfigurationError:
            state = "running" if _is_in_hand(folder) else "failed"
            cause = f"{JOB_FILE} cannot be read"
            found.append(NamedJob(name=folder.name, state=state, started=0.0, command=[], cause=cause))
    return sorted(found, key=lambda one: -one.started)


def look(folder: Path) -> NamedJob:
    """Return a job as it is now; raises ConfigurationError for a folder that is none of a job."""
    try:
        stored = json.loads((folder / JOB_FILE).read_text())
        started, command = float(stored["started"]), list(stored["command"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigurationError(
            f"{folder}: is no job; `penstock jobs list` names those that there are"
        ) from error
    state, cause = _state(folder)
    return NamedJob(name=folder.name, state=state, started=started, command=command, cause=cause)


def stop_named(folder: Path) -> None:
    """Ask a job to end, as Ctrl-C does; one that has ended, or was asked, stays as it is.

    Raises ConfigurationError for a folder that is none of a job, Fatal where its processes are not known.
    """
    if look(folder).state != "running":
        return
    try:
        (folder / ASKED_FILE).touch(exist_ok=False)
    except FileExistsError:
        return  # a second signal would end it at once, without its last checkpoint
    if not stop(folder) and _is_in_hand(folder):
        (folder / ASKED_FILE).unlink()
        raise Fatal(
            f"{folder.name}: its processes are not known, as of a run that was resumed by hand; end the "
            f"`penstock train` whose --run-dir is {folder}, or `penstock control stop {folder}`"
        )


def _is_in_hand(folder: Path) -> bool:
    """Return whether a launcher has the folder of a run in hand, also of one that was resumed by hand."""
    try:
        with (folder / RUN_LOCK_FILE).open() as lock:
            return not try_lock(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _state(folder: Path) -> tuple[str, str]:
    if _is_in_hand(folder):
        return "running", ""
    summary = read_noted(folder / SUMMARY_FILE)
    if summary is None:
        return "failed", last_line(folder / LOG_FILE)
    if summary.get("interrupted"):
        return "interrupted", ""
    failure = str(summary.get("failure") or "")
    return ("failed", failure) if failure else ("finished", "")
