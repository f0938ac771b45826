"""Modules that this process may import although somebody else names them.

A run specification comes over the network or out of a run's folder; what it names is imported only when
`actor.allow_modules` of this process, never of the specification, holds it.
"""

from collections.abc import Collection

from penstock.runtime.settings import ConfigurationError


def module_of(name: str) -> str:
    """The module of `module:Name`, "" where there is none."""
    return name.rpartition(":")[0]


def check_trusted(key: str, name: str, allowed: Collection[str]) -> None:
    """Raises ConfigurationError with the remedy when the module of `name` is not `allowed`. key: of the setting."""
    module = module_of(name)
    if module and module not in allowed:
        raise ConfigurationError(
            f"{key}={name!r}: the run asks this process to import {module!r}; "
            f"say --set 'actor.allow_modules=[\"{module}\"]' if you trust it"
        )
