"""Whether the program knows a command line and the variables beside it, without running it."""

from typing import Any

import typer

from penstock.config.settings import from_environment, load
from penstock.launch.cli.app import app


def parsed(words: list[str]) -> Any:
    """The context of a command line, as Click parses it.

    Args:
        words: The subcommands, then their options, without the program's name.

    Raises:
        click.UsageError: for an option that does not exist, or one that is missing.
    """
    command: Any = typer.main.get_command(app)
    arguments = list(words)
    while arguments and not arguments[0].startswith("-") and hasattr(command, "get_command"):
        name = arguments.pop(0)
        command = command.get_command(command.make_context(name, [], resilient_parsing=True), name)
        assert command is not None, f"{name} is no command"
    return command.make_context(command.name, arguments)


def check(words: list[str], environment: dict[str, str]) -> None:
    """Raise for an option that does not exist, one that is missing, or a setting that is none."""
    parsed(words)
    load([from_environment(environment)])
