"""Options that several commands share, and what they mean for the settings."""

import math
from pathlib import Path
from typing import Annotated

import typer

Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the configuration; may be repeated."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file (TOML).")]
EndpointFile = Annotated[
    Path | None, typer.Option("--endpoints", help="Write pid, ports and address to this file when serving.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import what a folder names although it was not made here."),
]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs.")]


def finite(number: float | None) -> float | None:
    """Return a number of an option; raises typer.BadParameter for infinity and NaN, which pass any bound."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number}: write a finite number")
    return number


def assigned(assignments: list[str] | None, *, insecure: bool) -> tuple[str, ...]:
    """Return what `--set` and `--insecure` say, as assignments."""
    return (*(assignments or ()), *(["security.insecure=true"] if insecure else []))
