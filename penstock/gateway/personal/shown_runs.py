"""What a page of runs is handed: runs to be looked at, and what may be done with them."""

import hmac
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Protocol

from penstock.gateway.jobs.job_records import Steering


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


# ---- Lets one browser in: the secret of the printed address is exchanged once for a cookie.

SECRET_BYTES: Final = 32
PARAMETER: Final = "secret"


class Admission:
    """Holds digests of the secret, which counts once, and of the cookie that it is exchanged for."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(SECRET_BYTES)
        """Of the address; shown to the person, and nowhere else."""
        self.cookie = f"penstock-{secrets.token_hex(4)}"
        """Name of the cookie: pages on other ports of the same host keep theirs."""
        self._secret: bytes | None = _digest(self.secret)
        self._session: bytes | None = None
        self._lock = threading.Lock()

    def exchange(self, secret: str) -> str | None:
        """Return the value of the cookie for the secret, the first time; None for anything else."""
        with self._lock:
            if self._secret is None or not hmac.compare_digest(_digest(secret), self._secret):
                return None
            self._secret = None
            session = secrets.token_urlsafe(SECRET_BYTES)
            self._session = _digest(session)
            return session

    def admits(self, session: str | None) -> bool:
        """Return whether a cookie is the one that was given."""
        held = self._session
        return held is not None and session is not None and hmac.compare_digest(_digest(session), held)


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogateescape")).digest()
