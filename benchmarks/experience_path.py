"""MB/s of the experience path: a sending actor, the broker, Redis, and a reader that is the learner's.

Sender and reader are the real ones (outbox and session; the learner's view of the log), in two processes;
only environment and training are missing. The yardstick is plain redis-py on the same server, with the better
of its packers at each size.
`python -m benchmarks.experience_path ADDRESS COUNT SIZE` is the sending process.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from actor.link.broker_client import BrokerClient
from actor.link.fragment_queue import RolloutQueue
from actor.link.outbox import Outbox
from actor.link.session import Session
from actor.link.session_opening import open_session
from benchmarks import fragments, plain_redis
from benchmarks.child import child
from benchmarks.fragments import Shape, numbered, shape_of
from benchmarks.rate import touch
from benchmarks.services import Services, services
from benchmarks.table import Cell, Options, Table
from benchmarks.transfer import Transfer
from broker.log.learner_log import LearnerLog
from broker.log.learner_records import LogEntry, Pacing
from penstock.rpc.auth import Credentials
from penstock.runtime.lifecycle import Lifecycle
from penstock.wire.fragment import Fragment
from penstock.wire.limits import KIB, MIB
from penstock.wire.messages import Role
from penstock.wire.specification import RunSpecification

RUN: Final = fragments.RUN
STEPS, SLOTS = 16, 8
BARS: Final = {64 * KIB: 0.85 * 0.40, 512 * KIB: 0.85 * 0.64, 2 * MIB: 0.85 * 0.74}
"""Wanted share of the yardstick by size.

It is 0.85 of what a bare prototype of this path, with nothing checked, reaches.
"""
DURABLE_AIM: Final = 0.70
"""Wanted share with an append-only file, whose cost both sides have."""
PATH_BYTES: Final = 320 * MIB
IN_FLIGHT: Final = 64
READ_COUNT: Final = 16
OUTBOX: Final = 16
PROCESSES: Final = ("sender", "broker", "Redis", "reader")

Source = Callable[[int], Fragment]
"""Returns the fragment with this sequence number."""
Take = Callable[[LogEntry, bytes], object]
"""Called by a reader with each payload."""


def _shape(size: int) -> Shape:
    return shape_of(size, steps=STEPS, slots=SLOTS)


def specification_of(size: int) -> RunSpecification:
    """Return the specification that a learner would send to the actors."""
    return _shape(size).specification()


PACING: Final[Pacing] = _shape(64 * KIB).pacing(IN_FLIGHT)


# ---- tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Alternating runs of one size: ours, and plain Redis by packer."""

    size: int
    durability: str
    ours: Sequence[Transfer]
    plain: Mapping[str, Sequence[Transfer]]

    @property
    def packer(self) -> str:
        """Return the better packer."""
        return max(self.plain, key=lambda packer: median_rate(self.plain[packer]))

    @property
    def ratio(self) -> float:
        """Return our rate over the yardstick's, the median of the rounds."""
        rounds = zip(self.ours, self.plain[self.packer], strict=True)
        return statistics.median(
            ours.megabytes_per_second / plain.megabytes_per_second for ours, plain in rounds
        )

    @property
    def bar(self) -> float:
        """Return the least ratio that is wanted."""
        return BARS[self.size] if self.durability == "memory" else DURABLE_AIM


def table(options: Options) -> Table:
    """Return MB/s from an actor to the learner, beside plain Redis."""
    return Table(
        title="experience path, MB/s from an actor to the learner; plain redis-py: XADD + XREAD",
        columns=(
            "fragment",
            "durability",
            "path",
            *(f"plain, {packer} packer" for packer in plain_redis.PACKERS),
            "path / better plain",
            "wanted",
        ),
        rows=[
            (
                f"{run.size // KIB} KiB",
                run.durability,
                median_rate(run.ours),
                *(median_rate(run.plain[packer]) for packer in plain_redis.PACKERS),
                run.ratio,
                run.bar,
            )
            for run in _compare(options)
        ],
        note=(
            "wanted in memory: 0.85 of the share that a prototype without checks, metrics and pacing reached"
        ),
    )


def cpu_table(options: Options) -> Table:
    """Return the CPU time of the same runs by process."""
    rows: list[Sequence[Cell]] = []
    for run in _compare(options):
        what = (f"{run.size // KIB} KiB", run.durability)
        rows.append((*what, "path", *_cpu(run.ours)))
        rows.append((*what, f"plain, {run.packer} packer", *_cpu(run.plain[run.packer])))
    return Table(
        title="experience path, CPU seconds per GB of each process",
        columns=("fragment", "durability", "", *PROCESSES, "all"),
        rows=rows,
    )


def _cpu(runs: Sequence[Transfer]) -> Sequence[Cell]:
    spent = [run.cpu_seconds_per_gb for run in runs]
    each = {name: statistics.median(run[name] for run in spent) for name in spent[0]}
    return (*(each.get(name) for name in PROCESSES), sum(each.values()))


@functools.cache
def _compare(options: Options) -> Sequence[Compared]:
    return [
        compare(size, durability, options.repeat) for size in BARS for durability in ("memory", "fsync_1s")
    ]


