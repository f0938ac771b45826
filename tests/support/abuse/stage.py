"""One broker process, its Redis and the learner's side of the run, and what abuse must leave as it was."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from penstock.broker.log.learner_log import LearnerLog
from penstock.protocol.limits import MIB
from penstock.protocol.messages import Role
from penstock.v1 import experience_pb2 as experience
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, open_run
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import CHARGE, fragment
from tests.support.storage.redis_server import RedisServer

BUDGET_FRAGMENTS: Final = 64
SESSION_TIMEOUT_MS: Final = 3_600_000
"""Longer than any test: an honest actor that waits for the abuse to end says nothing meanwhile."""
TRACES: Final = (
    *("acked", "number", "log_bytes", "log_lost"),
    *("reports", "desired", "session", "shadow_number"),
)
SETTLED_BY: Final = 2**40
"""Beyond every entry: gives the whole budget back."""


@dataclass(frozen=True)
class Stage:
    """Abuse must leave no trace for the next test, so all share one stage."""

    broker: BrokerProcess
    learner: LearnerLog
    server: RedisServer

    @property
    def address(self) -> str:
        return self.broker.address

    def traces(self) -> dict[str, Any]:
        """What a run keeps: a refused request changes none of it."""
        client: Any = redis.Redis.from_url(self.server.url)
        state = {name.decode(): value for name, value in client.hgetall("penstock:state").items()}
        left = {name: state.get(name) for name in TRACES}
        keys = sorted(key for key in client.scan_iter("*") if not key.startswith(b"penstock:session:"))
        client.close()
        return left | {"keys": keys}

    def errors(self) -> str:
        return "\n".join(line for line in self.broker.log.read_text().splitlines() if "request_id=" in line)


@contextmanager
def staged(folder: Path, settings: dict[str, Any] | None = None) -> Iterator[Stage]:
    """A stage that is ready; ended afterwards."""
    with (
        harness.redis(folder) as server,
        closing(
            open_run(server.url, budget=BUDGET_FRAGMENTS * CHARGE, session_timeout_ms=SESSION_TIMEOUT_MS)
        ) as learner,
        harness.broker(server.url, folder / "broker", settings=settings) as broker,
    ):
        yield Stage(broker, learner, server)


@contextmanager
def nothing_stored(stage: Stage) -> Iterator[None]:
    """No entry, no report, no session, no staged payload, no change of what operators want."""
    before = stage.traces()
    yield
    assert stage.traces() == before


@contextmanager
def session_of(stage: Stage, actor_id: str, role: Role = Role.ROLLOUT) -> Iterator[SimulatedActor]:
    """An actor with a session that is closed afterwards, so that its credit goes back."""
    with SimulatedActor(stage.address, actor_id, role) as actor:
        actor.open()
        yield actor
        actor.experience.CloseSession(experience.CloseSessionRequest(session=actor.session), timeout=60)


@contextmanager
def unharmed(stage: Stage) -> Iterator[None]:
    """The broker lives, logged no failure of its own, and an honest actor is served before and after."""
    errors = stage.errors()
    with session_of(stage, "honest") as actor:
        assert actor.send(fragment(actor.session, 1)).acked_through == 1
        yield
        stage.learner.settle(SETTLED_BY)
        actor.watch()
        assert actor.send(fragment(actor.session, 2)).acked_through == 2
    assert stage.errors() == errors
    assert stage.broker.get("/readyz")[0] == 200


class Memory:
    """Resident memory of a process."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def resident(self) -> int:
        return self._field("VmRSS")

    def peak(self) -> int:
        return self._field("VmHWM")

    def forget_peak(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    def _field(self, name: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise LookupError(name)


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def memory_within(pid: int, most: int) -> Iterator[Memory]:
    """The peak of the process lies at most so many bytes above what it holds when this begins."""
    memory = Memory(pid)
    memory.forget_peak()
    before = memory.resident()
    yield memory
    risen = memory.peak() - before
    assert risen <= most, f"peak rose by {risen / MIB:.0f} MiB, at most {most / MIB:.0f} MiB are allowed"
