"""What a gateway is handed to steer the run of a job; `launch` has the one that asks the run's broker."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Action(StrEnum):
    """Names what may be wanted of a run that goes on."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    FLUSH = "flush"


class CannotSteer(Exception):
    """Reports that a run refuses what is wanted, or does not answer; the message says why."""


class NoAnswer(CannotSteer):
    """Reports that a run or its registry did not answer: what is wanted may have been done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Says what is wanted of a run.

    name: of a checkpoint, to make or to restore; "" for none. min_steps: that a flush waits for, at least.
    request_id: the same again is the same order, and answers how far it has come.
    """

    action: Action
    name: str = ""
    min_steps: int = 1
    request_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficChange:
    """A change of which clients get which version; None: unchanged. shadow 0: none."""

    canary_share: float | None = None
    latest_share: float | None = None
    shadow: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFile:
    """Holds a version of a policy as a file. name: for who keeps it. content: safetensors."""

    name: str
    content: bytes


class Steering(Protocol):
    """Steers the runs of jobs, by the job's id.

    Every method may raise CannotSteer, and NoAnswer where nobody knows what was done. version: by its number
    or its name. by: for the registry's own audit.
    """

    def order(self, job: str, order: Order) -> Mapping[str, Any]:
        """Tell a run that goes on what is wanted, and return how far that has come."""

    def versions(self, job: str) -> Mapping[str, Any]:
        """Return the registered versions of a run, and its traffic."""

    def weights(self, job: str, version: int | str) -> VersionFile:
        """Return a registered version as a file."""

    def promote(
        self, job: str, version: int | str, *, to: str, canary_share: float | None, reason: str, by: str
    ) -> Mapping[str, Any]:
        """Make a version `active` or `canary`, and return it."""

    def roll_back(self, job: str, version: int | str | None, *, reason: str, by: str) -> Mapping[str, Any]:
        """Withdraw a version, the canary or the active one, and return what is active then."""

    def set_traffic(self, job: str, change: TrafficChange, *, reason: str, by: str) -> Mapping[str, Any]:
        """Change the traffic, and return it."""
