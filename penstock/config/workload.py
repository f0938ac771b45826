"""What kind of work a run does: a record of module paths, found by entry point.

Paths, "module:function", not imports: each role loads only its own side, and `penstock --help` nothing heavy.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError

# ---- Installed plug-ins: the records that entry points name, and what the paths in them point to.

_FORMER: Final = ("actor.", "broker.", "gateway.", "launch.", "learner.", "workloads.")
"""Names that modules of ours had outside of `penstock`."""
GROUP: Final = "penstock.workloads"
"""Group of the entry points that name the records of workloads."""


def installed() -> list[str]:
    """Return the names of the installed workloads, sorted; imports none of them."""
    return sorted({point.name for point in _points()})


def record_of(name: str) -> Any:
    for point in _points():
        if point.name == name:
            try:
                return point.load()
            except (ImportError, AttributeError) as error:
                raise ConfigurationError(
                    f"workload={name!r}: {point.value} cannot be loaded: {error}"
                ) from error
    raise ConfigurationError(
        f"workload={name!r}: not installed; installed: {', '.join(installed()) or 'none'}"
    )


def _points() -> tuple[EntryPoint, ...]:
    return _points_on(tuple(sys.path))


@functools.cache
def _points_on(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of workloads; a path with many packages takes a while to be searched."""
    return tuple(entry_points(group=GROUP))


@functools.cache
def default_workload() -> str:
    """Return the name of the one installed workload whose record says `default`."""
    claiming = [name for name in installed() if getattr(record_of(name), "default", False)]
    if len(claiming) != 1:
        raise ConfigurationError(
            f"workloads that claim to be the default: {', '.join(claiming) or 'none'}; set workload=NAME, "
            f"installed: {', '.join(installed()) or 'none'}"
        )
    return claiming[0]


def load(path: str) -> Callable[..., Any]:
    """Return the function or class at "module:name"; raises ConfigurationError that names the path."""
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{path!r} cannot be loaded: {moved(path, error) or error}") from error
    except Exception as error:  # whatever a module does when it is imported
        raise ConfigurationError(
            f"{path!r} cannot be loaded: importing it raised {type(error).__name__}: {error}; "
            f"python -c 'import {module}' shows where"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"{path!r} is not a function")
    return found  # type: ignore[no-any-return]


def module_of(environment_id: str) -> str:
    """Return the module that registers an environment of an installed workload, "" for any other id."""
    return next((path for _, name, path in entries("environments") if name == environment_id), "")


def moved(path: str, error: Exception) -> str:
    """Return where a module of ours is, if `error` says that its former name is not there; else ""."""
    is_former = path.startswith(_FORMER) and getattr(error, "name", None) == path.partition(".")[0]
    return f"it is penstock.{path}" if is_former else ""


def entries(field: str) -> Iterator[tuple[str, str, str]]:
    for workload in installed():
        for name, path in getattr(record_of(workload), field, {}).items():
            yield workload, name, path


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An installed workload.

    Every field but `name`, `default`, `places`, `unsent`, `environments`, `algorithms`, `commands` and
    `moved_commands` is a path for `load`. What the functions take and return is described in
    `penstock.workloads.plugin`; the defaults are those of a workload that acts by one forward pass per step.
    """

    name: str
    environment: str
    """(section: EnvironmentSection, count: int, seed: int) → gymnasium.vector.VectorEnv."""
    spaces: str
    """(section: EnvironmentSection) → (observation Space, action Space) of one environment."""
    policy: str = "penstock.policy.policy:build"
    """(observation Space, action Space, PolicySection, seed: int) → Policy: what is trained, and served."""
    defaults: str
    """(environment id: str, algorithm name: str) → dict, a layer for `settings.load`."""
    target: str
    """(section: EnvironmentSection) → mean return that counts as solved, or None."""
    model: str = "penstock.workloads.plugin.learning:make_step_model"
    """(Settings, this record, learner Group, torch device) → learner Model."""
    generator: str = "penstock.workloads.plugin.acting:make_step_generator"
    """(RunSpecification, Settings of this process, Health) → what generates fragments in a rollout worker."""
    runner: str = "penstock.workloads.plugin.acting:make_step_runner"
    """(RunSpecification, Settings of this process, episodes: int or None) → what plays an evaluation."""
    acting: str = ""
    """As `policy`, → what rollouts and evaluations act with, once it has weights; "": what `policy` makes."""
    default: bool = False
    """Whether a run is of this workload that names none; one installed workload says so."""
    places: tuple[str, ...] = ()
    """Keys of `environment.kwargs` and `policy.kwargs` that say where something lies or who is asked.

    An actor reads them in its own `actor.places`, never in a specification, which says only which of them
    there are.
    """
    unsent: tuple[str, ...] = ()
    """Keys of `environment.kwargs` and `policy.kwargs` that no actor needs: no specification holds them."""
    environments: Mapping[str, str] = field(default_factory=dict)
    """Modules that register Gymnasium environments, by id: a run names these without a module."""
    algorithms: Mapping[str, str] = field(default_factory=dict)
    """Paths of the settings sections of algorithms that the core does not have, by `algorithm.name`.

    Each section is an `AlgorithmSection`. Every process of a run reads them, so their modules load no torch.
    """
    commands: Mapping[str, str] = field(default_factory=dict)
    """Paths of what the workload adds to the command line, by the name behind `penstock`.

    A function as typer takes it, or a `typer.Typer` of several. Their modules import what a command needs
    when it runs.
    """
    moved_commands: Mapping[str, str] = field(default_factory=dict)
    """New names of commands by their former names."""
    prepare: str = ""
    """(Settings, run folder: Path, Progress) → Settings: makes what a run needs before its processes start.

    "": nothing. Called at every start, so it keeps what it finds made.
    """
    rehearse: str = ""
    """(Settings, folder: Path, Progress) → `Rehearsal`.

    As `prepare`, in a folder that is thrown away, with a few steps of each long training, for
    `penstock train --dry-run`; "": `prepare` itself is what is measured.
    """
    http: str = ""
    """() → `gateway.application.Service`: what the workload adds to a gateway that runs jobs; "": nothing."""
    site: str = ""
    """() → `gateway.application.Service`: what `penstock gateway NAME` answers with; "": nothing."""
    services: str = ""
    """(Settings, folder of sockets: Path) → `Services`: its processes beside the core's; "": none."""
    server: str = ""
    """(Settings, Source, RunSpecification, RunFollower or None) → `HostedService`.

    What `penstock serve` answers clients with; "": the actions of `policy`, by the core's own calls.
    """
    artefacts: str = ""
    """(Settings, run folder: Path, summary: dict) → None: leaves files beside the core's; "": nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Processes of a workload's own.

    commands: arguments of `penstock` by the service's name. places: what `actor.places` of the run's actors
    says of them, over the configuration: where they listen.
    """

    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


def find(name: str) -> Workload:
    workload = record_of(name)
    if not isinstance(workload, Workload):
        raise ConfigurationError(f"workload={name!r}: its entry point names no Workload record")
    return workload
