"""A job of this machine: a process that outlives its starter, with a folder in which others find it.

    FOLDER/lock            held by the processes of the job as long as one of them lives
    FOLDER/starts          a byte for each time that its process was started before it had begun
    FOLDER/begun.json      its process group      FOLDER/ended.json   its exit code
    FOLDER/train.log       its output             FOLDER/job.json     the command, of a job of `penstock jobs`

A job that has begun and whose lock is free has ended, and is never started again. One that has not begun has
no living process, because the process inherits the lock before it does anything: it is started again, a few
times.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from penstock.config.run_folder import NoPlainFile, open_regular, opener, read_whole
from penstock.launch.jobs.job_process import BEGUN_FILE, ENDED_FILE, LOG_FILE
from penstock.launch.run.memory import problem
from penstock.launch.run.supervisor import last_line, without_configuration
from penstock.runtime.exit import Fatal

LOCK_FILE: Final = "lock"
STARTS_FILE: Final = "starts"
MAX_STARTS: Final = 3
"""How often a job's process is started that ends before it has noted that it began."""
_LOOK_S: Final = 0.1


class LocalJob:
    """The job of a folder, started by this process or by another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], *, here: bool = False) -> bool:
        """Start the command; False where the job is running, or has begun before.

        here: in the working folder and with the whole environment of this process; default: in the job's
        folder, without the settings in the environment. Raises OSError, and Fatal where the process of the
        job has ended MAX_STARTS times before it had begun.
        """
        with open(self.folder / LOCK_FILE, "a", opener=opener) as lock:
            if not try_lock(lock, fcntl.LOCK_EX) or has_begun(self.folder):
                return False
            self._count_start()
            around = (sys.executable, "-P", "-m", "penstock.launch.jobs.job_process", str(lock.fileno()))
            with open(self.folder / LOG_FILE, "ab", opener=opener) as log:
                self._process = subprocess.Popen(
                    (*around, str(self.folder), *command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    cwd=None if here else self.folder,
                    env=None if here else without_configuration(os.environ),
                    pass_fds=(lock.fileno(),),
                    start_new_session=True,
                )
            return True

    def is_running(self) -> bool | None:
        """Return whether a process of the job lives, None where the job was never started."""
        try:
            with open_regular(self.folder / LOCK_FILE) as lock:
                if not try_lock(lock, fcntl.LOCK_SH):
                    return True
        except (FileNotFoundError, NoPlainFile):
            return None
        if self._process is not None:
            self._process.wait()  # its lock is free, so it has ended: the kernel may forget it
        return False

    def stop(self) -> bool:
        """Send SIGTERM to the processes of the job; False: none of them is known yet, or none lives."""
        begun = read_noted(self.folder / BEGUN_FILE)
        if begun is None and self._process is not None:
            begun = {"group": self._process.pid}
        if begun is None or not self.is_running():
            return False
        os.killpg(begun["group"], signal.SIGTERM)  # the held lock proves that the group is the job's
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until no process of the job lives; False where one still does after `timeout_s` seconds."""
        until_s = time.monotonic() + timeout_s
        while self.is_running():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def exit_code(self) -> int | None:
        """Return the exit code of a job that has ended; None where its processes were killed."""
        code = noted_exit_code(self.folder)
        return self._process.poll() if code is None and self._process is not None else code

    def last_line(self) -> str:
        """Return the last line of the job's log that is not empty; "" without one."""
        return last_line(self.folder / LOG_FILE)

    def forget(self) -> None:
        """Remove the notes of a job that has ended, so that the folder can have another."""
        for name in (BEGUN_FILE, ENDED_FILE, STARTS_FILE):
            (self.folder / name).unlink(missing_ok=True)

    def _count_start(self) -> None:
        """Count a start durably; raises Fatal for one too many."""
        with open(self.folder / STARTS_FILE, "ab", opener=opener) as file:
            if file.tell() >= MAX_STARTS:
                cause = problem((self.folder,)) or self.last_line() or "its log is empty"
                raise Fatal(f"its process ended {MAX_STARTS} times before it had begun: {cause}")
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())


def has_begun(folder: Path) -> bool:
    """Return whether a job, here or in a pod, has begun: whatever stands in the place of its note counts."""
    return os.path.lexists(folder / BEGUN_FILE)


def noted_exit_code(folder: Path) -> int | None:
    """Return the exit code that a job, here or in a pod, has noted; None where it has noted none."""
    code = (read_noted(folder / ENDED_FILE) or {}).get("code")
    return code if isinstance(code, int) else None


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
