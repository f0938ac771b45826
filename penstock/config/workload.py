"""Workloads: records of module paths, found by entry point.

Paths "module:function" instead of imports: each role loads only its part, and `penstock --help` no workload.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError

# ---- Installed plug-ins: the records of entry points, and the objects at their paths.

_FORMER: Final = ("actor.", "broker.", "gateway.", "launch.", "learner.", "workloads.")
"""Former names of Penstock's modules, outside of `penstock`."""
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
    """Return the entry points of workloads; a search of a path with many packages is slow."""
    return tuple(entry_points(group=GROUP))


@functools.cache
def default_workload() -> str:
    """Return the name of the installed workload whose record has `default` set."""
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
    except Exception as error:  # any error of an import
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
    """Return a hint for a path with a former name of a module, which caused `error`; else ""."""
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
    """Whether it is the workload of runs that name none; exactly one installed workload sets it."""
    places: tuple[str, ...] = ()
    """Keys of `environment.kwargs` and `policy.kwargs` whose values are files or addresses.

    An actor takes their values from its own `actor.places`; a specification has only their keys.
    """
    unsent: tuple[str, ...] = ()
    """Keys of `environment.kwargs` and `policy.kwargs` that no actor needs; specifications omit them."""
    environments: Mapping[str, str] = field(default_factory=dict)
    """Modules that register Gymnasium environments, by id, so that a run names only the id."""
    algorithms: Mapping[str, str] = field(default_factory=dict)
    """Paths of the settings sections of algorithms that the core does not have, by `algorithm.name`.

    Each section is an `AlgorithmSection`. Every process of a run reads them, so their modules load no torch.
    """
    commands: Mapping[str, str] = field(default_factory=dict)
    """Paths of the workload's commands, by their names behind `penstock`.

    Each is a function for typer, or a `typer.Typer` of several. Their modules import what a command needs
    only when it runs.
    """
    moved_commands: Mapping[str, str] = field(default_factory=dict)
    """New names of commands by their former names."""
    prepare: str = ""
    """(Settings, run folder: Path, Progress) → Settings: prepares a run before its processes start.

    "": nothing to prepare. Called at every start, so it keeps what exists already.
    """
    rehearse: str = ""
    """(Settings, folder: Path, Progress) → `Rehearsal`.

    As `prepare`, in a temporary folder and with a few steps of each long training, for
    `penstock train --dry-run`; "": `prepare` itself is measured.
    """
    http: str = ""
    """() → `gateway.application.Service` that a gateway with jobs serves, too; "": none."""
    site: str = ""
    """() → `gateway.application.Service` of `penstock gateway NAME`; "": none."""
    services: str = ""
    """(Settings, folder of sockets: Path) → `Services`: processes of the workload; "": none."""
    server: str = ""
    """(Settings, Source, RunSpecification, RunFollower or None) → `HostedService`.

    The service of `penstock serve`; "": the core's service of the actions of `policy`.
    """
    artefacts: str = ""
    """(Settings, run folder: Path, summary: dict) → None: writes files of the workload; "": none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Processes of a workload.

    commands: arguments of `penstock`, by the name of the service. places: their addresses, which the launcher
    puts into `actor.places` of the run's actors.
    """

    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


def place_keys(name: str, environment_id: str) -> tuple[str, ...]:
    """Return the keys of keyword arguments that hold places, for a run of a workload and an environment.

    Those of the workload, and those of each workload that registers the environment: the writer of a
    specification chooses both. Raises ConfigurationError as `find`.
    """
    known = environment_id.rpartition(":")[2]
    owners = (name, *(workload for workload, found, _ in entries("environments") if found == known))
    return tuple(dict.fromkeys(key for owner in owners for key in find(owner).places))


def find(name: str) -> Workload:
    workload = record_of(name)
    if not isinstance(workload, Workload):
        raise ConfigurationError(f"workload={name!r}: its entry point names no Workload record")
    return workload
