"""MB/s from an actor to the learner: outbox, session, the broker, Redis, the learner's view of the log.

Sender and reader are the real ones, in two processes; only environment and training are missing. The
yardstick is plain redis-py on the same server, XADD in one process and XREAD in another, with the better of
its packers at each size: hiredis copies a payload into the command, the one in Python sends it behind it.

    python -m benchmarks.path send ADDRESS COUNT SIZE           an actor
    python -m benchmarks.path write URL COUNT SIZE PACKER       plain redis-py
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Final

import numpy as np
import redis
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer

from benchmarks.stand import Cell, Options, Services, Table, child, cpu_seconds, services
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.outbox import FragmentQueue, Outbox
from penstock.actor.link.session import Session, open_session
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import LogEntry, Pacing
from penstock.protocol.fragment import Fragment, FragmentHeader, Slot, WeightSpan, build
from penstock.protocol.limits import KIB, MIB
from penstock.protocol.messages import Role
from penstock.protocol.schema import Axes, FragmentSchema, fragment_schema
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.specification import Probe, RunSpecification
from penstock.protocol.tensor import Array
from penstock.rpc.auth import Credentials
from penstock.runtime.lifecycle import Lifecycle

ME: Final = (sys.executable, "-m", "benchmarks.path")
RUN: Final = "bench"
BARS: Final = {64 * KIB: 0.85 * 0.40, 512 * KIB: 0.85 * 0.64, 2 * MIB: 0.85 * 0.74}
"""Wanted share of the yardstick by size: 0.85 of what a bare prototype of this path reaches unchecked."""
DURABLE_AIM: Final = 0.70
"""Wanted share with an append-only file, whose cost both sides have."""
PATH_BYTES: Final = 320 * MIB
READ_COUNT: Final = 16
PACKERS: Final = ("hiredis", "python")
PROCESSES: Final = ("sender", "broker", "Redis", "reader")
_SESSION_TIMEOUT_MS: Final = 30_000
_STREAM: Final = "plain"
_PATIENCE_S: Final = 60.0
_BUFFER_CUTOFF: Final = 6000
"""Bytes from which redis-py does not copy an argument into the command."""


# ---- made-up fragments


@dataclass(frozen=True)
class Shape:
    """Fragments of `steps` × `slots` of an observation and one of two actions, in which no episode ends."""

    box: Box
    steps: int = 16
    slots: int = 8

    @classmethod
    def of(cls, size: int, steps: int = 16, slots: int = 8) -> "Shape":
        """Return the shape with the widest observation with which a fragment has at most `size` bytes."""
        for width in range(size // (4 * (steps + 1) * slots), 0, -1):
            box = Box(np.full(width, -1, np.float32), np.full(width, 1, np.float32))
            if (shape := cls(box, steps, slots)).fragment_bytes <= size:
                return shape
        raise ValueError(f"size={size}: must hold {steps} × {slots} numbers")

    @cached_property
    def schema(self) -> FragmentSchema:
        return fragment_schema(self.box, Discrete(2))

    @property
    def fragment_bytes(self) -> int:
        return self.schema.fragment_bytes(self.steps, self.slots, 0)

    def specification(self) -> RunSpecification:
        """Return the specification that a learner would send to the actors."""
        return RunSpecification(
            run=RUN, seed=0, environment_json="{}", policy_json="{}", actor_json="{}",
            evaluation_json="{}", workload="control", observation_space=self.box,
            action_space=Discrete(2), schema=self.schema, probe=Probe({}, {}), unroll_length=self.steps,
            lock_step=False, session_timeout_ms=_SESSION_TIMEOUT_MS,
        )  # fmt: skip

    def pacing(self, in_flight: int = 64) -> Pacing:
        """Return credit for so many fragments of one actor."""
        return Pacing(
            budget=in_flight * self.steps * self.slots, fragment_charge=self.steps * self.slots,
            actor_count=1, lock_step=False, session_timeout_ms=_SESSION_TIMEOUT_MS,
            max_log_bytes=2048 * MIB, max_log_entries=1_000_000,
        )  # fmt: skip

    def template(self, session: int) -> Fragment:
        """Return the first fragment of a session: zeros and ones at random."""
        leading = {
            Axes.STEP: (self.steps, self.slots),
            Axes.STEP_PLUS_ONE: (self.steps + 1, self.slots),
            Axes.SLOT: (self.slots,),
            Axes.END: (0,),
        }
        random = np.random.default_rng(0)
        arrays: dict[str, Array] = {
            rule.name: random.integers(0, 2, (*leading[rule.axes], *rule.shape)).astype(rule.dtype)
            for rule in self.schema.tensors
        }
        header = FragmentHeader(
            run=RUN, session=session, sequence=1, schema_id=self.schema.schema_id, steps=self.steps,
            slots=tuple(Slot(index, 0, 0) for index in range(self.slots)),
            weights=(WeightSpan(0, 0, self.steps, 1, 0),), tensors=(),
        )  # fmt: skip
        return build(header, arrays)


# ---- tables


@dataclass(slots=True)
class Transfer:
    """Arrivals from process to process, and the CPU seconds of `processes` (pid by name).

    What came with the first arrival is in no rate: the time of its departure is unknown.
    """

    processes: Mapping[str, int] = field(default_factory=dict)
    entries: int = 0
    _bytes: int = 0
    _first_s: float = 0.0
    _last_s: float = 0.0
    _before: Mapping[str, float] = field(default_factory=dict)
    _spent: Mapping[str, float] = field(default_factory=dict)

    def add(self, entries: int, size: int) -> None:
        """Count `entries` of `size` bytes in all that have arrived and were read."""
        self._last_s = time.perf_counter()
        if self.entries:
            self._bytes += size
        else:
            self._first_s, self._before = self._last_s, self._now()
        self.entries += entries

    def finish(self) -> None:
        """Note that everything has arrived; call it before an ended process is waited for."""
        self._spent = {name: seconds - self._before[name] for name, seconds in self._now().items()}

    def _now(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self.processes.items()}

    @property
    def megabytes_per_second(self) -> float:
        seconds = self._last_s - self._first_s
        return self._bytes / seconds / 1e6 if seconds else 0.0

    @property
    def cpu_seconds_per_gb(self) -> dict[str, float]:
        return {name: seconds / (self._bytes / 1e9) for name, seconds in self._spent.items() if self._bytes}


def compared(ours: Sequence[Transfer], plain: Mapping[str, Sequence[Transfer]]) -> tuple[str, float]:
    """Return the better packer, and our rate over the yardstick's with it, the median of the rounds."""
    packer = max(plain, key=lambda one: median_rate(plain[one]))
    rounds = zip(ours, plain[packer], strict=True)
    return packer, median(mine.megabytes_per_second / its.megabytes_per_second for mine, its in rounds)


