"""The processes of one run, each of which a test may kill, freeze and start again; and the audit at the end.

    with Fleet(folder, actors=4, brokers=1) as fleet:       redis ◄── broker-0 ◄── actor-0 .. actor-3
        fleet.start_all()                                      ▲
        kill = fleet.kill("broker-0")                       learner (one parameter, no environment)
        fleet.start("broker-0")
        report = fleet.finish()

`folder` is laid out like `runs/NAME`. Every process is a shipped one on its own code path (the actors have no
environment, the learner one parameter) and keeps its phase file, so each kill is logged with the place where
it found its victim. Redis keeps none: its phase is that of a broker or the learner which waits for its
answer, read a moment before. A process that ends without having been killed here is an error with its last
line.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from penstock.launch.run.supervisor import Exit, ServiceProcess, last_line, penstock
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE, PHASE_VARIABLE
from tests.support.abuse.poisoner import read_poisons
from tests.support.fleet.kill_log import Kill, KillLog
from tests.support.fleet.members import Member, Place, Shape, service_specs
from tests.support.fleet.phases import Phase
from tests.support.oracles.poison_books import PoisonBooks

__all__ = ["PATIENCE_S", "ROOT", "Audit", "Fleet", "Member", "Shape"]

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

    # ---- lives

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
        """Start what does not run and wait until all serve."""
        for member in self.members.values():
            if member.process is None:
                self.start(member.name)
        for name in self.members:
            self.wait(partial(self.serves, name), f"{name} to serve", within_s)

    def serves(self, name: str) -> bool:
        """Whether it runs and is ready."""
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
        """Kill -9 that is no part of a campaign."""
        member = self.members[name]
        assert member.process is not None, f"{name} does not run"
        member.expected = True
        member.process.kill()
        self._wait(member)
        member.process = None

    def note_death(self, name: str, how: str, before: Phase | None = None) -> Kill:
        """Log a death that has happened and make room for the next life."""
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
        """SIGSTOP."""
        self.members[name].frozen = True
        self.log.freezes[name.partition("-")[0]] += 1
        os.kill(self.pid(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.members[name].frozen = False
        os.kill(self.pid(name), signal.SIGCONT)

    def is_alive(self, name: str) -> bool:
        """Whether it runs and is not frozen."""
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

    # ---- waiting

    def wait(self, condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> None:
        """Until `condition`; AssertionError after `within_s`, or when a process ended that was not killed."""
        deadline = time.monotonic() + within_s
        while not condition():
            self.check()
            assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
            self.pause()

    def pause(self) -> None:
        """Until a process ends, and not long in any case."""
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
        """Of its log."""
        return last_line(self.folder / "logs" / f"{name}.log")

    # ---- the end

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
        command = penstock("audit", str(self.folder), "--journal", str(self.folder / "journals"))
        process = subprocess.run(
            [*command, *(("--redis", self.redis_url) if running else ()), "--json"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": _python_path()},
            timeout=300,
        )
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
        """Where Redis listens."""
        return Place(self.folder, self.sockets).redis_url

    def restarts(self) -> dict[str, int]:
        """Lives but the first of each process."""
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
