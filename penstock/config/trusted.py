"""Modules that this process may import although somebody else names them.

A run specification comes over the network or out of a run's folder; what it names is imported only when
`actor.allow_modules` of this process, never of the specification, holds it. Nor is a file read or an address
called that it names: `actor.places` of this process says where things are.
"""

from collections.abc import Collection, Mapping
from typing import Any

from penstock.config.settings import ConfigurationError

_ELSEWHERE = True
"""What a specification says in place of a place: that there is one."""


def module_of(name: str) -> str:
    """Return the module of `module:Name`, "" where there is none."""
    return name.rpartition(":")[0]


def check_trusted(key: str, name: str, allowed: Collection[str]) -> None:
    """Raise ConfigurationError with the remedy when the module of `name` is not `allowed`.

    key: of the setting.
    """
    module = module_of(name)
    if module and module not in allowed:
        raise ConfigurationError(
            f"{key}={name!r}: the run asks this process to import {module!r}; "
            f"say --set 'actor.allow_modules=[\"{module}\"]' if you trust it"
        )


def without_places(
    arguments: Mapping[str, Any], keys: Collection[str], unsent: Collection[str]
) -> dict[str, Any]:
    """Return the arguments as other machines see them: under `keys` only that one is given, without `unsent`.

    Where this machine has something, and whom it asks, is nothing to the others.
    """
    return {
        key: _ELSEWHERE if key in keys and value else value
        for key, value in arguments.items()
        if key not in unsent
    }


def placed(
    section: str, arguments: Mapping[str, Any], keys: Collection[str], places: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of a specification, with those under `keys` from `places` of this process.

    section: their name. A key that the run does not use stays as it is. Raises ConfigurationError for one
    that `places` lacks.
    """
    missing = sorted(key for key in keys if arguments.get(key) and key not in places)
    if missing:
        key = missing[0]
        raise ConfigurationError(
            f"{section}.{key}: places are not taken from a run's specification; say where this machine has "
            f"it with --set 'actor.places.{key}=\"…\"'"
        )
    return {**arguments, **{key: places[key] for key in keys if arguments.get(key)}}
