"""A service in the foreground: its settings and logs around what it does."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_FAILED, EXIT_USAGE, Fatal

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle


# ---- Options that several commands share, and what they mean for the settings.

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
    return (*(assignments or ()), *(["security.insecure=true"] if insecure else []))


def in_foreground(
    role: str,
    body: "Callable[[Lifecycle, Settings], int]",
    config: Path | None,
    assignments: list[str] | None,
    endpoints: Path | None,
    *,
    insecure: bool = False,
    run_dir: Path | None = None,
    trust: bool = False,
) -> None:
    """Run the body of a service with its settings until it ends, and leave with its exit code."""
    # gRPC reads it as it is loaded; it would write a line for each call that it refuses itself, for ever.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Before what a service is made of is imported; until it is ready (`Health.set_ready`).
    from penstock.runtime.health import collect_seldom

    collect_seldom()
    from penstock.config.run_folder import keep_private
    from penstock.config.service_settings import learner_settings, service_settings
    from penstock.runtime import logs
    from penstock.runtime.health import ENDPOINT_VARIABLE
    from penstock.runtime.lifecycle import leave, run_service
    from penstock.runtime.metrics import watch_certificate

    keep_private()
    if endpoints is not None:
        os.environ[ENDPOINT_VARIABLE] = str(endpoints.absolute())
    said = assigned(assignments, insecure=insecure)

    def serve(lifecycle: "Lifecycle") -> int:
        _check_endpoints(endpoints)
        if role == "learner":
            settings = learner_settings(config, said)
        else:
            settings = service_settings(config, said, run_dir, trust=trust)
        if settings.logs.format == "json":
            # Lines of text name no run: the file that they are in does.
            logs.configure(role, settings.run, style="json")
        watch_certificate(settings.security.tls_certificate)
        return body(lifecycle, settings)

    leave(run_service(serve, role))


def _check_endpoints(file: Path | None) -> None:
    """Raise ConfigurationError for a place that cannot hold the file, before anything waits or serves."""
    from penstock.config.configuration_error import ConfigurationError

    if file is None:
        return
    if not file.parent.is_dir():
        raise ConfigurationError(f"--endpoints {file}: {file.parent} is no folder; make it, or name another")
    if file.is_dir():
        raise ConfigurationError(f"--endpoints {file}: is a folder; name a file")


# ---- How a command ends: its exit code, and its cause as the last line on stderr.


def finish(body: Callable[[], int]) -> None:
    """Run a command and leave with its exit code; 2 for a ConfigurationError, 1 for Fatal."""
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
