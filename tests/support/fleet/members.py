"""What a fleet is made of: the command line of each process, and what is known of the one that runs."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.launch.run.supervisor import Exit, ServiceProcess, ServiceSpec, penstock
from tests.support.fleet.phases import Phase, read_phases


@dataclass(slots=True)
class Member:
    """One process of the fleet; `process` is None between two lives."""

    spec: ServiceSpec
    phase_file: Path
    process: ServiceProcess | None = None
    exit: Exit | None = None
    lives: int = 0
    frozen: bool = False
    expected: bool = False
    """Whether this life may end."""
    started_s: float = 0.0

    @property
    def name(self) -> str:
        """Such as broker-0."""
        return self.spec.name

    def phases(self) -> list[Phase]:
        """One per thread, newest first; none before it reached a place."""
        return read_phases(self.phase_file) if self.phase_file.exists() else []

    def phase(self) -> Phase | None:
        """The newest of the threads that work, else the newest of all."""
        phases = self.phases()
        return next((phase for phase in phases if not phase.is_idle), phases[0] if phases else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What runs.

    settings: `--set` of every process. options: further arguments of the learner and the actors. poisoners:
    more actors, of whose fragments every second is spoiled (see `tests.support.abuse.poisoner`).
    """

    actors: int = 4
    brokers: int = 1
    durability: str = "fsync_1s"
    settings: tuple[str, ...] = ()
    learner_options: tuple[str, ...] = ()
    actor_options: tuple[str, ...] = ()
    poisoners: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fleet writes, and where its sockets are: their paths must be short."""

    folder: Path
    sockets: Path

    @property
    def redis_url(self) -> str:
        """Where Redis listens."""
        return f"unix://{self.sockets / 'redis.sock'}"

    @property
    def poisons(self) -> Path:
        """Where poisoners write down what they spoil."""
        return self.folder / "poisons"


def service_specs(place: Place, shape: Shape, through: Callable[[str], str]) -> list[ServiceSpec]:
    """The processes, in the order in which a fragment needs them."""
    sockets, folder = place.sockets, place.folder
    said = (f"broker.durability={shape.durability}", *shape.settings)
    sets = tuple(part for text in said for part in ("--set", text))
    brokers = [f"unix:{sockets}/broker-{index}.sock" for index in range(shape.brokers)]
    python = (sys.executable, "-m")
    redis = penstock("redis", "--socket", str(sockets / "redis.sock"), "--dir", str(folder / "redis"), *sets)
    learner = (*python, "tests.support.fleet.one_parameter_learner", "--redis", place.redis_url)
    journals = ("--set", f"actor.ack_journal={folder / 'journals'}")
    actor = (*python, "tests.support.fleet.crowd_actor", *journals)
    poisoner = (*python, "tests.support.abuse.poisoner", *journals, "--made-up", "--every", "2")
    return [
        ServiceSpec(name="redis", role="redis", command=redis),
        *(
            ServiceSpec(
                name=f"broker-{index}",
                role="broker",
                command=penstock("broker", "--redis", place.redis_url, "--listen", address, *sets),
            )
            for index, address in enumerate(brokers)
        ),
        ServiceSpec(
            name="learner",
            role="learner",
            command=(*learner, "--run-dir", str(folder), *sets, *shape.learner_options),
            on_restart=("--resume",),
        ),
        *(
            ServiceSpec(
                name=f"actor-{index}",
                role="actor",
                command=(
                    *actor,
                    *("--broker", through(brokers[index % len(brokers)]), "--actor-id", f"actor-{index}"),
                    *sets,
                    *shape.actor_options,
                ),
            )
            for index in range(shape.actors)
        ),
        *(
            ServiceSpec(
                name=name,
                role="actor",
                command=(
                    *poisoner,
                    *("--broker", brokers[index % len(brokers)], "--actor-id", name),
                    *("--poisons", str(place.poisons / f"{name}.jsonl"), *sets),
                ),
            )
            for index in range(shape.actors, shape.actors + shape.poisoners)
            for name in (f"actor-{index}",)
        ),
    ]
