"""`penstock jobs`: trainings in the background, started, listed, followed and stopped."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.foreground import AsJson, command

if TYPE_CHECKING:
    from penstock.launch.jobs.local_jobs import NamedJob

job_commands = typer.Typer(help="Trainings in the background of this machine.", no_args_is_help=True)

Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that holds runs.")]
Name = Annotated[str, typer.Argument(help="Name of a job.")]
_RUNS = Path("runs")


@command(job_commands, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def start(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", help="Its name, and that of its folder.")],
    runs: Runs = _RUNS,
) -> int:
    """Start `penstock train` with all further arguments, and return when it goes on."""
    from penstock.launch.jobs.job_process import LOG_FILE
    from penstock.launch.jobs.local_jobs import start_named

    start_named(runs, name, context.args)
    sys.stdout.write(f"{runs / name}: started; it says what it does in {LOG_FILE}\n")
    return 0


@command(job_commands, "list")
def list_jobs(runs: Runs = _RUNS, as_json: AsJson = False) -> int:
    """List jobs, newest first, with their states."""
    from dataclasses import asdict

    from penstock.launch.jobs.local_jobs import read_named

    found = read_named(runs)
    if as_json:
        sys.stdout.write(json.dumps([asdict(one) for one in found]) + "\n")
    else:
        sys.stdout.writelines(f"{_line(one)}\n" for one in found)
    return 0


@command(job_commands)
def logs(
    name: Name,
    runs: Runs = _RUNS,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> int:
    """Print what a job has said."""
    import threading

    from penstock.launch.jobs.job_process import LOG_FILE
    from penstock.launch.jobs.local_jobs import folder_of, look

    folder, pause = folder_of(runs, name), threading.Event()
    look(folder)
    with (folder / LOG_FILE).open("rb") as file:
        while True:
            goes_on = follow and look(folder).state == "running"
            sys.stdout.write(file.read().decode(errors="replace"))
            sys.stdout.flush()
            if not goes_on:
                return 0
            pause.wait(0.5)


@command(job_commands)
def stop(name: Name, runs: Runs = _RUNS) -> int:
    """Ask a job to end; it concludes as after Ctrl-C, and `penstock train --resume` goes on with it."""
    from penstock.launch.jobs.local_jobs import folder_of, stop_named

    stop_named(folder_of(runs, name))
    return 0


def _line(one: "NamedJob") -> str:
    from datetime import datetime

    began = datetime.fromtimestamp(one.started).astimezone().strftime("%Y-%m-%d %H:%M")
    cause = f"  {one.cause}" if one.cause else ""
    return f"{one.name:24} {one.state:12} {began}  {' '.join(one.command)}{cause}"
