"""Whether the program knows a command line and the variables beside it, without running it."""

from typing import Any

import typer

from penstock.config.settings import from_environment, load
from penstock.launch.cli.app import app


def check(words: list[str], environment: dict[str, str]) -> None:
    """Raise for an option that does not exist, one that is missing, or a setting that is none."""
    name, *arguments = words
    group: Any = typer.main.get_command(app)
    group.commands[name].make_context(name, list(arguments))
    load([from_environment(environment)])
