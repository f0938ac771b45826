"""Jobs as processes of this machine: `penstock train` in a folder each, which any gateway finds again.

    JOBS/place             the name of this place
    JOBS/place.lock        held by the gateway that looks after the place
    JOBS/ID/lock           held by the processes of a job as long as one of them lives
    JOBS/ID/starts         a byte for each time that its process was started before it was begun
    JOBS/ID/begun.json     was there before the training began
    JOBS/ID/ended.json     its exit code
    JOBS/ID/job.toml, train.log, run/

A job whose lock is free and that was begun has ended, and is never begun again. One that was not begun had
nothing started that lives, because what is started inherits the lock before it does anything; it is started
again, a few times.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import tomli_w

from gateway.jobs.job_records import Job, Outcome, Template
from gateway.jobs.runner import CannotBegin, Stage
from gateway.store.tables import JobState
from launch.gateway.job_process import BEGUN_FILE, ENDED_FILE, LOG_FILE
from launch.gateway.job_templates import chosen_settings, read_templates, recipe_of
from launch.inspection.curve import Curve
from launch.inspection.observation import METRICS_FILE
from launch.run.child_process import last_line, penstock, without_configuration
from launch.run.disk import problem
from launch.run.summary import SUMMARY_FILE
from penstock.config.run_folder import make_private
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK
from penstock.training import lay_over

RUN_FOLDER: Final = "run"
LOCK_FILE: Final = "lock"
CONFIG_FILE: Final = "job.toml"
STARTS_FILE: Final = "starts"
MAX_STARTS: Final = 3
"""How often a job's process is started that ends before it has noted that it began."""
CURVE_POINTS: Final = 300
ESTIMATE_S: Final = 900.0
"""Longest time of a dry run, in seconds."""
_LOST: Final = "its processes were killed, or the machine went down: nothing says how it ended"


