"""`penstock control`: pause, resume, stop, checkpoint, flush, restore.

The first three set the desired state and return. The others are commands that the learner answers: they wait
for the answer; exit code 0: done, 1: refused, or no answer in time.
"""

import json
import secrets
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.launch.control.control_calls import ControlCalls, command_line, message_json, opened_for
from penstock.protocol.limits import MAX_NUMBER
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.foreground import AsJson, Configured, command
from penstock.v1 import control_pb2 as pb

control_commands = typer.Typer(
    help="Control an active run: pause, resume, stop, checkpoint, flush, restore.", no_args_is_help=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Options of a call: the run, the reason, and how its broker is reached."""

    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Folder of a run on this machine, or HOST:PORT of its broker."),
    ]
    reason: Annotated[str, typer.Option("--reason", help="Why, for the broker's log.")] = ""
    as_json: AsJson = False
    configured: Configured

    def opened(self) -> AbstractContextManager[ControlCalls]:
        return opened_for(self.run, self.configured.config, self.configured.assigned)

    def want(self, call: str) -> int:
        """Make the call Pause, Resume or Stop, and print the state that is wanted from now on."""
        with self.opened() as calls:
            state, revision = calls.wanted(call, self.reason)
        return self.print({"desired": state, "revision": revision}, f"{state} (revision {revision})")

    def print(self, content: dict[str, Any], line: str) -> int:
        sys.stdout.write(f"{json.dumps(content) if self.as_json else line}\n")
        return EXIT_OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Options of a command that the learner answers."""

    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait for the answer; 0: do not wait.")
    ] = 60.0
    request_id: Annotated[
        str | None,
        typer.Option(
            "--request-id",
            metavar="ID",
            help=("Id of the command: a command with the same one is not done twice. Default: a new one."),
        ),
    ] = None
    call: Call

    def ask(self, call: str, **about: str | int) -> int:
        """Make the call with the fields of its request; return the exit code when it is answered."""
        request_id = self.request_id or secrets.token_hex(8)
        with self.call.opened() as calls:
            ask = calls.command(call, request_id=request_id, reason=self.call.reason, **about)
            answered = calls.await_answer(ask, self.timeout)
        self.call.print(message_json(answered), command_line(answered))
        return EXIT_FAILED if answered.state == pb.COMMAND_STATE_REFUSED else EXIT_OK


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
    order: Command,
) -> int:
    """Make a checkpoint now; one with a name stays until its folder is removed."""
    return order.ask("Checkpoint", name=name or "")


@command(control_commands)
def restore(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a checkpoint.")], order: Command
) -> int:
    """Go back to model, optimiser and normalisers of a named checkpoint; counters are not reset."""
    return order.ask("Restore", name=name)


@command(control_commands)
def flush(
    min_steps: Annotated[
        int,
        typer.Option(
            "--min-steps", min=1, max=MAX_NUMBER, help="Fewest steps to take; with fewer nothing is taken."
        ),
    ] = 1,
    *,
    order: Command,
) -> int:
    """Have the learner take what is pending as its next batch, though it is smaller than a batch."""
    return order.ask("Flush", min_steps=min_steps)
