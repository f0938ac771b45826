"""Where a run is: everything beside the algorithm's own state that a checkpoint holds, as JSON."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from penstock.broker.log.replies import LogState, Totals
from penstock.config.settings import ConfigurationError, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """position: last log entry consumed. round: next one of lock-step. episodes: `Episodes.state()`.

    numbers: of the `AlgorithmState`. evaluation: `Evaluation.state()`. recorded: batches
    consumed of the recording that the run learns from. staleness: fragments by age in updates. sections: what
    must not change between stop and resume, as canonical JSON. training_seconds: since the first experience.
    publications: of weights, by all learners of the run.
    restored_from: oldest version whose experience is learned from. commands: `CommandRecord.state()`.
    quarantine: `Quarantine.state()`.
    """

    run: str
    sections: dict[str, str]
    position: int = 0
    round: int = 0
    updates: int = 0
    training_seconds: float = 0.0
    publications: int = 0
    totals: Totals = field(default_factory=Totals)
    episodes: dict[str, Any] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    recorded: int = 0
    restored_from: int = 0
    commands: dict[str, Any] = field(default_factory=dict)
    quarantine: dict[str, Any] = field(default_factory=dict)
    log: LogState | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "log": None if self.log is None else self.log.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Progress":
        """Inverse of `to_json`; raises TypeError or KeyError for another shape."""
        log = value["log"]
        return cls(
            **{
                **value,
                "totals": Totals(**value["totals"]),
                "log": None if log is None else LogState.from_json(log),
            }
        )


_NETWORK: Final = ("workload", "environment", "policy")


def sections(settings: Settings) -> dict[str, str]:
    """Return the settings that decide the meaning of weights and fragments, as canonical JSON by section."""
    return {
        "workload": settings.workload,
        "environment": settings.environment.canonical_json(),
        # How weights began means nothing for weights that are there.
        "policy": settings.policy.canonical_json(exclude={"initialisation"}),
        "actor.unroll_length": str(settings.actor.unroll_length),
        "algorithm.name": settings.algorithm.name,
    }


def configuration_hash(settings: Settings) -> str:
    """sha256 of the run's configuration, but for who may talk to whom and where."""
    content = settings.model_dump(
        mode="json", exclude={"security": True, "metrics": True, "broker": {"redis"}}
    )
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_network(run: str, before: dict[str, str], now: dict[str, str]) -> None:
    """Raise ConfigurationError that names the first section of network or spaces in which two runs differ."""
    check_same(run, before, {name: text for name, text in now.items() if name in _NETWORK})


def check_same(run: str, before: dict[str, str], now: dict[str, str]) -> None:
    """Raise ConfigurationError that names the first section that changed since the checkpoint."""
    for name, text in now.items():
        if before.get(name) != text:
            raise ConfigurationError(
                f"{name}={text}: run {run!r} was begun with {before.get(name)}; resume it with the same, "
                "or start a new run"
            )
