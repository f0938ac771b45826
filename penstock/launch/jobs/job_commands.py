"""`penstock jobs`: trainings in the background, started, listed, followed and stopped.

The folder of such a job is that of its run.
"""

import fcntl
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import LOCK_FILE as RUN_LOCK_FILE
from penstock.config.run_folder import make_private
from penstock.launch.jobs.job_process import LOG_FILE
from penstock.launch.jobs.local_job import LocalJob, read_noted, try_lock
from penstock.launch.run.summary import SUMMARY_FILE
from penstock.launch.run.supervisor import penstock
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.foreground import AsJson, command
from penstock.runtime.output_file import replace_file

JOB_FILE: Final = "job.json"
STOP_FILE: Final = "job.stop"
_LOOK_S: Final = 0.1
_FOLLOW_S: Final = 0.5
_RUNS: Final = Path("runs")

Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that holds runs.")]
Name = Annotated[str, typer.Argument(help="Name of a job.")]

job_commands = typer.Typer(help="Trainings in the background of this machine.", no_args_is_help=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJob:
    """A job as it is now.

    state: running, finished, interrupted or failed. started: Unix time. command: arguments of `penstock
    train`. cause: of a failure, in words.
    """

    name: str
    state: str
    started: float
    command: list[str]
    cause: str


@command(job_commands, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def start(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", help="Its name, and that of its folder.")],
    runs: Runs = _RUNS,
) -> int:
    """Start `penstock train` with all further arguments, and return when it runs."""
    folder = folder_of(runs, name)
    if folder.exists():
        raise ConfigurationError(f"--name {name}: {folder} is there already; give another name")
    make_private(folder)
    # Before there is a process: if this one is killed in between, the job is listed all the same.
    record = {"command": context.args, "started": time.time()}
    replace_file(folder / JOB_FILE, json.dumps(record).encode())
    job = LocalJob(folder)
    job.start(penstock("train", *context.args, "--run-dir", str(folder)), here=True)
    failpoint("jobs.started")
    while not _is_held(folder):
        if not job.wait(_LOOK_S):
            continue
        if (code := job.exit_code()) == EXIT_OK:
            break
        cause = job.last_line()
        shutil.rmtree(folder)  # there is no run: the name is free again
        raise Fatal(f"{name} ended with {code}: {cause}")
    sys.stdout.write(f"{folder}: started; its output is in {LOG_FILE}\n")
    return EXIT_OK


@command(job_commands, "list")
def list_jobs(runs: Runs = _RUNS, as_json: AsJson = False) -> int:
    """List jobs, newest first, with their states."""
    found = read_named(runs)
    if as_json:
        sys.stdout.write(json.dumps([asdict(one) for one in found]) + "\n")
    else:
        sys.stdout.writelines(f"{_line(one)}\n" for one in found)
    return EXIT_OK


@command(job_commands)
def logs(
    name: Name,
    runs: Runs = _RUNS,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> int:
    """Print the output of a job."""
    folder = folder_of(runs, name)
    look(folder)
    with (folder / LOG_FILE).open("rb") as file:
        while True:
            is_last = not follow or look(folder).state != "running"
            sys.stdout.write(file.read().decode(errors="replace"))
            sys.stdout.flush()
            if is_last:
                return EXIT_OK
            time.sleep(_FOLLOW_S)


@command(job_commands)
def stop(name: Name, runs: Runs = _RUNS) -> int:
    """Ask a job to end; it concludes as after Ctrl-C, and `penstock train --resume` goes on with it."""
    stop_named(folder_of(runs, name))
    return EXIT_OK


def folder_of(runs: Path, name: str) -> Path:
    """Return the folder of a job; raises ConfigurationError for a name that leads elsewhere."""
    if not name or Path(name).name != name or name.startswith((".", "-")):
        raise ConfigurationError(f"--name {name!r}: is no name of a folder")
    return runs / name


def read_named(runs: Path) -> list[NamedJob]:
    """Return the jobs of a folder of runs, newest first; a file that cannot be read hides no other job."""
    found = list[NamedJob]()
    for folder in (file.parent for file in runs.glob(f"*/{JOB_FILE}")):
        try:
            found.append(look(folder))
        except ConfigurationError:
            state = "running" if _is_held(folder) else "failed"
            cause = f"{JOB_FILE} cannot be read"
            found.append(NamedJob(name=folder.name, state=state, started=0.0, command=[], cause=cause))
    return sorted(found, key=lambda one: -one.started)


def look(folder: Path) -> NamedJob:
    """Return a job as it is now; raises ConfigurationError for a folder without one."""
    try:
        stored = json.loads((folder / JOB_FILE).read_text())
        started, words = float(stored["started"]), list(stored["command"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigurationError(
            f"{folder}: is no job; `penstock jobs list` names those that there are"
        ) from error
    state, cause = _state(folder)
    return NamedJob(name=folder.name, state=state, started=started, command=words, cause=cause)


def stop_named(folder: Path) -> None:
    """Ask a job to end, as Ctrl-C does; one that has ended, or was asked before, stays as it is.

    Raises ConfigurationError for a folder without a job, Fatal where its processes are not known.
    """
    if look(folder).state != "running":
        return
    try:
        (folder / STOP_FILE).touch(exist_ok=False)
    except FileExistsError:
        return  # a second signal would end it at once, without its last checkpoint
    if not LocalJob(folder).stop() and _is_held(folder):
        (folder / STOP_FILE).unlink()
        raise Fatal(
            f"{folder.name}: its processes are not known, as of a run that was resumed by hand; end the "
            f"`penstock train` whose --run-dir is {folder}, or `penstock control stop {folder}`"
        )


def _is_held(folder: Path) -> bool:
    """Return whether a launcher holds the folder of a run, also that of a run resumed by hand."""
    try:
        with (folder / RUN_LOCK_FILE).open() as lock:
            return not try_lock(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _state(folder: Path) -> tuple[str, str]:
    """Return the state of a job, and the cause of its failure."""
    if _is_held(folder):
        return "running", ""
    summary = read_noted(folder / SUMMARY_FILE)
    if summary is None:
        return "failed", LocalJob(folder).last_line()
    if summary.get("interrupted"):
        return "interrupted", ""
    failure = str(summary.get("failure") or "")
    return ("failed", failure) if failure else ("finished", "")


def _line(one: NamedJob) -> str:
    began = datetime.fromtimestamp(one.started).astimezone().strftime("%Y-%m-%d %H:%M")
    cause = f"  {one.cause}" if one.cause else ""
    return f"{one.name:24} {one.state:12} {began}  {' '.join(one.command)}{cause}"