def table(options: Options) -> Table:
    """Return MB/s and CPU seconds by process from an actor to the learner, beside plain Redis."""
    rows: list[Sequence[Cell]] = []
    for size, bar in BARS.items():
        for durability in ("memory", "fsync_1s"):
            ours, plain = _measured(size, durability, options.repeat)
            packer, ratio = compared(ours, plain)
            best, wanted = plain[packer], bar if durability == "memory" else DURABLE_AIM
            what = (f"{size // KIB} KiB", durability)
            rows.append((*what, "path", median_rate(ours), ratio, wanted, *_cpu(ours)))
            rows.append((*what, f"plain, {packer}", median_rate(best), None, None, *_cpu(best)))
    return Table(
        title="experience path, from an actor to the learner; plain redis-py: XADD + XREAD",
        columns=(
            *("fragment", "durability", "way", "MB/s", "path / plain", "wanted"),
            *(f"{process}: CPU s per GB" for process in (*PROCESSES, "all")),
        ),
        rows=rows,
        note="plain: the better of redis-py's packers at that size",
    )


def _cpu(runs: Sequence[Transfer]) -> Sequence[Cell]:
    spent = [run.cpu_seconds_per_gb for run in runs]
    each = {name: median(run[name] for run in spent) for name in spent[0]}
    return (*(each.get(name) for name in PROCESSES), sum(each.values()))


def _measured(size: int, durability: str, repeat: int) -> tuple[list[Transfer], dict[str, list[Transfer]]]:
    """Run ours and plain Redis in turns, each time on a server of its own."""
    count, ours = PATH_BYTES // size, []
    plain: dict[str, list[Transfer]] = {packer: [] for packer in PACKERS}
    for _ in range(repeat):
        with services(durability=durability) as here:
            ours.append(measure(here, count, size))
        for packer, runs in plain.items():
            with services(durability=durability, broker=False) as here:
                runs.append(_plain(here, count, size, packer))
    return ours, plain