class LocalRunner:
    """Runs jobs below a folder. templates: folder of their files.

    Raises ConfigurationError for a template that is wrong, OSError for a folder that cannot be used.
    """

    def __init__(self, jobs: Path, templates: Path) -> None:
        make_private(jobs)
        self._jobs = jobs.absolute()
        self._templates = templates
        self._begun = dict[str, subprocess.Popen[bytes]]()
        self.place = _place(self._jobs / "place")
        self.templates()

    def templates(self) -> Mapping[str, Template]:
        """Return the templates by name."""
        return read_templates(self._templates)

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the place, where no other gateway does; the kernel lets go of it when a process ends."""
        with (self._jobs / "place.lock").open("a") as file:
            yield _try_lock(file, fcntl.LOCK_EX)

    def folder(self, job: str) -> Path:
        """Return the folder of a job, made where it is absent; raises OSError."""
        folder = self._jobs / job
        make_private(folder)
        return folder

    def run_folder(self, job: str) -> Path:
        """Return the folder of a job's run, whether it is there or not."""
        return self._jobs / job / RUN_FOLDER

    def begin(self, job: Job, settings: Mapping[str, Any]) -> None:
        """Start the processes of a job, unless they were ever started; raises CannotBegin, OSError."""
        folder = self.folder(job.id)
        self._write_recipe(folder, job.template, job.numbers, settings)
        command = penstock("train", CONFIG_FILE, "--run-dir", RUN_FOLDER, "--json")
        with (folder / LOCK_FILE).open("a") as lock:
            if not _try_lock(lock, fcntl.LOCK_EX) or (folder / BEGUN_FILE).exists():
                return
            _count_start(folder)
            around = (sys.executable, "-P", "-m", "launch.gateway.job_process", str(lock.fileno()))
            with (folder / LOG_FILE).open("ab") as log:
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
        folder = self._jobs / job
        try:
            with (folder / LOCK_FILE).open() as lock:
                if not _try_lock(lock, fcntl.LOCK_SH):
                    return Stage.GOING_ON
        except FileNotFoundError:
            return Stage.NOT_BEGUN
        child = self._begun.pop(job, None)
        if child is not None:
            child.wait()  # its lock is free, so it has ended: the kernel may forget it
        return _outcome(folder) if (folder / BEGUN_FILE).exists() else Stage.NOT_BEGUN

    def stop(self, job: str) -> bool:
        """Ask the processes of a job to end; False: none of them is known yet, or none lives any more."""
        begun = _read(self._jobs / job / BEGUN_FILE)
        if begun is None or self.find(job) is not Stage.GOING_ON:
            return False
        os.killpg(begun["group"], signal.SIGTERM)  # the lock says that the group is there, and so its own
        return True

    def read_log(self, job: str, begin: int, most: int) -> bytes:
        """Return at most `most` bytes of a job's log from byte `begin` on."""
        try:
            with (self._jobs / job / LOG_FILE).open("rb") as file:
                file.seek(begin)
                return file.read(most)
        except FileNotFoundError:
            return b""

    def read_curve(self, job: str) -> Mapping[str, list[Any]]:
        """Return steps and mean return of a job's run as columns, oldest first."""
        points = Curve(self._jobs / job / RUN_FOLDER / METRICS_FILE, CURVE_POINTS).poll()
        return {
            "updates": [point.updates for point in points],
            "envSteps": [point.env_steps for point in points],
            "meanReturn": [point.mean_return for point in points],
        }

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the dry run of a job as JSON values; raises CannotBegin, OSError."""
        command = penstock("train", CONFIG_FILE, "--run-dir", RUN_FOLDER, "--dry-run", "--json")
        with tempfile.TemporaryDirectory(prefix="estimate-", dir=self._jobs) as made:
            folder = Path(made)
            self._write_recipe(folder, template, numbers, prepare(folder))
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=without_configuration(os.environ),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=ESTIMATE_S,
                )
            except subprocess.TimeoutExpired as error:
                raise CannotBegin(
                    f"the dry run took longer than {ESTIMATE_S:g} s: train without it"
                ) from error
        try:
            return dict(json.loads(done.stdout))
        except ValueError as error:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise CannotBegin(said[-1] if said else f"the dry run ended with {done.returncode}") from error

    def _write_recipe(
        self, folder: Path, template: str, numbers: Mapping[str, float], settings: Mapping[str, Any]
    ) -> None:
        """Write what a job is configured by: its template, numbers over it, `settings` over both."""
        found = self.templates().get(template)
        if found is None:
            raise CannotBegin(f"there is no template {template!r} any more")
        recipe = recipe_of(self._templates / f"{template}.toml")
        for layer in (chosen_settings(found, numbers), settings):
            lay_over(recipe, layer)
        (folder / CONFIG_FILE).write_text(tomli_w.dumps(recipe))


def _outcome(folder: Path) -> Outcome:
    """Return how a job whose processes are gone has ended."""
    summary, ended = _read(folder / RUN_FOLDER / SUMMARY_FILE), _read(folder / ENDED_FILE)
    code = None if ended is None else ended["code"]
    if summary is not None and not summary["interrupted"] and "failure" not in summary and code in {0, None}:
        return Outcome(state=JobState.FINISHED, summary=summary)
    if code is None or code == EXIT_OK:
        full = problem((folder, folder / RUN_FOLDER))
        return Outcome(state=JobState.LOST, cause=_LOST if full is None else full, summary=summary)
    if code == EXIT_INTERRUPTED:
        return Outcome(state=JobState.CANCELLED, cause="it was asked to end", summary=summary)
    said = (summary or {}).get("failure") or last_line(folder / LOG_FILE)
    return Outcome(state=JobState.FAILED, cause=said or f"it ended with exit code {code}", summary=summary)


def _count_start(folder: Path) -> None:
    """Count a start durably; raises CannotBegin for one too many."""
    with (folder / STARTS_FILE).open("ab") as file:
        if file.tell() >= MAX_STARTS:
            said = problem((folder,)) or last_line(folder / LOG_FILE) or "it left no word"
            raise CannotBegin(f"its process ended {MAX_STARTS} times before it had begun: {said}")
        file.write(b".")
        file.flush()
        os.fsync(file.fileno())


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(file.read_bytes()))
    except (FileNotFoundError, ValueError):
        return None


def _place(file: Path) -> str:
    """Return the name of a place, made once, whole, and never over another gateway's."""
    temporary = file.with_name(f"place.{os.getpid()}")
    temporary.write_text(os.urandom(8).hex())
    try:
        os.link(temporary, file)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return file.read_text()
