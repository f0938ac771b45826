"""Commands of Typer: their options, services in the foreground, and exit codes."""

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_FAILED, EXIT_USAGE, Fatal

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle


# ---- Options that several commands share.

Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the configuration; may be repeated."),
]
RepeatedAssignments = Annotated[tuple[str, ...], *Assignments.__metadata__]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file (TOML).")]
EndpointFile = Annotated[
    Path | None, typer.Option("--endpoints", help="Write pid, ports and address to this file when serving.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")]
Listen = Annotated[str, typer.Option("--listen", metavar="ADDRESS", help="HOST:PORT or unix:/path.")]
ListenHttp = Annotated[str, typer.Option("--listen", metavar="ADDRESS", help="HOST:PORT.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import what a folder names although it was not made here.")
]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """The configuration of a command that calls a service."""

    config: ConfigFile = None
    assignments: Assignments = None
    insecure: Insecure = False

    @property
    def assigned(self) -> tuple[str, ...]:
        """All assignments `SECTION.KEY=VALUE` over the configuration file."""
        return (*(self.assignments or ()), *(["security.insecure=true"] if self.insecure else []))


def finite(number: float | None) -> float | None:
    """Return the number of an option; raises typer.BadParameter for infinity and NaN."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number}: write a finite number")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreground:
    """Options of a service that runs in the foreground. insecure: allow plaintext beyond loopback."""

    config: ConfigFile = None
    assignments: Assignments = None
    endpoints: EndpointFile = None
    insecure: bool = False

    def run(
        self,
        role: str,
        body: "Callable[[Lifecycle, Settings], int]",
        *,
        run_dir: Path | None = None,
        trust: bool = False,
    ) -> None:
        """Run the body of a service with its settings until it ends, and leave with its exit code.

        run_dir: folder of a run whose settings lie below those of the service. trust: import what that folder
        names although it was not made here.
        """
        # gRPC reads it at its import; by default it logs each call that it refuses itself.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        # Before the imports of a service, until it is ready (`Health.set_ready`).
        from penstock.runtime.health import collect_seldom

        collect_seldom()
        from penstock.config.run_folder import keep_private
        from penstock.config.service_settings import learner_settings, service_settings
        from penstock.runtime import logs
        from penstock.runtime.health import ENDPOINT_VARIABLE
        from penstock.runtime.lifecycle import leave, run_service
        from penstock.runtime.metrics import watch_certificate

        keep_private()
        if self.endpoints is not None:
            os.environ[ENDPOINT_VARIABLE] = str(self.endpoints.absolute())
        assigned = Configured(assignments=self.assignments, insecure=self.insecure).assigned

        def serve(lifecycle: "Lifecycle") -> int:
            self._check_endpoints()  # before anything waits or serves
            if role == "learner":
                settings = learner_settings(self.config, assigned)
            else:
                settings = service_settings(self.config, assigned, run_dir, trust=trust)
            if settings.logs.format == "json":
                # Lines of text do not name the run: their file does.
                logs.configure(role, settings.run, style="json")
            watch_certificate(settings.security.tls_certificate)
            return body(lifecycle, settings)

        leave(run_service(serve, role))

    def _check_endpoints(self) -> None:
        file = self.endpoints
        if file is not None and not file.parent.is_dir():
            raise ConfigurationError(
                f"--endpoints {file}: {file.parent} is no folder; make it, or name another"
            )
        if file is not None and file.is_dir():
            raise ConfigurationError(f"--endpoints {file}: is a folder; name a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuredForeground(Foreground):
    """Options of a service that speaks gRPC or HTTP: also --insecure."""

    insecure: Insecure = False


# ---- Commands as functions that return their exit code. A frozen dataclass whose fields declare options is a
# parameter for all of them.

Command = Callable[..., Any]


def command(group: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Command], Command]:
    """Add a function that returns its exit code to a group, as a command.

    A parameter that is a dataclass becomes the options of its fields (`unfolded`). settings: for Typer.
    """

    def decorate(function: Callable[..., int]) -> Command:
        whole = unfolded(function)

        @functools.wraps(whole)
        def called(**given: Any) -> None:
            finish(lambda: whole(**given))

        group.command(name, **settings)(called)
        return function

    return decorate


def unfolded(function: Command) -> Command:
    """Replace each dataclass parameter of a function by the options that its fields declare.

    A field has an option or an argument of Typer, or is such a dataclass. An option with the default () may
    be repeated. Arguments come before options, those of fields before those of the function.
    """
    own = inspect.signature(function, eval_str=True).parameters
    kinds = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    parameters = [
        part.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in own.items()
        for part in (_parts(kinds[name]) if name in kinds else [one])
    ]
    is_argument = {
        one.name: any(isinstance(note, ArgumentInfo) for note in _notes(one.annotation)) for one in parameters
    }
    parameters.sort(key=lambda one: 1 + (one.name in own) if is_argument[one.name] else 3)

    @functools.wraps(function)
    def called(**given: Any) -> Any:
        taken = {name: _taken(kind, given) for name, kind in kinds.items()}
        return function(**taken, **given)

    vars(called)["__signature__"] = inspect.Signature(parameters)
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _declared(kind: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Yield the fields that declare options or are such a dataclass, with their annotations."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if is_dataclass(hints[field.name]) or _notes(hints[field.name]):
            yield field, hints[field.name]


def _parts(kind: Any) -> Iterator[inspect.Parameter]:
    for field, hint in _declared(kind):
        if is_dataclass(hint):
            yield from _parts(hint)
            continue
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        (note,), value = _notes(hint), hint.__origin__
        if default == ():
            default, value = None, list[get_args(value)[0]] | None  # type: ignore[misc]
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, note]
        )


def _taken(kind: Any, given: dict[str, Any]) -> Any:
    """Return an instance of `kind`, whose values are taken out of `given`."""
    values = {}
    for field, hint in _declared(kind):
        value = _taken(hint, given) if is_dataclass(hint) else given.pop(field.name)
        values[field.name] = tuple(value or ()) if field.default == () else value
    return kind(**values)


def _notes(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


# ---- The end of a command: its exit code, and the cause of a failure as the last line on stderr.


def finish(body: Callable[[], int]) -> None:
    """Run a command and leave with its exit code; 2 for a ConfigurationError, 1 for Fatal."""
    try:
        code = body()
    except (ConfigurationError, Fatal) as error:
        sys.stderr.write(f"{error}\n")
        code = EXIT_FAILED if isinstance(error, Fatal) else EXIT_USAGE
    raise typer.Exit(code)
