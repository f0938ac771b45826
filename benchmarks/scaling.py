"""Throughput and its cost by what a user can vary: bytes, packing, actors, brokers, environments.

Everything runs as fast as it can; CPU seconds are of each process for the same amount of experience, so that
they tell which process is the limit. `python -m benchmarks.curves` draws the rows.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from benchmarks import experience_path, many_actors, packing, training
from benchmarks.many_actors import Broker, Crowd
from benchmarks.services import Services, services, start
from benchmarks.table import Cell, Options, Table
from benchmarks.transfer import Transfer
from launch.run.child_process import penstock
from penstock.runtime.health import read_endpoint
from penstock.wire.limits import KIB, MIB

BYTES: Final = 128 * MIB
MOST_FRAGMENTS: Final = 6_000
CROWD_SECONDS: Final = 8.0
BROKERS_ACTORS: Final = 64
TRAIN_STEPS: Final = 100_000
COLUMNS: Final = ("turned", "at", "throughput", "unit", "CPU s per", "process", "CPU seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement.

    cpu: CPU seconds by process, for the amount of experience that the series counts by.
    """

    throughput: float
    cpu: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Measurements over one quantity.

    turned: what `at` counts. unit: of the throughput. per: amount that the CPU seconds are for.
    """

    turned: str
    unit: str
    per: str
    at: Sequence[int]
    measure: Callable[[int], Point]


def table(options: Options) -> Table:
    """Return a row for each process of each point; medians of the repeats, which go round all points."""
    measured: dict[tuple[str, int], list[Point]] = {}
    for _ in range(options.repeat):
        for series in SERIES:
            for at in series.at:
                measured.setdefault((series.turned, at), []).append(series.measure(at))
    rows = [row for series in SERIES for at in series.at for row in _rows(series, at, measured)]
    return Table(
        title=f"throughput and CPU seconds by what is turned, {os.cpu_count()} cores",
        columns=COLUMNS,
        rows=rows,
    )


def _rows(
    series: Series, at: int, measured: Mapping[tuple[str, int], Sequence[Point]]
) -> Iterator[Sequence[Cell]]:
    points = measured[series.turned, at]
    throughput = statistics.median(point.throughput for point in points)
    for process in points[0].cpu:
        cpu = statistics.median(point.cpu[process] for point in points)
        yield (series.turned, at, throughput, series.unit, series.per, process, cpu)


# ---- what is turned


def _fragment(size: int) -> Point:
    with services(durability="memory") as here:
        count = min(MOST_FRAGMENTS, BYTES // size)
        return _moved(experience_path.measure(here, count=count, size=size))


def _packed(per_append: int) -> Point:
    with services(durability="memory") as here:
        return _moved(packing.measure(here, "2 KiB", str(per_append)))


def _moved(transfer: Transfer) -> Point:
    return Point(throughput=transfer.megabytes_per_second, cpu=transfer.cpu_seconds_per_gb)


def _actors(count: int) -> Point:
    with services(durability="memory") as here:
        return _crowd(here, count, ())


def _brokers(count: int) -> Point:
    with services(durability="memory") as here, _more_brokers(here, count - 1) as more:
        return _crowd(here, BROKERS_ACTORS, more)


def _crowd(here: Services, actors: int, more: Sequence[Broker]) -> Point:
    processes = max(1 + len(more), min(actors, 2))
    crowd = Crowd(actors=actors, rate=None, seconds=CROWD_SECONDS, processes=processes)
    outcome = many_actors.measure(here, crowd, more)
    gigabytes = outcome.acked * many_actors.SIZE / 1e9
    return Point(
        throughput=gigabytes * 1000 / crowd.seconds,
        cpu={name: seconds / gigabytes for name, seconds in outcome.cpu_seconds.items()},
    )


@contextmanager
def _more_brokers(here: Services, count: int) -> Iterator[Sequence[Broker]]:
    read_fd, write_fd = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, read_fd)
        stack.callback(os.close, write_fd)
        brokers = []
        for index in range(count):
            name, address = f"broker-{index + 2}", f"unix:{here.folder}/broker-{index + 2}.sock"
            where = ("--redis", here.redis_url, "--listen", address, "--set", "broker.durability=memory")
            command = penstock("broker", *where)
            process = start(name, command, here.folder, read_fd)
            stack.callback(process.kill)
            endpoint = read_endpoint(here.folder / f"{name}.json")
            assert endpoint is not None, "a process that is ready has announced itself"
            brokers.append(Broker(address, endpoint.pid))
        yield brokers


def _environments(count: int) -> Point:
    run = training.measure(("--set", f"environment.count={count}"), total_steps=TRAIN_STEPS)
    return Point(
        throughput=run.steps_per_second, cpu={role: run.cpu_per_million(role) for role in training.ROLES}
    )


SERIES: Final = (
    Series(
        turned="bytes of a fragment",
        unit="MB/s",
        per="GB",
        at=(4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB),
        measure=_fragment,
    ),
    Series(
        turned=(
            "fragments of 2 KiB in "
            "one Append"
        ), unit="MB/s", per="GB", at=(1, 4, 16, 64, 256), measure=_packed
    ),
    Series(
        turned="simulated actors, 64 KiB", unit="MB/s", per="GB", at=(1, 4, 16, 64), measure=_actors
    ),
    Series(
        turned=(
            f"brokers, {BROKERS_ACTORS} "
            "simulated actors"
        ), unit="MB/s", per="GB", at=(1, 2), measure=_brokers
    ),
    Series(
        turned="environments of each of two actors",
        unit="steps/s",
        per="10⁶ steps",
        at=(1, 4, 16, 64),
        measure=_environments,
    ),
)  # fmt: skip
