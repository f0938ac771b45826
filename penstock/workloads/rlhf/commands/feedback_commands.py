"""`penstock feedback`: feedback from where it lies, as a file."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.runtime.foreground import finish

feedback_commands = typer.Typer(
    help="Feedback: out of a registry, a data set or a file.", no_args_is_help=True
)


@feedback_commands.callback()
def _group() -> None:
    """Feedback: out of a registry, a data set or a file."""


@feedback_commands.command()
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
) -> None:
    """Write all rows as JSON lines, which every command that reads feedback takes."""

    def body() -> int:
        from penstock.workloads.rlhf.commands.feedback_export import main

        return main(place, output, part)

    finish(body)
