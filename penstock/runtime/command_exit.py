"""How a command ends: its exit code, and its cause as the last line on stderr."""

import sys
from collections.abc import Callable

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_FAILED, EXIT_USAGE, Fatal


def finish(body: Callable[[], int]) -> None:
    """Run a command and leave with its exit code; 2 for a ConfigurationError, 1 for Fatal.

    body: the command; returns its exit code. Raises typer.Exit, by which Typer ends the process.
    """
    try:
        code = body()
    except ConfigurationError as error:
        code = _fail(error, EXIT_USAGE)
    except Fatal as error:
        code = _fail(error, EXIT_FAILED)
    raise typer.Exit(code)


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"{error}\n")
    return code
