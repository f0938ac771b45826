"""`penstock control`: pause, resume, stop, checkpoint, flush, restore.

The first three change what is wanted and return. The others are commands that the learner answers: they wait
for the answer and leave with 0 where it is done, 1 where it is refused or does not come in time.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.protocol.limits import MAX_NUMBER
from penstock.runtime.foreground import AsJson, Assignments, ConfigFile, Insecure, assigned, finish

if TYPE_CHECKING:
    from penstock.launch.control.control_calls import ControlCalls

control_commands = typer.Typer(
    help="Steer a run that goes on: pause, resume, stop, checkpoint, flush, restore.", no_args_is_help=True
)

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run on this machine, or HOST:PORT of its broker.")
]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the broker's log.")]
TimeoutS = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the answer; 0: do not wait.")
]
RequestId = Annotated[
    str | None,
    typer.Option(
        "--request-id",
        metavar="ID",
        help="Id of the command: asked again with the same one it is not done twice. Default: a new one.",
    ),
]


def _named(name: str | None) -> str | None:
    if name == "":
        raise typer.BadParameter("it is empty, and the checkpoint would not be kept; give it a name")
    return name


@control_commands.command()
def pause(
    run: Run,
    reason: Reason = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    insecure: Insecure = False,
) -> None:
    """Have actors and learner wait."""
    _with(run, config, assignments, insecure, lambda calls: calls.want("Pause", reason, as_json=as_json))


@control_commands.command()
def resume(
    run: Run,
    reason: Reason = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    insecure: Insecure = False,
) -> None:
    """Let a paused run go on."""
    _with(run, config, assignments, insecure, lambda calls: calls.want("Resume", reason, as_json=as_json))


@control_commands.command()
def stop(
    run: Run,
    reason: Reason = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    insecure: Insecure = False,
) -> None:
    """End a run: actors drain, the learner commits a last checkpoint. It is not taken back."""
    _with(run, config, assignments, insecure, lambda calls: calls.want("Stop", reason, as_json=as_json))


@control_commands.command()
def checkpoint(
    run: Run,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", callback=_named, help="Keep it under this name, so that `restore` can go back to it."
        ),
    ] = None,
    timeout: TimeoutS = 60.0,
    request_id: RequestId = None,
    reason: Reason = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    insecure: Insecure = False,
) -> None:
    """Make a checkpoint now; one with a name stays until its folder is removed."""

    def body(calls: "ControlCalls") -> int:
        command = calls.checkpoint(name or "", _id(request_id), reason)
        return calls.await_answer(command, timeout, as_json=as_json)

    _with(run, config, assignments, insecure, body)


@control_commands.command()
def restore(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a checkpoint.")],
    timeout: TimeoutS = 60.0,
    request_id: RequestId = None,
    reason: Reason = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    insecure: Insecure = False,
) -> None:
    """Go back to model, optimiser and normalisers of a named checkpoint; all that counts goes on."""

    def body(calls: "ControlCalls") -> int:
        return calls.await_answer(calls.restore(name, _id(request_id), reason), timeout, as_json=as_json)

    _with(run, config, assignments, insecure, body)


@control_commands.command()
def flush(
    run: Run,
    min_steps: Annotated[
        int,
        typer.Option(
            "--min-steps", min=1, max=MAX_NUMBER, help="Fewest steps to take; with fewer nothing is taken."
        ),
    ] = 1,
    timeout: TimeoutS = 60.0,
    request_id: RequestId = None,
    reason: Reason = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    insecure: Insecure = False,
) -> None:
    """Have the learner take what is pending as its next batch, though it is smaller than a batch."""

    def body(calls: "ControlCalls") -> int:
        return calls.await_answer(calls.flush(min_steps, _id(request_id), reason), timeout, as_json=as_json)

    _with(run, config, assignments, insecure, body)


def _with(
    run: str,
    config: Path | None,
    assignments: list[str] | None,
    insecure: bool,
    body: Callable[["ControlCalls"], int],
) -> None:
    def opened() -> int:
        from penstock.launch.control.control_calls import opened_for

        with opened_for(run, config, assigned(assignments, insecure=insecure)) as calls:
            return body(calls)

    finish(opened)


def _id(request_id: str | None) -> str:
    return request_id or secrets.token_hex(8)
