"""Installed plug-ins: the records that entry points name, and what the paths in them point to."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError

GROUP: Final = "penstock.workloads"
"""Group of the entry points that name the records of workloads."""


def installed() -> list[str]:
    """Return the names of the installed workloads, sorted; imports none of them."""
    return sorted({point.name for point in _points()})


def record_of(name: str) -> Any:
    """Return what the entry point of an installed workload names.

    Raises ConfigurationError for a name that is not installed, which lists the installed, and for an entry
    point that cannot be imported.
    """
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
    """Return the name of the one installed workload whose record says `default`.

    Raises ConfigurationError where none or several say so, and for a record that cannot be imported.
    """
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
        raise ConfigurationError(f"{path!r} cannot be loaded: {error}") from error
    except Exception as error:  # whatever a module does when it is imported
        raise ConfigurationError(
            f"{path!r} cannot be loaded: importing it raised {type(error).__name__}: {error}; "
            f"python -c 'import {module}' shows where"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"{path!r} is not a function")
    return found  # type: ignore[no-any-return]


def entries(field: str) -> Iterator[tuple[str, str, str]]:
    """Yield workload, name and path of every entry of the installed records in one field.

    field: such as `algorithms`.
    Raises ConfigurationError for a record that cannot be imported.
    """
    for workload in installed():
        for name, path in getattr(record_of(workload), field, {}).items():
            yield workload, name, path
