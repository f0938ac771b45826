"""MB/s of the experience path: a sending actor, the broker, Redis, and a reader that is the learner's.

Sender and reader are the real ones (outbox and session; the learner's view of the log), in two processes;
only environment and training are missing.
`python -m benchmarks.experience_path ADDRESS COUNT SIZE` is the sending process.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actor.link import Link
from actor.outbox import Outbox
from actor.session import Session, open_session
from benchmarks import plain_redis
from benchmarks.rate import Rate, touch
from benchmarks.services import services
from benchmarks.table import Cell, Options, Table
from broker.learner_log import LearnerLog
from broker.state import Pacing
from penstock.runtime.lifecycle import Lifecycle
from penstock.wire.auth import Credentials
from penstock.wire.fragment import Fragment, FragmentHeader, Slot, WeightSpan, build
from penstock.wire.limits import KIB, MIB
from penstock.wire.messages import Role
from penstock.wire.schema import Axes, FragmentSchema, fragment_schema
from penstock.wire.spaces import Box, Discrete
from penstock.wire.specification import Probe, RunSpecification

STEPS, SLOTS = 16, 8
SIZES = (64 * KIB, 512 * KIB)
PATH_BYTES = 256 * MIB
IN_FLIGHT = 64
READ_COUNT = 16
RUN = "bench"
OUTBOX = 16


def schema_of(size: int) -> tuple[Box, FragmentSchema]:
    """The observation that makes a fragment of STEPS × SLOTS weigh at most `size` bytes, and its schema."""
    width = size // (4 * (STEPS + 1) * SLOTS)
    while True:
        box = Box(np.full(width, -1, np.float32), np.full(width, 1, np.float32))
        schema = fragment_schema(box, Discrete(2))
        if schema.fragment_bytes(STEPS, SLOTS, SLOTS) <= size:
            return box, schema
        width -= 1


def specification_of(size: int) -> RunSpecification:
    """What a learner would tell the actors."""
    box, schema = schema_of(size)
    return RunSpecification(
        run=RUN,
        seed=0,
        environment_json="{}",
        policy_json="{}",
        actor_json="{}",
        evaluation_json="{}",
        workload="control",
        observation_space=box,
        action_space=Discrete(2),
        schema=schema,
        probe=Probe({}, {}),
        unroll_length=STEPS,
        lock_step=False,
        session_timeout_ms=30_000,
    )


PACING = Pacing(
    budget=IN_FLIGHT * STEPS * SLOTS,
    fragment_charge=STEPS * SLOTS,
    actor_count=1,
    lock_step=False,
    session_timeout_ms=30_000,
    max_log_bytes=2048 * MIB,
    max_log_entries=1_000_000,
)


def table(options: Options) -> Table:
    """MB/s from an actor to the learner, beside plain Redis."""
    rows = []
    for size in SIZES:
        count = PATH_BYTES // size
        cells: list[Cell] = [f"{size // KIB} KiB"]
        for durability in ("memory", "fsync_1s"):
            ours, plain = [], []
            for _ in range(options.repeat):
                with services(durability=durability) as here:
                    ours.append(measure(here.redis_url, here.broker, count=count, size=size))
                with services(durability=durability, broker=False) as here:
                    plain.append(plain_redis.measure(here.redis_url, count=count, size=size))
            cells += [median_rate(ours), median_rate(plain)]
        rows.append(cells)
    return Table(
        title="experience path, MB/s",
        columns=("fragment", "actor → learner", "plain XADD + XREAD", "actor → learner, AOF", "plain, AOF"),
        rows=rows,
    )


def median_rate(rates: Sequence[Rate]) -> float:
    """Of several runs, in MB/s."""
    return statistics.median(rate.megabytes_per_second for rate in rates)


def measure(redis_url: str, broker: str, *, count: int, size: int) -> Rate:
    """MB/s of `count` fragments of `size` bytes, from the actor's outbox to the learner's memory."""
    log = LearnerLog.connect(redis_url, wait_s=10.0)
    log.acquire(RUN, "bench", 60_000)
    log.start(specification_of(size).encode(), PACING)
    log.publish(b"weights", update=0, settled=0, scalars={})
    sender = subprocess.Popen([sys.executable, "-m", __spec__.name, broker, str(count), str(size)])
    rate, last = Rate(), 0
    while rate.entries < count:
        entries = log.read(last, READ_COUNT, 1000)
        if not entries:
            if sender.poll():
                raise RuntimeError(f"the sender stopped after {rate.entries} of {count} fragments")
            continue
        payloads = [payload for payload in log.fetch([entry.number for entry in entries]) if payload]
        for payload in payloads:
            touch(payload)
        last = entries[-1].number
        log.settle(last)
        rate.add(len(entries), sum(len(payload) for payload in payloads))
    sender.wait()
    log.release()
    log.close()
    return rate


def send(address: str, count: int, size: int) -> None:
    """Send `count` fragments as fast as leave is given."""
    lifecycle = Lifecycle("bench")
    link = Link(address, Credentials())
    session = open_session(link, "bench-actor", Role.ROLLOUT, lifecycle)
    if session is None:
        raise RuntimeError(f"{address} opens no session")
    session.start()
    outbox = Outbox(session, OUTBOX)
    outbox.start()
    template = fragment_of(size, session.number)
    for sequence in range(1, count + 1):
        await_leave(session, sequence)
        header = replace(template.header, sequence=sequence, created_us=time.time_ns() // 1000)
        outbox.put(Fragment(header, template.payload), lifecycle.draining)
    outbox.flush(60.0)
    session.close(politely=True)
    link.close()


def await_leave(session: Session, sequence: int) -> None:
    """Wait until the session may begin `sequence`."""
    with session.changed:
        session.begun_through = sequence
        session.changed.wait_for(lambda: session.leave.begin_through >= sequence or session.is_over)
    session.check()
    if session.ended is not None:
        raise RuntimeError(str(session.ended))


def fragment_of(size: int, session: int) -> Fragment:
    """A fragment of random observations in which no episode ended."""
    _, schema = schema_of(size)
    leading = {
        Axes.STEP: (STEPS, SLOTS),
        Axes.STEP_PLUS_ONE: (STEPS + 1, SLOTS),
        Axes.SLOT: (SLOTS,),
        Axes.END: (0,),
    }
    random = np.random.default_rng(0)
    arrays = {
        rule.name: random.integers(0, 2, (*leading[rule.axes], *rule.shape)).astype(rule.dtype)
        for rule in schema.tensors
    }
    header = FragmentHeader(
        run=RUN,
        session=session,
        sequence=1,
        schema_id=schema.schema_id,
        steps=STEPS,
        slots=tuple(Slot(index, 0, 0) for index in range(SLOTS)),
        weights=(WeightSpan(0, 0, STEPS, 1, 0),),
        tensors=(),
    )
    return build(header, arrays)


if __name__ == "__main__":
    send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
