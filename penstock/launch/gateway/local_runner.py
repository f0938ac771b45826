"""Jobs of a gateway on this machine: `penstock train` in a folder each, which any gateway finds again."""

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
from penstock.launch.gateway.job_templates import TemplateFolder, chosen_settings
from penstock.launch.inspection.curve import Curve
from penstock.launch.inspection.processes import METRICS_FILE
from penstock.launch.jobs import local_jobs
from penstock.launch.jobs.job_process import ENDED_FILE, LOG_FILE
from penstock.launch.jobs.local_jobs import has_begun, lifeline, read_noted, try_lock
from penstock.launch.run.memory import problem
from penstock.launch.run.summary import SUMMARY_FILE
from penstock.launch.run.supervisor import last_line, last_line_of, penstock, without_configuration
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK, Fatal
from penstock.runtime.lifecycle import LIFELINE_VARIABLE
from penstock.runtime.output_file import sync_folder, write_once
from penstock.training import lay_over

# ---- The folders of jobs: what runners on one place of files have in common, wherever the processes are.

RUN_FOLDER: Final = "run"
CONFIG_FILE: Final = "job.toml"
CURVE_POINTS: Final = 300
_LOST: Final = "its processes were killed, or the machine went down: nothing says how it ended"


class JobFolders:
    """The folders below `jobs`, which all runners have. templates: folder of the templates' files.

    Raises ConfigurationError for a template that is wrong, OSError for a folder that cannot be used.
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
        """Hold the place, where no other gateway does; the kernel lets go of it when a process ends."""
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
        """Write what a job is configured by: its template, numbers over it, `settings` over both.

        Raises CannotBegin for a template that is there no more, OSError.
        """
        found, recipe = self.templates().get(template), self._templates.recipe(template)
        if found is None or recipe is None:
            raise CannotBegin(f"there is no template {template!r} any more")
        for layer in (chosen_settings(found, numbers), settings):
            lay_over(recipe, layer)
        with open(folder / CONFIG_FILE, "w", opener=opener) as file:
            file.write(tomli_w.dumps(recipe))

    def outcome(self, job: str, lost: str = _LOST) -> Outcome:
        """Return how a job that was begun, and whose processes are gone, has ended.

        lost: the cause where nothing in its folder says one.
        """
        folder = self.jobs / job
        summary, ended = read_noted(folder / RUN_FOLDER / SUMMARY_FILE), read_noted(folder / ENDED_FILE)
        code = None if ended is None else ended["code"]
        is_whole = summary is not None and not summary["interrupted"] and "failure" not in summary
        if is_whole and code in {EXIT_OK, None}:
            return Outcome(state=JobState.FINISHED, summary=summary)
        if code is None or code == EXIT_OK:
            full = problem((folder, folder / RUN_FOLDER))
            return Outcome(state=JobState.LOST, cause=lost if full is None else full, summary=summary)
        if code == EXIT_INTERRUPTED:
            return Outcome(state=JobState.CANCELLED, cause="it was asked to end", summary=summary)
        said = (summary or {}).get("failure") or last_line(folder / LOG_FILE)
        return Outcome(
            state=JobState.FAILED, cause=said or f"it ended with exit code {code}", summary=summary
        )


def dry_run(said: bytes, last: str, code: int) -> dict[str, Any]:
    """Return the dry run that a process has printed; raises CannotBegin with its last word where it has none.

    said: its standard output. last: line of its log, "" for none. code: with which it ended.
    """
    try:
        return dict(json.loads(said))
    except ValueError as error:
        raise CannotBegin(last or f"the dry run ended with {code}") from error


def _written(file: Path) -> float:
    """Return when a file was written last, in Unix seconds; 0.0 where there is none."""
    try:
        with open_regular(file) as opened:
            return os.fstat(opened.fileno()).st_mtime
    except (FileNotFoundError, NoPlainFile):
        return 0.0


def _place(file: Path) -> str:
    """Return the name of a place, made once, also where gateways of several machines share it.

    Jobs are found again by it: it is on the disk, with the folder that it names, before a row has it.
    """
    if write_once(file, os.urandom(8).hex().encode()):
        sync_folder(file.parent.parent)
    return file.read_text()


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
        folder = self.folder(job.id)
        self.write_recipe(folder, job.template, job.numbers, settings)
        command = penstock("train", CONFIG_FILE, "--run-dir", RUN_FOLDER, "--json")
        try:
            child = local_jobs.start(folder, command, cwd=folder, env=without_configuration(os.environ))
        except Fatal as error:
            raise CannotBegin(str(error)) from error
        if child is not None:
            self._begun[job.id] = child

    def find(self, job: str) -> Stage | Outcome:
        goes_on = local_jobs.goes_on(self.jobs / job)
        if goes_on is None:
            return Stage.NOT_BEGUN
        if goes_on:
            return Stage.GOING_ON
        child = self._begun.pop(job, None)
        if child is not None:
            child.wait()  # its lock is free, so it has ended: the kernel may forget it
        return self.outcome(job) if has_begun(self.jobs / job) else Stage.NOT_BEGUN

    def stop(self, job: str) -> bool:
        return local_jobs.stop(self.jobs / job)

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """It ends with the gateway, also one that is killed: the kernel closes what its launcher watches."""
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
                # A pipe for its errors would end it where it next says something.
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
        """Remove the folders of dry runs whose gateway was killed; they hold what people wrote."""
        for folder in self.jobs.glob(f"{_ESTIMATE}*"):
            if time.time() - folder.lstat().st_mtime > 2 * ESTIMATE_S:
                shutil.rmtree(folder, ignore_errors=True)
