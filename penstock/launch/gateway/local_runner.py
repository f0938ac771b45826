"""Jobs as processes of this machine: `penstock train` in a folder each, which any gateway finds again.

    JOBS/ID/lock           held by the processes of a job as long as one of them lives
    JOBS/ID/starts         a byte for each time that its process was started before it was begun

beside what `job_folders` has. A job whose lock is free and that was begun has ended, and is never begun
again. One that was not begun had nothing started that lives, because what is started inherits the lock before
it does anything; it is started again, a few times.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.config.run_files import NoPlainFile, open_regular, opener
from penstock.gateway.jobs.job_records import Job, Outcome
from penstock.gateway.jobs.runner import CannotBegin, Stage
from penstock.launch.gateway.job_folders import CONFIG_FILE, RUN_FOLDER, JobFolders, dry_run, try_lock
from penstock.launch.gateway.job_process import LOG_FILE
from penstock.launch.run.child_process import last_line, penstock, without_configuration
from penstock.launch.run.disk import problem
from penstock.runtime.lifecycle import LIFELINE_VARIABLE

LOCK_FILE: Final = "lock"
STARTS_FILE: Final = "starts"
MAX_STARTS: Final = 3
"""How often a job's process is started that ends before it has noted that it began."""
ESTIMATE_S: Final = 900.0
"""Longest time of a dry run, in seconds."""
_ESTIMATE: Final = "estimate-"


class LocalRunner(JobFolders):
    """Runs jobs below a folder. templates: folder of their files.

    Raises ConfigurationError for a template that is wrong, OSError for a folder that cannot be used.
    """

    def __init__(self, jobs: Path, templates: Path) -> None:
        super().__init__(jobs, templates)
        self._begun = dict[str, subprocess.Popen[bytes]]()

    def begin(self, job: Job, settings: Mapping[str, Any]) -> None:
        """Start the processes of a job, unless they were ever started; raises CannotBegin, OSError."""
        folder = self.folder(job.id)
        self.write_recipe(folder, job.template, job.numbers, settings)
        command = penstock("train", CONFIG_FILE, "--run-dir", RUN_FOLDER, "--json")
        with open(folder / LOCK_FILE, "a", opener=opener) as lock:
            if not try_lock(lock, fcntl.LOCK_EX) or self.has_begun(job.id):
                return
            _count_start(folder)
            around = (sys.executable, "-P", "-m", "penstock.launch.gateway.job_process", str(lock.fileno()))
            with open(folder / LOG_FILE, "ab", opener=opener) as log:
                self._begun[job.id] = subprocess.Popen(
                    (*around, str(folder), *command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env=without_configuration(os.environ),
                    pass_fds=(lock.fileno(),),
                    start_new_session=True,
                )

    def find(self, job: str) -> Stage | Outcome:
        """Return where a job is, also of one that another gateway started."""
        folder = self.jobs / job
        try:
            with open_regular(folder / LOCK_FILE) as lock:
                if not try_lock(lock, fcntl.LOCK_SH):
                    return Stage.GOING_ON
        except (FileNotFoundError, NoPlainFile):
            return Stage.NOT_BEGUN
        child = self._begun.pop(job, None)
        if child is not None:
            child.wait()  # its lock is free, so it has ended: the kernel may forget it
        return self.outcome(job) if self.has_begun(job) else Stage.NOT_BEGUN

    def stop(self, job: str) -> bool:
        """Ask the processes of a job to end; False: none of them is known yet, or none lives any more."""
        begun = self.begun(job)
        if begun is None or self.find(job) is not Stage.GOING_ON:
            return False
        os.killpg(begun["group"], signal.SIGTERM)  # the lock says that the group is there, and so its own
        return True

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the dry run of a job as JSON values; raises CannotBegin, OSError.

        It ends with the gateway: the kernel closes what its launcher watches, also where that is killed.
        """
        command = penstock("train", CONFIG_FILE, "--run-dir", RUN_FOLDER, "--dry-run", "--json")
        self._remove_left()
        with tempfile.TemporaryDirectory(prefix=_ESTIMATE, dir=self.jobs) as made, _lifeline() as watched:
            folder = Path(made)
            self.write_recipe(folder, template, numbers, prepare(folder))
            try:
                with (folder / LOG_FILE).open(
                    "wb"
                ) as log:  # a pipe would end it where it next says something
                    done = subprocess.run(
                        command,
                        cwd=folder,
                        env={**without_configuration(os.environ), LIFELINE_VARIABLE: str(watched)},
                        pass_fds=(watched,),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        check=False,
                        timeout=ESTIMATE_S,
                    )
            except subprocess.TimeoutExpired as error:
                raise CannotBegin(
                    f"the dry run took longer than {ESTIMATE_S:g} s: train without it"
                ) from error
            last = last_line(folder / LOG_FILE)
        return dry_run(done.stdout, last, done.returncode)

    def _remove_left(self) -> None:
        """Remove the folders of dry runs whose gateway was killed; they hold what people wrote."""
        for folder in self.jobs.glob(f"{_ESTIMATE}*"):
            if time.time() - folder.lstat().st_mtime > 2 * ESTIMATE_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lifeline() -> Iterator[int]:
    """Yield what a process may watch to see that this one, or the block, has ended."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _count_start(folder: Path) -> None:
    """Count a start durably; raises CannotBegin for one too many."""
    with open(folder / STARTS_FILE, "ab", opener=opener) as file:
        if file.tell() >= MAX_STARTS:
            said = problem((folder,)) or last_line(folder / LOG_FILE) or "it left no word"
            raise CannotBegin(f"its process ended {MAX_STARTS} times before it had begun: {said}")
        file.write(b".")
        file.flush()
        os.fsync(file.fileno())
