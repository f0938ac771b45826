"""Messages between actor and broker, except fragments, as frozen dataclasses."""

from dataclasses import dataclass, field
from typing import Any, Final

from penstock.protocol.refusal import Labelled
from penstock.v1 import experience_pb2, weights_pb2


def _same(kind: Any, source: Any) -> dict[str, Any]:
    """Return the values of `source` for the fields of `kind`, a class with slots, by name."""
    return {name: getattr(source, name) for name in kind.__slots__}


class Role(Labelled):
    """The kind of actor that opens a session."""

    ROLLOUT = 1
    SERVER = 2
    EVALUATION = 3


class Durability(Labelled):
    """The failures that an acknowledgement survives."""

    MEMORY = 1
    FSYNC_1S = 2
    FSYNC = 3


class RunState(Labelled):
    """The state of a run that an operator wants."""

    RUNNING = 1
    PAUSED = 2
    STOPPING = 3


@dataclass(frozen=True, slots=True)
class Credit:
    """Absolute credit to generate; begin a sequence only up to `begin_through` and with `min_version`."""

    begin_through: int = 0
    min_version: int = 0
    round: int = 0

    def to_proto(self) -> experience_pb2.Leave:
        return experience_pb2.Leave(**_same(Credit, self))

    @classmethod
    def from_proto(cls, message: experience_pb2.Leave) -> "Credit":
        return cls(**_same(cls, message))


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication of weights; version 0 is "nothing published yet"."""

    version: int = 0
    update: int = 0
    sha256: str = ""
    size: int = 0

    def to_proto(self) -> weights_pb2.Publication:
        return weights_pb2.Publication(**_same(Publication, self))

    @classmethod
    def from_proto(cls, message: weights_pb2.Publication) -> "Publication":
        return cls(**_same(cls, message))


BASE: Final = 0
"""In place of a version: the policy as it was made, which training begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished episode: undiscounted return, length in steps, weight version at its last step.

    In an evaluation slot_id is what it began with, such as a seed or a prompt, episode_id its number
    among those that began so, and version `BASE` that of the policy that training begins with.
    """

    slot_id: int
    episode_id: int
    episode_return: float
    length: int
    terminated: bool
    version: int

    def to_proto(self) -> experience_pb2.Episode:
        return experience_pb2.Episode(**_same(Episode, self))

    @classmethod
    def from_proto(cls, message: experience_pb2.Episode) -> "Episode":
        return cls(**_same(cls, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Finished episodes of one session, as the broker keeps them for the learner."""

    session: int
    sequence: int
    evaluation: bool = False
    deterministic: bool = False
    episodes: tuple[Episode, ...] = ()

    def to_proto(self) -> experience_pb2.ReportEpisodesRequest:
        episodes = [episode.to_proto() for episode in self.episodes]
        return experience_pb2.ReportEpisodesRequest(**_same(Report, self) | {"episodes": episodes})

    @classmethod
    def from_proto(cls, message: experience_pb2.ReportEpisodesRequest) -> "Report":
        episodes = tuple(map(Episode.from_proto, message.episodes))
        return cls(**_same(cls, message) | {"episodes": episodes})

    def encode(self) -> bytes:
        return self.to_proto().SerializeToString()

    @classmethod
    def decode(cls, data: bytes) -> "Report":
        return cls.from_proto(experience_pb2.ReportEpisodesRequest.FromString(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The request of WatchLatest: what the caller knows and serves, and how long it waits.

    gives_back: return the credit for fragments that are not begun.
    """

    session: int
    begun_through: int = 0
    known_version: int = 0
    known_begin_through: int = 0
    known_revision: int = 0
    applied_version: int = 0
    applied_sha256: str = ""
    probe_log_prob: tuple[float, ...] = ()
    wait_ms: int = 0
    gives_back: bool = False
    flushed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The reply of WatchLatest. `weights` is empty when the unknown bytes exceed one chunk."""

    latest: Publication
    credit: Credit
    state: RunState
    revision: int
    weights: bytes = b""
    traffic_revision: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    evaluate_version: int = 0
    flush: int = 0
