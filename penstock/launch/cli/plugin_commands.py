"""The group of all commands: those of the core, and those that installed workloads add (`Workload.commands`).

It is the boundary as well: what any command raises for a file that cannot be read or written, and for a word
that is no text, ends here.
"""

import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from penstock.config.configuration_error import ConfigurationError
from penstock.config.plugins import installed, load, record_of
from penstock.launch.cli.file_mistakes import encoding_mistake, file_mistake, word_mistake
from penstock.launch.cli.secret_words import check_words
from penstock.runtime.exit import EXIT_USAGE

_WORDS: Final = "penstock.words"
"""Where a context keeps the command line."""


class WithPluginCommands(TyperGroup):
    """The commands of the core, and behind them those of workloads.

    The core's are looked up first, without any record.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and keep the words for `invoke`; a secret among them is refused."""
        ctx.meta[_WORDS] = tuple(args)
        try:
            check_words(args)
        except ConfigurationError as error:
            sys.stderr.write(f"{error}\n")
            raise typer.Exit(EXIT_USAGE) from error
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a file or a word that it cannot use is bad usage."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            told = file_mistake(error, ctx.meta[_WORDS])
            if told is None:
                raise
        except UnicodeDecodeError as error:
            told = encoding_mistake(error)
        except UnicodeEncodeError:
            told = word_mistake(ctx.meta[_WORDS])
            if told is None:
                raise
        sys.stderr.write(f"{told}\n")
        raise typer.Exit(EXIT_USAGE)

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
    """Return what typer makes of a function or of a `typer.Typer`."""
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
