"""Commands that installed workloads add to `penstock`, as their records name them (`Workload.commands`)."""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.config.configuration_error import ConfigurationError
from penstock.config.plugins import installed, load, record_of
from penstock.runtime.exit import EXIT_USAGE


class WithPluginCommands(TyperGroup):
    """The commands of the core, and behind them those of workloads.

    The core's are looked up first, without any record.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, as help lists them."""
        own = super().list_commands(ctx)
        return [*own, *sorted(plugin_paths().keys() - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, None where there is none.

        Imports the module of a workload's command.
        """
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        path = plugin_paths().get(cmd_name)
        return None if path is None else _command(ctx, cmd_name, path)


def plugin_paths() -> dict[str, str]:
    """Return the paths of the commands of all installed workloads, by name.

    A record that cannot be imported, and a name that another workload has taken, are named on stderr and left
    out.
    """
    paths: dict[str, str] = {}
    for workload in installed():
        try:
            commands = record_of(workload).commands
        except ConfigurationError as error:
            sys.stderr.write(f"{error}\n")
            continue
        for name, path in commands.items():
            if paths.setdefault(name, path) != path:
                sys.stderr.write(
                    f"workload={workload!r}: another workload has a command {name!r}; left out\n"
                )
    return paths


def _command(ctx: Any, name: str, path: str) -> Any:
    """What typer makes of a function or of a `typer.Typer`."""
    outer = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    try:
        found = load(path)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(EXIT_USAGE) from error
    if isinstance(found, typer.Typer):
        outer.add_typer(found, name=name)
    else:
        outer.command(name)(found)
    return typer.main.get_group(outer).get_command(ctx, name)
