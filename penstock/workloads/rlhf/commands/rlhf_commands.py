"""`penstock rlhf`: feedback as a file, reward models, and answers of a run's final language model."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.runtime.foreground import finish
from penstock.workloads.rlhf.commands.generate import generate
from penstock.workloads.rlhf.commands.reward_commands import reward_commands

rlhf_commands = typer.Typer(help="Feedback, reward models, and answers of a run.", no_args_is_help=True)
feedback_commands = typer.Typer(
    help="Feedback: out of a registry, a data set or a file.", no_args_is_help=True
)
rlhf_commands.add_typer(feedback_commands, name="feedback")
rlhf_commands.command()(generate)
rlhf_commands.add_typer(reward_commands, name="reward")


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
