"""Find the registry that a command of `penstock policy` means, and map its errors to exit codes."""

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.config.credentials import registry_with_password
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.run_seal import check_places
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.registry.registry import Registry
from penstock.registry.registry_errors import Conflict, RegistryError, Unavailable
from penstock.registry.weight_files import registry_url
from penstock.runtime.exit import Fatal, NoAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryPolicy:
    """A policy in a registry. folder: of the run, None where only a URL was given."""

    url: str
    policy: str
    folder: Path | None


def find_place(run: str, registry: str | None, policy: str | None) -> RegistryPolicy:
    """Return the policy that the user means; raises ConfigurationError for a folder that holds no run.

    Args:
        run: folder of a run, or "" with `registry`.
        registry: URL of a registry; None: the run's own, of a folder that was made here.
        policy: name of the policy; None: the run's own.
    """
    if "://" in run:
        return RegistryPolicy(url=registry or run, policy=policy or Settings().serving.policy, folder=None)
    folder, config = Path(run), Path(run) / CONFIG_FILE
    if not folder.is_dir():
        raise ConfigurationError(
            f"{run}: no such folder; name a run's folder (`ls runs`) or a registry's URL"
        )
    settings = load([parse_toml(config)]) if os.path.lexists(config) else Settings()
    if registry is None:
        check_places(folder, settings, "name the registry with --registry")
    return RegistryPolicy(
        url=registry or registry_url(folder, registry_with_password(settings.registry)),
        policy=policy or settings.serving.policy,
        folder=folder,
    )


@contextmanager
def opened(place: RegistryPolicy, *, to_write: bool = False) -> Iterator[Registry]:
    """Open the registry inside the block, to read it or `to_write` to it.

    Its errors become ConfigurationError, or Fatal where trying again may help: NoAnswer where it is away.
    """
    _check_file(place)
    try:
        with Registry.open(place.url, migrate=True) if to_write else Registry.read(place.url) as registry:
            yield registry
    except Unavailable as error:
        raise NoAnswer(str(error)) from error
    except Conflict as error:
        raise Fatal(str(error)) from error
    except (RegistryError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def operator() -> str:
    """Return the name of the operator for the audit."""
    try:
        return f"operator/{getpass.getuser()}"
    except (KeyError, OSError):
        return "operator"


def _check_file(place: RegistryPolicy) -> None:
    file = place.url.removeprefix("sqlite:///")
    if file != place.url and not Path(file).exists():
        raise ConfigurationError(
            f"{file}: not there: no version is registered yet; a learner registers its best and its last"
        )