def compare(size: int, durability: str, repeat: int) -> Compared:
    """Run ours and plain Redis in turns, each time on a server of its own."""
    count, ours = PATH_BYTES // size, []
    plain: dict[str, list[Transfer]] = {packer: [] for packer in plain_redis.PACKERS}
    for _ in range(repeat):
        with services(durability=durability) as here:
            ours.append(measure(here, count=count, size=size))
        for packer, runs in plain.items():
            with services(durability=durability, broker=False) as here:
                runs.append(plain_redis.measure(here, count=count, size=size, packer=packer))
    return Compared(size=size, durability=durability, ours=ours, plain=plain)


def median_rate(runs: Sequence[Transfer]) -> float:
    """Return the median rate of several runs, in MB/s."""
    return statistics.median(run.megabytes_per_second for run in runs)


# ---- the reader's side


def measure(here: Services, *, count: int, size: int, senders: int = 1) -> Transfer:
    """Send `count` fragments of `size` bytes, from the outboxes of so many actors to the learner's memory."""
    each = count // senders
    command = ("-m", __spec__.name, here.broker, str(each), str(size))
    return receive(here, _shape(size), command, count=each * senders, senders=senders)


def receive(
    here: Services,
    shape: Shape,
    sender: Sequence[str],
    *,
    count: int,
    in_flight: int = IN_FLIGHT,
    read_count: int = READ_COUNT,
    take: Take | None = None,
    senders: int = 1,
) -> Transfer:
    """Act as the learner of sending processes until `count` fragments arrived.

    sender: their arguments behind `python`. CPU seconds of "sender" are those of the first.
    """
    log = LearnerLog.connect(here.redis_url, wait_s=10.0)
    log.acquire(RUN, "bench", 600_000)
    log.start(shape.specification().encode(), shape.pacing(in_flight))
    log.publish(b"weights", update=0, settled=0, scalars={})
    with ExitStack() as stack:
        children = [stack.enter_context(child(sender)) for _ in range(senders)]
        transfer, last = Transfer(processes=_processes(here, children[0].pid)), 0
        while transfer.entries < count:
            entries = log.read(last, read_count, 1000)
            if entries:
                _take(log, entries, transfer, take or _touch)
                last = entries[-1].number
                log.settle(last)
            elif any(process.poll() for process in children):
                raise RuntimeError(f"a sender stopped after {transfer.entries} of {count} fragments")
        transfer.finish()
    log.release()
    log.close()
    return transfer


def _processes(here: Services, sender: int) -> Mapping[str, int]:
    broker, server = here.endpoint("broker").pid, plain_redis.redis_pid(here)
    return {"sender": sender, "broker": broker, "Redis": server, "reader": os.getpid()}


def fetch(log: LearnerLog, entries: Sequence[LogEntry]) -> list[bytes | None]:
    """Return the payloads of entries, in as few calls as the learner needs, which says their sizes."""
    return log.fetch([entry.number for entry in entries], [entry.size for entry in entries])


def _take(log: LearnerLog, entries: Sequence[LogEntry], transfer: Transfer, take: Take) -> None:
    size = 0
    for entry, payload in zip(entries, fetch(log, entries), strict=True):
        if payload is None:
            raise RuntimeError(f"entry {entry.number} has no payload")
        take(entry, payload)
        size += len(payload)
    transfer.add(len(entries), size)


def _touch(_entry: LogEntry, payload: bytes) -> object:
    return touch(payload)


# ---- the sender's side


def send(
    address: str, count: int, source_of: Callable[[int], Source], outbox_fragments: int = OUTBOX
) -> None:
    """Send `count` fragments of the session's source as fast as credit allows, through an outbox."""
    lifecycle = Lifecycle("bench")
    broker_client = BrokerClient(address, Credentials())
    session = opened(broker_client, f"bench-actor-{os.getpid()}", lifecycle)
    outbox = Outbox(session, RolloutQueue(outbox_fragments))
    outbox.start()
    source = source_of(session.number)
    for sequence in range(1, count + 1):
        await_credit(session, sequence)
        outbox.put(source(sequence), lifecycle.draining)
    outbox.flush(60.0)
    session.close(politely=True)
    broker_client.close()


def opened(broker_client: BrokerClient, name: str, lifecycle: Lifecycle) -> Session:
    """Return a rollout session that watches."""
    session = open_session(broker_client, name, Role.ROLLOUT, lifecycle)
    if session is None:
        raise RuntimeError(f"{broker_client.address} opens no session")
    session.start()
    return session


def await_credit(session: Session, sequence: int) -> None:
    """Wait until the session may begin `sequence`."""
    session.begin(sequence)
    session.wait_until(lambda: session.credit.begin_through >= sequence or session.is_over)
    session.check()
    if session.ended is not None:
        raise RuntimeError(str(session.ended))


def repeated(shape: Shape, session: int) -> Source:
    """Return a source of one fragment of random observations again and again."""
    template = shape.template(session)
    return lambda sequence: numbered(template, sequence, time.time_ns() // 1000)


if __name__ == "__main__":
    send(sys.argv[1], int(sys.argv[2]), functools.partial(repeated, _shape(int(sys.argv[3]))))