def median_rate(runs: Sequence[Transfer]) -> float:
    return median(run.megabytes_per_second for run in runs)


# ---- the reader's side


def measure(here: Services, count: int, size: int) -> Transfer:
    """Send `count` fragments of `size` bytes, from the outbox of an actor to the learner's memory."""
    log, shape = LearnerLog.connect(here.redis_url, wait_s=10.0), Shape.of(size)
    log.acquire(RUN, "bench", 600_000)
    log.start(shape.specification().encode(), shape.pacing())
    log.publish(b"weights", update=0, settled=0, scalars={})
    with child(*ME, "send", here.broker, str(count), str(size)) as sender:
        pids = (sender.pid, here.endpoint("broker").pid, here.redis_pid, os.getpid())
        transfer, last = Transfer(processes=dict(zip(PROCESSES, pids, strict=True))), 0
        while transfer.entries < count:
            if entries := log.read(last, READ_COUNT, 1000):
                last = entries[-1].number
                transfer.add(len(entries), sum(map(touch, fetch(log, entries))))
                log.settle(last)
            elif sender.poll():
                raise RuntimeError(f"the sender stopped after {transfer.entries} of {count} fragments")
        transfer.finish()
    log.release()
    log.close()
    return transfer


def fetch(log: LearnerLog, entries: Sequence[LogEntry]) -> list[bytes]:
    """Return the payloads of entries, in as few calls as the learner needs."""
    payloads = log.fetch([entry.number for entry in entries], [entry.size for entry in entries])
    if None in payloads:
        raise RuntimeError("an entry of the log has no payload")
    return [payload for payload in payloads if payload is not None]


def touch(payload: bytes) -> int:
    """Read every byte once, as a learner would; return how many there were."""
    np.frombuffer(payload, np.uint8).max(initial=0)
    return len(payload)


def _plain(here: Services, count: int, size: int, packer: str) -> Transfer:
    reader = redis.Redis.from_url(here.redis_url, protocol=2, socket_timeout=_PATIENCE_S)
    words = ("write", here.redis_url, str(count), str(size), packer)
    with reader, child(*ME, *words) as writer:
        pids = {"sender": writer.pid, "Redis": here.redis_pid, "reader": os.getpid()}
        transfer, last = Transfer(processes=pids), b"0"
        while transfer.entries < count:
            reply: Any = reader.xread({_STREAM: last}, count=READ_COUNT, block=30_000)
            if not reply:
                raise RuntimeError(f"the writer stopped after {transfer.entries} of {count} entries")
            entries = reply[0][1]
            transfer.add(len(entries), sum(touch(fields[b"p"]) for _, fields in entries))
            last = entries[-1][0]
        transfer.finish()
    return transfer


# ---- the sender's side


def send(address: str, count: int, size: int) -> None:
    """Send `count` times the same fragment as fast as credit allows, through an outbox."""
    lifecycle, broker = Lifecycle("bench"), BrokerClient(address, Credentials())
    session = open_session(broker, f"bench-actor-{os.getpid()}", Role.ROLLOUT, lifecycle)
    if session is None:
        raise RuntimeError(f"{address} opens no session")
    session.start()
    outbox = Outbox(session, FragmentQueue(16))
    outbox.start()
    template = Shape.of(size).template(session.number)
    for sequence in range(1, count + 1):
        _await_credit(session, sequence)
        header = replace(template.header, sequence=sequence, created_us=time.time_ns() // 1000)
        outbox.put(Fragment(header, template.payload), lifecycle.draining)
    outbox.flush(60.0)
    session.close(politely=True)
    broker.close()


def _await_credit(session: Session, sequence: int) -> None:
    session.begin(sequence)
    session.wait_until(lambda: session.credit.begin_through >= sequence or session.is_over)
    session.check()
    if session.ended is not None:
        raise RuntimeError(str(session.ended))


def write(url: str, count: int, size: int, packer: str) -> None:
    """Append `count` entries, one call each."""
    encoder = Encoder("utf-8", "strict", decode_responses=False)  # type: ignore[no-untyped-call]
    in_python = PythonRespSerializer(_BUFFER_CUTOFF, encoder.encode)
    chosen: dict[str, Any] = {"command_packer": in_python} if packer == "python" else {}
    writer = redis.Redis.from_url(url, protocol=2, socket_timeout=_PATIENCE_S, **chosen)
    payload = os.urandom(size)
    for _ in range(count):
        writer.xadd(_STREAM, {"p": payload})


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        write(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
