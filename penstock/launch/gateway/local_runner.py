"""Jobs of a gateway on this machine: `penstock train` in a folder each, by which any gateway finds it."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import tomli_w

from penstock.config.run_folder import NoPlainFile, guard, make_private, open_regular, opener
from penstock.gateway.jobs.job_records import CannotBegin, Job, Outcome, Stage, Template
from penstock.gateway.store.tables import JobState
from penstock.launch.gateway.job_templates import TemplateFolder, configured
from penstock.launch.inspection.curve import Curve
from penstock.launch.inspection.processes import METRICS_FILE
from penstock.launch.jobs.job_process import LOG_FILE
from penstock.launch.jobs.local_job import (
    LocalJob,
    has_begun,
    lifeline,
    noted_exit_code,
    read_noted,
    try_lock,
)
from penstock.launch.run.memory import problem
from penstock.launch.run.summary import SUMMARY_FILE
from penstock.launch.run.supervisor import last_line, last_line_of, penstock, without_configuration
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK, Fatal
from penstock.runtime.lifecycle import LIFELINE_VARIABLE
from penstock.runtime.output_file import sync_folder, write_once
from penstock.training import lay_over

# ---- The folders of jobs, which both runners have.

RUN_FOLDER: Final = "run"
CONFIG_FILE: Final = "job.toml"
CURVE_POINTS: Final = 300
_LOST: Final = "its processes were killed, or the machine went down: nothing says how it ended"


class JobFolders:
    """The folders of jobs below `jobs`. templates: folder of the templates' files.

    Raises ConfigurationError for a wrong template, OSError for a folder that cannot be used.
    """

    def __init__(self, jobs: Path, templates: Path) -> None:
        self._templates = TemplateFolder(templates)
        make_private(jobs)
        self.jobs = jobs.absolute()
        guard(self.jobs)  # trainings write there
        self.place = _place(self.jobs / "place")

    def templates(self) -> Mapping[str, Template]:
        return self._templates.templates()

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the place, where no other gateway does; the kernel releases it when a process ends."""
        with (self.jobs / "place.lock").open("a") as file:
            yield try_lock(file, fcntl.LOCK_EX)

    def folder(self, job: str) -> Path:
        folder = self.jobs / job
        make_private(folder)
        return folder

    def run_folder(self, job: str) -> Path:
        return self.jobs / job / RUN_FOLDER

    def read_log(self, job: str, begin: int, most: int) -> bytes:
        try:
            with open_regular(self.jobs / job / LOG_FILE) as file:
                file.seek(begin)
                return file.read(most)
        except FileNotFoundError:
            return b""

    def heard(self, job: str) -> float:
        files = self.jobs / job / LOG_FILE, self.run_folder(job) / METRICS_FILE
        return max(map(_written, files))

    def read_curve(self, job: str) -> Mapping[str, list[Any]]:
        points = Curve(self.run_folder(job) / METRICS_FILE, CURVE_POINTS).poll()
        return {
            "updates": [point.updates for point in points],
            "envSteps": [point.env_steps for point in points],
            "meanReturn": [point.mean_return for point in points],
        }

    def write_recipe(
        self, folder: Path, template: str, numbers: Mapping[str, float], settings: Mapping[str, Any]
    ) -> None:
        """Write the configuration of a job: its template, numbers over it, `settings` over both.

        Raises CannotBegin for a template that does not exist any more, OSError.
        """
        found = self.templates().get(template)
        if found is None:
            raise CannotBegin(f"there is no template {template!r} any more")
        recipe = configured(found, numbers)
        lay_over(recipe, settings)
        with open(folder / CONFIG_FILE, "w", opener=opener) as file:
            file.write(tomli_w.dumps(recipe))

    def outcome(self, job: str, lost: str = _LOST) -> Outcome:
        """Return how a job that had begun, and whose processes are gone, has ended.

        lost: the cause where nothing in the folder tells one.
        """
        folder = self.jobs / job
        summary, code = read_noted(folder / RUN_FOLDER / SUMMARY_FILE), noted_exit_code(folder)
        is_whole = summary is not None and not summary["interrupted"] and "failure" not in summary
        if is_whole and code in {EXIT_OK, None}:
            return Outcome(state=JobState.FINISHED, summary=summary)
        if code is None or code == EXIT_OK:
            full = problem((folder, folder / RUN_FOLDER))
            return Outcome(state=JobState.LOST, cause=lost if full is None else full, summary=summary)
        if code == EXIT_INTERRUPTED:
            return Outcome(state=JobState.CANCELLED, cause="it was asked to end", summary=summary)
        cause = (summary or {}).get("failure") or last_line(folder / LOG_FILE)
        cause = cause or f"it ended with exit code {code}"
        return Outcome(state=JobState.FAILED, cause=cause, summary=summary)


