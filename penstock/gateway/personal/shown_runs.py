"""What a page of runs is handed: runs to be looked at, and what may be done with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.gateway.jobs.steering import Steering


class UnknownRun(KeyError):
    """Reports that there is no run of this name."""


class CannotStart(Exception):
    """Reports a training that was not started; the message says why. field: of the request that is wrong."""

    def __init__(self, why: str, field: str | None = None) -> None:
        super().__init__(why)
        self.field = field


class Runs(Protocol):
    """Runs by name, as JSON values.

    Every method may raise ConfigurationError, OSError and RecursionError for files that cannot be read, and
    those that are given a name UnknownRun.
    """

    def listed(self) -> Mapping[str, Any]:
        """Return the name of the folder, and a row for every run, newest first."""

    def detail(self, name: str) -> Mapping[str, Any]:
        """Return one run: its progress, its current activity, its end."""

    def curve(self, name: str) -> Mapping[str, list[Any]]:
        """Return its curve as columns of equal length, thinned, oldest first."""

    def versions(self, name: str) -> Mapping[str, Any]:
        """Return the registered versions of its policy, newest first, and its traffic."""


class Starter(Protocol):
    """Starts trainings from settings."""

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of all settings."""

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        """Start a training as the run `name`, and return once it is among the runs; raises CannotStart.

        settings: nested as in TOML, over the defaults.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """Says what the person may do. steering: by the names of runs. by: for the registry's audit."""

    starter: Starter
    steering: Steering
    by: str
