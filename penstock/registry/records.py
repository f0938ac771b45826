"""Records that the registry returns: frozen, checked where they are made, without SQLAlchemy.

A version is *pinned* until it is retired: its weights are kept, and clients may be served with them. The
version that was active before the present one stays pinned as `standby`, so that a rollback finds its
weights.

    register ─► candidate ─► canary ─► active ─► retired (standby until the next promotion)
                    └──────────────────▲ │  ▲───────┘ rollback
                  canary, active ─► rolled_back
                  candidate, canary, rolled_back, standby ─► retired, not pinned
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from penstock.protocol.limits import MAX_NUMBER, check_id, check_policy

MAX_PINNED: Final = 16
"""Most versions of one policy that are not retired; the standby counts."""
MAX_PINS: Final = 256
"""Most client keys of one policy that are pinned to a version."""
MAX_CLIENT_KEY_LENGTH: Final = 256
MAX_TEXT_LENGTH: Final = 1024
MAX_EVENTS: Final = 10_000
"""Most events in one answer."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Status(StrEnum):
    """The status of a version, as drawn above."""

    CANDIDATE = "candidate"
    CANARY = "canary"
    ACTIVE = "active"
    RETIRED = "retired"
    ROLLED_BACK = "rolled_back"


class Origin(StrEnum):
    """The reason for which a version was registered."""

    BEST = "best"
    PERIODIC = "periodic"
    FINAL = "final"
    ROLLBACK = "rollback"
    IMPORT = "import"


class Action(StrEnum):
    """The kind of an event."""

    REGISTERED = "registered"
    EVALUATED = "evaluated"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    RETIRED = "retired"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The undiscounted return over `episodes` evaluation episodes."""

    mean: float
    std: float
    episodes: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std >= 0):
            raise ValueError(f"evaluation={self}: mean and std must be finite, std not negative")
        if self.episodes < 1:
            raise ValueError(f"evaluation.episodes={self.episodes}: must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A published weight version to register. Raises ValueError for a field that is wrong in itself."""

    policy: str
    version: int
    """The weight version: allocated once, never reused."""
    run: str
    update: int
    """Updates in this model's own lineage."""
    sha256: str
    """Of the weight bytes, lower-case hexadecimal."""
    size_bytes: int
    configuration: str = ""
    """SHA-256 of the run's configuration; "": unknown."""
    origin: Origin
    parent: int | None = None
    """The version that it was trained from or copies; it need not be registered."""
    evaluation: Evaluation | None = None
    reason: str = ""
    place: str = ""
    """Folder of the run with its weights, where runs share a registry; "": the reader's own run."""

    def __post_init__(self) -> None:
        check_policy("policy", self.policy)
        check_id("run", self.run)
        check_number("version", self.version, least=1)
        check_number("update", self.update)
        check_number("size_bytes", self.size_bytes)
        check_hash("sha256", self.sha256)
        if self.configuration:
            check_hash("configuration", self.configuration)
        if self.parent is not None:
            check_number("parent", self.parent, least=1)
            if self.parent >= self.version:
                raise ValueError(
                    f"parent={self.parent}: must be below version={self.version}, numbers only rise"
                )
        if len(self.reason) > MAX_TEXT_LENGTH:
            raise ValueError(
                f"reason of {len(self.reason)} characters: at most {MAX_TEXT_LENGTH}, shorten it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion(NewVersion):
    """A registered version. Times are UTC."""

    status: Status
    standby: bool
    """True for the retired version that stays pinned: a rollback makes it active again."""
    created: datetime
    changed: datetime

    @property
    def pinned(self) -> bool:
        return self.standby or self.status is not Status.RETIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Assignment of a policy's clients to arms, as `routing` reads it. Revision 0 was never changed."""

    policy: str
    revision: int = 0
    """Rises with each promotion, rollback and change of traffic, not with a registration."""
    experiment: str = "default"
    """Name of the experiment; clients are assigned independently under each name."""
    canary_share: float = 0.0
    latest_share: float = 0.0
    """Share of clients that follow the learner; all others, less those of the canary, follow `active`."""
    shadow: int | None = None
    """A version that also computes each answer, which is only recorded."""
    pins: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Client keys that always get one version."""
    changed: datetime | None = None

    def __post_init__(self) -> None:
        check_policy("policy", self.policy)
        check_id("experiment", self.experiment)
        for name in ("canary_share", "latest_share"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value}: must be between 0 and 1")
        if self.canary_share + self.latest_share > 1.0:
            raise ValueError(
                f"canary_share={self.canary_share} and latest_share={self.latest_share} are more than 1 "
                "together: lower one of them"
            )
        if len(self.pins) > MAX_PINS:
            raise ValueError(f"pins of {len(self.pins)} clients: at most {MAX_PINS}; use a share for more")
        for key in self.pins:
            check_client_key(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An entry of the audit: who did what to which version, and why. Never changed, never deleted."""

    number: int
    policy: str
    version: int | None
    action: Action
    by: str
    reason: str
    detail: Mapping[str, Any]
    time: datetime


def check_number(name: str, value: int, least: int = 0) -> int:
    if not least <= value <= MAX_NUMBER:
        raise ValueError(f"{name}={value}: must be between {least} and {MAX_NUMBER}")
    return value


def check_hash(name: str, value: str) -> str:
    if not _SHA256.fullmatch(value):
        raise ValueError(f"{name}={value[:80]!r}: must be 64 lower-case hexadecimal digits")
    return value


def check_text(name: str, value: str) -> str:
    if not value.strip() or len(value) > MAX_TEXT_LENGTH:
        raise ValueError(
            f"{name}={value[:80]!r}: say in 1 to {MAX_TEXT_LENGTH} characters what the audit shall show"
        )
    return value


def check_client_key(value: str) -> str:
    if not 1 <= len(value) <= MAX_CLIENT_KEY_LENGTH:
        raise ValueError(f"client key {value[:80]!r}: must have 1 to {MAX_CLIENT_KEY_LENGTH} characters")
    return value


# ---- Errors of the registry.


class RegistryError(Exception):
    """Base of all errors of the registry."""


class UnknownVersion(RegistryError, LookupError):
    """The registry does not have this version."""


class NotAllowed(RegistryError, ValueError):
    """The status of the version, or its traffic, does not allow the change."""


class DifferentBytes(RegistryError, ValueError):
    """The number belongs to other weights: numbers are never reused."""


class TooManyPinned(RegistryError, ValueError):
    """The policy has the largest number of pinned versions."""


class NoRoom(RegistryError, ValueError):
    """A project would exceed a bound. bound: `ratings` or `text_bytes`; most: its value."""

    def __init__(self, bound: str, most: int) -> None:
        super().__init__(f"the project may have {most} {bound} of ratings: delete some, or raise the bound")
        self.bound = bound


class Conflict(RegistryError, ValueError):
    """Another caller changed the same policy at the same time."""


class SchemaMismatch(RegistryError, ValueError):
    """The tables are absent, or of another revision than this program's."""


class Unavailable(RegistryError, OSError):
    """The database does not answer."""


class Busy(Unavailable):
    """Other writers have held the database all the time: nothing was done."""


# ---- The file of a registry that is only read: SQLite then creates no files next to it.


def is_writable(file: Path) -> bool:
    return os.access(file.parent, os.W_OK) and os.access(file, os.W_OK)


def reading_uri(file: Path) -> str:
    is_open = all(file.with_name(f"{file.name}{suffix}").exists() for suffix in ("-wal", "-shm"))
    return f"file:{quote(str(file.absolute()))}?mode=ro{'' if is_open else '&immutable=1'}"
