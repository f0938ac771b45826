"""What actor and broker tell each other beside fragments, as frozen dataclasses."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from penstock.v1 import experience_pb2, weights_pb2


class Role(IntEnum):
    """Names the kind of actor that opens a session."""

    ROLLOUT = 1
    SERVER = 2
    EVALUATION = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class Durability(IntEnum):
    """Says how much an acknowledgement survives."""

    MEMORY = 1
    FSYNC_1S = 2
    FSYNC = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class RunState(IntEnum):
    """Says whether the run goes on."""

    RUNNING = 1
    PAUSED = 2
    STOPPING = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Credit:
    """Absolute credit to generate; begin a sequence only up to `begin_through` and with `min_version`."""

    begin_through: int = 0
    min_version: int = 0
    round: int = 0

    def to_proto(self) -> experience_pb2.Leave:
        return experience_pb2.Leave(
            begin_through=self.begin_through, min_version=self.min_version, round=self.round
        )

    @classmethod
    def from_proto(cls, message: experience_pb2.Leave) -> "Credit":
        return cls(message.begin_through, message.min_version, message.round)


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication of weights; version 0 is "nothing published yet"."""

    version: int = 0
    update: int = 0
    sha256: str = ""
    size: int = 0

    def to_proto(self) -> weights_pb2.Publication:
        return weights_pb2.Publication(
            version=self.version, update=self.update, sha256=self.sha256, size=self.size
        )

    @classmethod
    def from_proto(cls, message: weights_pb2.Publication) -> "Publication":
        return cls(message.version, message.update, message.sha256, message.size)


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
        return experience_pb2.Episode(
            slot_id=self.slot_id,
            episode_id=self.episode_id,
            episode_return=self.episode_return,
            length=self.length,
            terminated=self.terminated,
            version=self.version,
        )

    @classmethod
    def from_proto(cls, message: experience_pb2.Episode) -> "Episode":
        return cls(
            slot_id=message.slot_id,
            episode_id=message.episode_id,
            episode_return=message.episode_return,
            length=message.length,
            terminated=message.terminated,
            version=message.version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Finished episodes of one session, as the broker keeps them for the learner."""

    session: int
    sequence: int
    evaluation: bool = False
    deterministic: bool = False
    episodes: tuple[Episode, ...] = ()

    def to_proto(self) -> experience_pb2.ReportEpisodesRequest:
        return experience_pb2.ReportEpisodesRequest(
            session=self.session,
            sequence=self.sequence,
            evaluation=self.evaluation,
            deterministic=self.deterministic,
            episodes=[episode.to_proto() for episode in self.episodes],
        )

    @classmethod
    def from_proto(cls, message: experience_pb2.ReportEpisodesRequest) -> "Report":
        return cls(
            session=message.session,
            sequence=message.sequence,
            evaluation=message.evaluation,
            deterministic=message.deterministic,
            episodes=tuple(Episode.from_proto(episode) for episode in message.episodes),
        )

    def encode(self) -> bytes:
        return self.to_proto().SerializeToString()

    @classmethod
    def decode(cls, data: bytes) -> "Report":
        return cls.from_proto(experience_pb2.ReportEpisodesRequest.FromString(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Upward half of WatchLatest: what the caller knows, serves and will wait for.

    gives_back: what it has credit for and has not begun it will not begin soon.
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
    """Downward half of WatchLatest. `weights` is empty when unknown bytes exceed one chunk."""

    latest: Publication
    credit: Credit
    state: RunState
    revision: int
    weights: bytes = b""
    traffic_revision: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    evaluate_version: int = 0
    flush: int = 0
