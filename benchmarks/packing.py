"""Small fragments: how many per second when each travels alone, and packed into one Append.

`python -m benchmarks.packing ADDRESS COUNT KIND PER_APPEND` is the sending process: the calls of an actor
without its outbox, one in flight; PER_APPEND "outbox" is the outbox, which packs what waits.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Final

from actor.link.broker_client import BrokerClient
from benchmarks.experience_path import PROCESSES, Source, await_credit, opened, receive, repeated, send
from benchmarks.fragments import Shape, box, shape_of
from benchmarks.services import Services, services
from benchmarks.table import Cell, Options, Table
from benchmarks.transfer import Transfer
from penstock.rpc.auth import Credentials
from penstock.runtime.lifecycle import Lifecycle
from penstock.wire.limits import KIB
from penstock.wire.refusal import Reason

KINDS: Final[Mapping[str, Shape]] = {
    "2 KiB": shape_of(2 * KIB, steps=8, slots=8),
    "CartPole, 64 steps": Shape(box(4), 64, 1),
}
ALONE, OUTBOX = "1", "outbox"
WAYS: Final = (ALONE, "64", "256", OUTBOX)
"""Fragments in one Append."""
MANY: Final = 6_000
FEW: Final = 1_500
"""Number of fragments that travel alone."""
IN_FLIGHT: Final = 4096
READ_COUNT: Final = 256
OUTBOX_FRAGMENTS: Final = 256
AIM: Final = 10.0
"""Wanted ratio of packed to alone."""
CARTPOLE_BAR: Final = 3_800.0
"""Fragments of 64 CartPole steps per second: Reverb, measured elsewhere on the same kind of cores."""


def table(options: Options) -> Table:
    """Return fragments per second, alone and packed."""
    rows: list[tuple[Cell, ...]] = []
    for kind, shape in KINDS.items():
        runs: dict[str, list[Transfer]] = {way: [] for way in WAYS}
        for _ in range(options.repeat):
            for way, done in runs.items():
                with services(durability="memory") as here:
                    done.append(measure(here, kind, way))
        rows += [_row(kind, shape, way, runs[way], runs[ALONE]) for way in WAYS]
    return Table(
        title="small fragments, from an actor to the learner",
        columns=(
            "fragment",
            "bytes",
            "in one Append",
            "fragments/s",
            "steps/s",
            "× alone",
            *(f"{process} CPU µs per fragment" for process in PROCESSES),
        ),
        rows=rows,
        note=(
            f"wanted: × {AIM:g} packed; {CARTPOLE_BAR:,.0f} fragments/s of 64 CartPole steps, which is what "
            "Reverb reached, measured elsewhere on the same kind of cores"
        ),
    )


def _row(
    kind: str, shape: Shape, way: str, runs: "list[Transfer]", alone: "list[Transfer]"
) -> tuple[Cell, ...]:
    per_second = statistics.median(run.entries_per_second for run in runs)
    ratio = statistics.median(
        run.entries_per_second / one.entries_per_second for run, one in zip(runs, alone, strict=True)
    )
    size, steps = shape.fragment_bytes, shape.steps * shape.slots
    spent = (statistics.median(run.cpu_seconds_per_gb[process] for run in runs) for process in PROCESSES)
    return kind, size, way, per_second, per_second * steps, ratio, *(per_gb * size / 1e3 for per_gb in spent)


def measure(here: Services, kind: str, way: str) -> Transfer:
    """Send fragments of one kind, in one way."""
    count = FEW if way == ALONE else MANY
    command = ("-m", __spec__.name, here.broker, str(count), kind, way)
    return receive(here, KINDS[kind], command, count=count, in_flight=IN_FLIGHT, read_count=READ_COUNT)


def send_packed(address: str, count: int, source_of: Callable[[int], Source], per_append: int) -> None:
    """Send `count` fragments of the session's source, so many in each Append, or what there is credit for."""
    broker_client = BrokerClient(address, Credentials())
    session = opened(broker_client, "bench-actor", Lifecycle("bench"))
    source, acked = source_of(session.number), 0
    while acked < count:
        await_credit(session, acked + 1)
        last = min(acked + per_append, count, session.credit.begin_through)
        session.begin(last)
        packed = [source(sequence) for sequence in range(acked + 1, last + 1)]
        reply = session.append(acked, packed)
        acked = reply.acked_through
        if reply.refusal is not None and reply.refusal.reason is not Reason.FULL:
            raise RuntimeError(str(reply.refusal))
    session.close(politely=True)
    broker_client.close()


def main(address: str, count: int, kind: str, way: str) -> None:
    source_of = functools.partial(repeated, KINDS[kind])
    if way == OUTBOX:
        send(address, count, source_of, OUTBOX_FRAGMENTS)
    else:
        send_packed(address, count, source_of, int(way))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
