"""`penstock rlhf`: feedback as a file, reward models, and answers of a run's final language model."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.foreground import command
from penstock.runtime.output_file import output_file
from penstock.workloads.rlhf.commands.generate import generate
from penstock.workloads.rlhf.commands.reward_commands import reward_commands

rlhf_commands = typer.Typer(help="Feedback, reward models, and answers of a run.", no_args_is_help=True)
feedback_commands = typer.Typer(
    help="Feedback: out of a registry, a data set or a file.", no_args_is_help=True
)
rlhf_commands.add_typer(feedback_commands, name="feedback")
command(rlhf_commands)(generate)
rlhf_commands.add_typer(reward_commands, name="reward")


@feedback_commands.callback()
def _group() -> None:
    """Feedback: out of a registry, a data set or a file."""


@command(feedback_commands)
def export(
    place: Annotated[
        str, typer.Argument(help="A registry's URL, a dataset's folder, Parquet, or JSON lines.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of JSON lines; default: stdout.")
    ] = None,
    part: Annotated[
        str | None, typer.Option("--part", help="Policy of a registry, or split of a dataset.")
    ] = None,
) -> int:
    """Write all rows as JSON lines, which every command that reads feedback takes."""
    from penstock.workloads.language.feedback.examples import BadRows
    from penstock.workloads.language.feedback.feedback_places import rows_of

    if output is not None and output.exists() and Path(place).exists() and output.samefile(place):
        raise ConfigurationError(f"--output {output}: is the file that is read; choose another name")
    bad = BadRows()
    with ExitStack() as stack:
        file = sys.stdout if output is None else stack.enter_context(output_file(output))
        for where, row in rows_of(place, part):
            try:
                file.write(_line(row))
            except (TypeError, ValueError) as error:
                bad.add(where, str(error))
    for line in bad.lines():
        sys.stderr.write(f"bad row: {line}\n")
    return EXIT_OK


def _line(row: Any) -> str:
    if isinstance(row, ValueError):
        raise row
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
