"""The processes of one run, each of which a test may kill, freeze and start again, and the audit."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from penstock.launch.run.supervisor import Exit, ServiceProcess, ServiceSpec, last_line, penstock
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE, PHASE_VARIABLE, RECORD
from tests.support.abuse.poisoner import read_poisons
from tests.support.oracles.poison_books import PoisonBooks
from tests.support.run.harness import command


@dataclass(frozen=True, slots=True)
class Phase:
    """The last place that a thread reached. sequence: of what it worked on; at_ns: monotonic clock."""

    name: str
    sequence: int
    at_ns: int

    @property
    def is_idle(self) -> bool:
        return self.name.endswith(".waiting")


def read_phases(path: Path) -> list[Phase]:
    data = path.read_bytes()
    whole = len(data) // RECORD.size  # a process that is just starting has not given the file its size
    records = (RECORD.unpack_from(data, index * RECORD.size) for index in range(whole))
    found = [Phase(name.rstrip(b"\0").decode(), sequence, at) for name, sequence, at in records if at]
    return sorted(found, key=lambda phase: -phase.at_ns)


MOST_IDLE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """how: "fail point" (it killed itself at the phase), "moment" (random) or what else was done to it.

    phase, sequence: the last place that a working thread had reached, and what it worked on. hung: actors of
    the process that ended no fragment any more.
    """

    at_s: float
    name: str
    how: str
    phase: str
    sequence: int
    idle: bool
    hung: int = 0

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


class KillLog:
    """The kills of one campaign, in order."""

    def __init__(self) -> None:
        self.kills: list[Kill] = []
        self.freezes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.kills)

    def add(self, kill: Kill) -> None:
        self.kills.append(kill)

    def idle_share(self, how: str | None = None) -> float:
        chosen = [kill for kill in self.kills if how in (None, kill.how)]
        return sum(kill.idle for kill in chosen) / len(chosen) if chosen else 0.0

    def check_busy(self) -> None:
        """AssertionError when more than half of the kills hit an idle process."""
        share = self.idle_share()
        assert share <= MOST_IDLE, f"{share:.0%} of the kills hit an idle process:\n{self.table()}"

    def by_phase(self) -> dict[str, dict[str, int]]:
        """Role, phase, number of kills; the most frequent first."""
        counted: dict[str, Counter[str]] = defaultdict(Counter)
        for kill in self.kills:
            counted[kill.role][kill.phase] += 1
        return {role: dict(counted[role].most_common()) for role in sorted(counted)}

    def summary(self) -> dict[str, Any]:
        return {
            "kills": len(self.kills),
            "by_role": dict(Counter(kill.role for kill in self.kills).most_common()),
            "by_kind": dict(Counter(kill.how for kill in self.kills).most_common()),
            "by_phase": self.by_phase(),
            "share_idle": round(self.idle_share(), 3),
            "share_idle_at_random_moments": round(self.idle_share("moment"), 3),
        }

    def lines(self) -> list[dict[str, Any]]:
        return [asdict(kill) | {"at_s": round(kill.at_s, 3)} for kill in self.kills]

    def table(self) -> str:
        """Markdown: role, phase, kills."""
        rows = [
            f"| {role} | {phase} | {count} |"
            for role, phases in self.by_phase().items()
            for phase, count in phases.items()
        ]
        return "\n".join(("| role | phase at death | kills |", "|---|---|---|", *rows))


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
        return self.spec.name

    def phases(self) -> list[Phase]:
        """One per thread, newest first; none before it reached a place."""
        return read_phases(self.phase_file) if self.phase_file.exists() else []

    def phase(self) -> Phase | None:
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
        return f"unix://{self.sockets / 'redis.sock'}"

    @property
    def poisons(self) -> Path:
        return self.folder / "poisons"


def service_specs(place: Place, shape: Shape, through: Callable[[str], str]) -> list[ServiceSpec]:
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
    specs = [ServiceSpec(name="redis", role="redis", command=redis)]
    for index, address in enumerate(brokers):
        command = penstock("broker", "--redis", place.redis_url, "--listen", address, *sets)
        specs.append(ServiceSpec(name=f"broker-{index}", role="broker", command=command))
    command = (*learner, "--run-dir", str(folder), *sets, *shape.learner_options)
    specs.append(ServiceSpec(name="learner", role="learner", command=command, on_restart=("--resume",)))
    for index in range(shape.actors + shape.poisoners):
        name, at = f"actor-{index}", brokers[index % len(brokers)]
        if index < shape.actors:
            command = (*actor, "--broker", through(at), "--actor-id", name, *sets, *shape.actor_options)
        else:
            file = place.poisons / f"{name}.jsonl"
            command = (*poisoner, "--broker", at, "--actor-id", name, "--poisons", str(file), *sets)
        specs.append(ServiceSpec(name=name, role="actor", command=command))
    return specs


ROOT: Final = Path(__file__).resolve().parents[3]
PATIENCE_S: Final = 60.0
PAUSE_S: Final = 0.01
HANGING: Final = "unroll.hanging"
"""The phase of an actor that ends no fragment any more."""
AT_REDIS: Final = (
    *(".sending", "session.opening", "lease.renewing"),
    *("commit.before", "commit.trimming", "publish.before", "publish.allocated"),
)
"""How a phase ends in which a broker or the learner waits for Redis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What `penstock audit` said."""

    code: int
    report: dict[str, Any] = field(repr=False)
    text: str


class Fleet:
    """See the module. Use as a context manager, from one thread."""

    def __init__(
        self,
        folder: Path,
        shape: Shape | None = None,
        *,
        through: Callable[[str], str] = lambda address: address,
    ) -> None:
        """through: address under which actors find the broker at an address (a proxy's)."""
        self.folder, self.shape = folder, shape or Shape()
        self.log = KillLog()
        self.sockets = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))
        self._through = through
        self._began_s = time.monotonic()
        self._changed = threading.Event()
        self._lifeline, self._lifeline_end = os.pipe()
        for name in ("logs", "endpoints", "phases", "journals", "poisons"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.members = {
            spec.name: Member(spec, folder / "phases" / spec.name)
            for spec in service_specs(Place(folder, self.sockets), self.shape, through)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._expect_all()
        for member in self.members.values():
            if member.process is not None:
                member.process.kill()
        for member in self.members.values():
            self._wait(member)
        os.close(self._lifeline_end)
        os.close(self._lifeline)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def start(self, name: str, failpoints: str = "") -> Member:
        """The next life of a process that is not running; returns at once."""
        member = self.members[name]
        assert member.process is None, f"{name} runs already"
        member.phase_file.unlink(missing_ok=True)
        member.exit, member.expected, member.frozen = None, bool(failpoints), False
        own = {PHASE_VARIABLE: str(member.phase_file), FAILPOINTS_VARIABLE: failpoints}

        def ended(exit_: Exit) -> None:
            member.exit = exit_
            self._changed.set()

        member.process = ServiceProcess(
            member.spec,
            folder=self.folder,
            lifeline_fd=self._lifeline,
            environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(), **own},
            restarted=member.lives > 0,
            on_exit=ended,
        )
        member.lives, member.started_s = member.lives + 1, time.monotonic()
        return member

    def start_all(self, within_s: float = PATIENCE_S) -> None:
        for member in self.members.values():
            if member.process is None:
                self.start(member.name)
        for name in self.members:
            self.wait(partial(self.serves, name), f"{name} to serve", within_s)

    def serves(self, name: str) -> bool:
        process = self.members[name].process
        return process is not None and process.endpoint() is not None and process.is_ready()

    def kill(self, name: str, how: str = "moment", seen: Phase | None = None) -> Kill:
        """Kill -9 and wait for the end; Redis means the server itself.

        seen: what it has just been seen at.
        """
        member = self.members[name]
        assert member.process is not None, f"{name} does not run"
        member.expected = True
        before = (seen or self.phase_at_redis()) if name == "redis" else None
        os.kill(self.pid(name), signal.SIGKILL)
        self._wait(member)
        return self.note_death(name, how, before)

    def end(self, name: str) -> None:
        member = self.members[name]
        assert member.process is not None, f"{name} does not run"
        member.expected = True
        member.process.kill()
        self._wait(member)
        member.process = None

    def note_death(self, name: str, how: str, before: Phase | None = None) -> Kill:
        member = self.members[name]
        phase = before if name == "redis" else member.phase()
        kill = Kill(
            at_s=time.monotonic() - self._began_s,
            name=name,
            how=how,
            phase=phase.name if phase else "nothing.waiting" if name == "redis" else "starting",
            sequence=phase.sequence if phase else 0,
            idle=phase is None or phase.is_idle,
            hung=sum(each.name == HANGING for each in member.phases()),
        )
        member.process = None
        self.log.add(kill)
        return kill

    def freeze(self, name: str) -> None:
        self.members[name].frozen = True
        self.log.freezes[name.partition("-")[0]] += 1
        os.kill(self.pid(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.members[name].frozen = False
        os.kill(self.pid(name), signal.SIGCONT)

    def is_alive(self, name: str) -> bool:
        member = self.members[name]
        return member.process is not None and member.exit is None and not member.frozen

    def pid(self, name: str) -> int:
        """The process that does the work; Redis's is a child of its service."""
        process = self.members[name].process
        assert process is not None, f"{name} does not run"
        endpoint = process.endpoint() if name == "redis" else None
        return endpoint.server_pid or process.pid if endpoint else process.pid

    def phase_at_redis(self) -> Phase | None:
        """Where somebody waits for Redis's answer now; None: nowhere."""
        found = [
            phase
            for member in self.members.values()
            if member.name.startswith(("broker", "learner"))
            for phase in member.phases()
            if phase.name.endswith(AT_REDIS)
        ]
        return max(found, key=lambda phase: phase.at_ns, default=None)

    def wait(self, condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> None:
        """Until `condition`; AssertionError after `within_s`, or when a process ended that was not killed."""
        deadline = time.monotonic() + within_s
        while not condition():
            self.check()
            assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
            self.pause()

    def pause(self) -> None:
        self._changed.wait(PAUSE_S)
        self._changed.clear()

    def check(self) -> None:
        """AssertionError when a process ended that was not killed."""
        for member in self.members.values():
            if member.exit is not None and member.process is not None and not member.expected:
                raise AssertionError(
                    f"{member.name} ended with {member.exit.code} in life {member.lives}: "
                    f"{self.last_line(member.name)}"
                )

    def last_line(self, name: str) -> str:
        return last_line(self.folder / "logs" / f"{name}.log")

    def finish(self) -> Audit:
        """Everybody alive and well; then the actors drain, the learner commits; the audit; Redis ends."""
        for name, member in self.members.items():
            if member.frozen:
                self.thaw(name)
        self.start_all()
        self.drain([name for name in self.members if name.startswith("actor")])
        self.drain(["learner"])
        audit = self.audit()
        self.drain([name for name in self.members if name.startswith("broker")])
        self.drain(["redis"])
        return audit

    def drain(self, names: Sequence[str]) -> None:
        """SIGTERM; each must end with 0."""
        for name in names:
            member = self.members[name]
            assert member.process is not None
            member.expected = True
            member.process.terminate()
        for name in names:
            member = self.members[name]
            self._wait(member)
            assert member.exit is not None
            assert member.exit.code == 0, f"{name} drained with {member.exit.code}: {self.last_line(name)}"
            member.process = None

    def audit(self, *, running: bool = True) -> Audit:
        """`penstock audit` of the run as it is, with the journals; without `running` from Redis's files."""
        redis = ("--redis", self.redis_url) if running else ()
        words = ("audit", str(self.folder), "--journal", str(self.folder / "journals"), *redis, "--json")
        process = command(*words, env={**os.environ, "PYTHONPATH": _python_path()})
        try:
            report = dict(json.loads(process.stdout))
        except ValueError:
            report = {}
        return Audit(code=process.returncode, report=report, text=process.stdout + process.stderr)

    def check_poison(self) -> dict[str, int]:
        """AssertionError unless the books say of what was spoiled, and of all else, what they must.

        Returns the fragments by how they are booked.
        """
        books = PoisonBooks(self.folder)
        poisons = [one for path in (self.folder / "poisons").iterdir() for one in read_poisons(path)]
        books.check(poisons)
        return books.counts()

    @property
    def redis_url(self) -> str:
        return Place(self.folder, self.sockets).redis_url

    def restarts(self) -> dict[str, int]:
        return {member.name: max(0, member.lives - 1) for member in self.members.values()}

    def _wait(self, member: Member) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while member.process is not None and member.exit is None:
            assert time.monotonic() < deadline, f"{member.name} does not end: {self.last_line(member.name)}"
            self.pause()

    def _expect_all(self) -> None:
        for member in self.members.values():
            member.expected = True


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
