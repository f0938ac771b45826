"""Answers about runs and their versions, as the document describes them."""

from typing import Literal

from penstock.gateway.frame.answer import Answer


class WantedState(Answer):
    """What is wanted of a run from now on. revision: rises with each order."""

    desired: str
    revision: int


class CommandShown(Answer):
    """How far a checkpoint, restore or flush has come. Its numbers are text, as 64 bits need it."""

    number: str
    request_id: str
    action: str
    state: str
    refusal: str
    detail: str
    checkpoint_id: str
    version: str
    steps: str


class EvaluationShown(Answer):
    """The return over so many evaluation episodes."""

    mean: float
    std: float
    episodes: int


class VersionShown(Answer):
    """A registered version. pinned: its weights are held. standby: a rollback makes it active again."""

    policy: str
    version: int
    run: str
    update: int
    sha256: str
    size_bytes: int
    configuration: str
    origin: str
    parent: int | None
    evaluation: EvaluationShown | None
    reason: str
    place: str
    status: Literal["candidate", "canary", "active", "retired", "rolled_back"]
    standby: bool
    created: str
    changed: str
    pinned: bool


class ListedVersion(VersionShown):
    """A registered version with its name, null where it has none."""

    label: str | None


class TrafficShown(Answer):
    """Which share of the clients gets which version. pins: clients that always get one."""

    policy: str
    revision: int
    experiment: str
    canary_share: float
    latest_share: float
    shadow: int | None
    pins: dict[str, int]
    changed: str | None


class RunVersions(Answer):
    """The versions that a run has registered, and the traffic; null before the first."""

    versions: list[ListedVersion]
    traffic: TrafficShown | None


class RolledBack(Answer):
    """What was withdrawn, and what is active now. awaits_number: its content has no number of its own yet."""

    withdrawn: VersionShown
    active: VersionShown | None
    awaits_number: bool
