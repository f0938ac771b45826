"""`penstock control`: pause, resume, stop, checkpoint, flush, restore.

The first three change what is wanted and return. The others are commands that the learner answers: they wait
for the answer and leave with 0 where it is done, 1 where it is refused or does not come in time.
"""

import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.protocol.limits import MAX_NUMBER
from penstock.runtime.foreground import AsJson, Configured, command

if TYPE_CHECKING:
    from penstock.launch.control.control_calls import ControlCalls

control_commands = typer.Typer(
    help="Steer a run that goes on: pause, resume, stop, checkpoint, flush, restore.", no_args_is_help=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Which run is steered, why, and how its broker is reached."""

    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Folder of a run on this machine, or HOST:PORT of its broker."),
    ]
    reason: Annotated[str, typer.Option("--reason", help="Why, for the broker's log.")] = ""
    as_json: AsJson = False
    configured: Configured

    def opened(self) -> "AbstractContextManager[ControlCalls]":
        from penstock.launch.control.control_calls import opened_for

        return opened_for(self.run, self.configured.config, self.configured.assigned)

    def want(self, state: str) -> int:
        with self.opened() as calls:
            return calls.want(state, self.reason, as_json=self.as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that the learner answers."""

    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait for the answer; 0: do not wait.")
    ] = 60.0
    request_id: Annotated[
        str | None,
        typer.Option(
            "--request-id",
            metavar="ID",
            help=(
                "Id of the command: asked again with the same one it is not done twice. Default: a new one."
            ),
        ),
    ] = None
    call: Call

    def ask(self, call: str, **about: str | int) -> int:
        """Make a command of what it is about; return the exit code when it is answered."""
        request_id = self.request_id or secrets.token_hex(8)
        with self.call.opened() as calls:
            ask = calls.command(call, request_id=request_id, reason=self.call.reason, **about)
            return calls.await_answer(ask, self.timeout, as_json=self.call.as_json)


def _named(name: str | None) -> str | None:
    if name == "":
        raise typer.BadParameter("it is empty, and the checkpoint would not be kept; give it a name")
    return name


@command(control_commands)
def pause(call: Call) -> int:
    """Have actors and learner wait."""
    return call.want("Pause")


@command(control_commands)
def resume(call: Call) -> int:
    """Let a paused run go on."""
    return call.want("Resume")


@command(control_commands)
def stop(call: Call) -> int:
    """End a run: actors drain, the learner commits a last checkpoint. It is not taken back."""
    return call.want("Stop")


@command(control_commands)
def checkpoint(
    name: Annotated[
        str | None,
        typer.Option(
            "--name", callback=_named, help="Keep it under this name, so that `restore` can go back to it."
        ),
    ] = None,
    *,
    asked: Command,
) -> int:
    """Make a checkpoint now; one with a name stays until its folder is removed."""
    return asked.ask("Checkpoint", name=name or "")


@command(control_commands)
def restore(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a checkpoint.")], asked: Command
) -> int:
    """Go back to model, optimiser and normalisers of a named checkpoint; all that counts goes on."""
    return asked.ask("Restore", name=name)


@command(control_commands)
def flush(
    min_steps: Annotated[
        int,
        typer.Option(
            "--min-steps", min=1, max=MAX_NUMBER, help="Fewest steps to take; with fewer nothing is taken."
        ),
    ] = 1,
    *,
    asked: Command,
) -> int:
    """Have the learner take what is pending as its next batch, though it is smaller than a batch."""
    return asked.ask("Flush", min_steps=min_steps)