def dry_run(output: bytes, last: str, code: int) -> dict[str, Any]:
    """Return the result of a dry run from the output of its process; raises CannotBegin without one.

    last: last line of its log, "" for none. code: its exit code.
    """
    try:
        return dict(json.loads(output))
    except ValueError as error:
        raise CannotBegin(last or f"the dry run ended with {code}") from error


def _written(file: Path) -> float:
    """Return the Unix time at which a file was last written; 0.0 without the file."""
    try:
        with open_regular(file) as opened:
            return os.fstat(opened.fileno()).st_mtime
    except (FileNotFoundError, NoPlainFile):
        return 0.0


def _place(file: Path) -> str:
    """Return the name of a place, made once, also where gateways of several machines share its folder.

    The name is on the disk before the row of a job has it: jobs are found by it.
    """
    if write_once(file, os.urandom(8).hex().encode()):
        sync_folder(file.parent.parent)
    return file.read_text()


ESTIMATE_S: Final = 900.0
"""Longest time of a dry run, in seconds."""
_ESTIMATE: Final = "estimate-"


class LocalRunner(JobFolders):
    """Runs jobs as processes of this machine; arguments and errors are those of `JobFolders`."""

    def __init__(self, jobs: Path, templates: Path) -> None:
        super().__init__(jobs, templates)
        self._started = dict[str, LocalJob]()

    def begin(self, job: Job, settings: Mapping[str, Any]) -> None:
        folder = self.folder(job.id)
        self.write_recipe(folder, job.template, job.numbers, settings)
        one = LocalJob(folder)
        try:
            one.start(penstock("train", CONFIG_FILE, "--run-dir", RUN_FOLDER, "--json"))
        except Fatal as error:
            raise CannotBegin(str(error)) from error
        self._started[job.id] = one

    def find(self, job: str) -> Stage | Outcome:
        is_running = self._started.get(job, LocalJob(self.jobs / job)).is_running()
        if is_running:
            return Stage.GOING_ON
        self._started.pop(job, None)
        is_over = is_running is not None and has_begun(self.jobs / job)
        return self.outcome(job) if is_over else Stage.NOT_BEGUN

    def stop(self, job: str) -> bool:
        return LocalJob(self.jobs / job).stop()

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Make the dry run; it ends with the gateway, whose end closes the pipe that its launcher watches."""
        command = penstock("train", CONFIG_FILE, "--run-dir", RUN_FOLDER, "--dry-run", "--json")
        self._remove_left()
        with (
            tempfile.TemporaryDirectory(prefix=_ESTIMATE, dir=self.jobs) as made,
            tempfile.TemporaryFile() as log,  # without a name, in whose place others could put a link
            lifeline() as watched,
        ):
            folder = Path(made)
            self.write_recipe(folder, template, numbers, prepare(folder))
            try:
                # With a pipe for its errors it would end at its next line, were this process killed.
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
            last = last_line_of(log)
        return dry_run(done.stdout, last, done.returncode)

    def _remove_left(self) -> None:
        """Remove the folders of dry runs whose gateway was killed, with the people's texts in them."""
        for folder in self.jobs.glob(f"{_ESTIMATE}*"):
            if time.time() - folder.lstat().st_mtime > 2 * ESTIMATE_S:
                shutil.rmtree(folder, ignore_errors=True)
