"""`make bench`: prints tables of what this machine does; asserts nothing.

Everything is measured with real processes, one thing after the other. `--only path` runs one part.
`--only actors --actors 1000 --rate 10 --seconds 300` is the crowd for a bigger machine.
"""

import argparse
import os
import platform
import statistics
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import experience_path, many_actors, plain_redis, publication, training
from benchmarks.many_actors import Crowd
from benchmarks.rate import Rate
from benchmarks.services import services
from penstock.wire.limits import KIB, MIB

SIZES = (64 * KIB, 512 * KIB)
PATH_BYTES = 256 * MIB
TRAIN_STEPS = 400_000
PUBLICATIONS = 200

console = Console()


def main() -> None:
    """Run the parts asked for."""
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "train": train,
        "path": path,
        "publish": publish,
        "actors": actors,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure.")
    parser.add_argument("--only", choices=parts, action="append", help="this part (may be repeated)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement; the median is shown")
    parser.add_argument("--actors", type=int, default=200, help="simulated actors at one broker")
    parser.add_argument("--rate", type=float, default=5.0, help="fragments of 64 KiB per second of each")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they send")
    options = parser.parse_args()
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    for name in options.only or parts:
        parts[name](options)


def train(options: argparse.Namespace) -> None:
    """End-to-end steps per second, and seconds until solved."""
    rows = []
    for vectorise in ("sync", "vector"):
        full = [training.measure(vectorise=vectorise, total_steps=TRAIN_STEPS) for _ in range(options.repeat)]
        solved = [training.measure(vectorise=vectorise, total_steps=None) for _ in range(options.repeat)]
        seconds = [run.solved_s for run in solved if run.solved_s is not None]
        rows.append((
            vectorise,
            f"{statistics.median(run.steps_per_second for run in full):,.0f}",
            f"{statistics.median(seconds):.1f}" if seconds else "–",
            f"{len(seconds)} of {options.repeat}",
        ))  # fmt: skip
    show(
        f"penstock train CartPole-v1, 2 actors, {TRAIN_STEPS:,} steps",
        ("vectoriser", "environment steps/s", "training seconds until solved", "solved"),
        rows,
    )


def path(options: argparse.Namespace) -> None:
    """MB/s from an actor to the learner, beside plain Redis."""
    rows = []
    for size in SIZES:
        count = PATH_BYTES // size
        cells = [f"{size // KIB} KiB"]
        for durability in ("memory", "fsync_1s"):
            ours, plain = [], []
            for _ in range(options.repeat):
                with services(durability=durability) as here:
                    ours.append(experience_path.measure(here.redis_url, here.broker, count=count, size=size))
                with services(durability=durability, broker=False) as here:
                    plain.append(plain_redis.measure(here.redis_url, count=count, size=size))
            cells += [f"{median_rate(ours):,.0f}", f"{median_rate(plain):,.0f}"]
        rows.append(cells)
    show(
        "experience path, MB/s",
        ("fragment", "actor → learner", "plain XADD + XREAD", "actor → learner, AOF", "plain, AOF"),
        rows,
    )


def median_rate(rates: Sequence[Rate]) -> float:
    """Of several runs, in MB/s."""
    return statistics.median(rate.megabytes_per_second for rate in rates)


def publish(options: argparse.Namespace) -> None:
    """Milliseconds from publish to applied."""
    with services(durability="fsync_1s") as here:
        seconds = publication.measure(here.redis_url, here.broker, count=PUBLICATIONS * options.repeat)
    cuts = [value * 1000 for value in statistics.quantiles(seconds, n=100)]
    show(
        "weights of a 64-64 policy, from publish to applied in an actor",
        ("publications applied", "p50 ms", "p99 ms"),
        [(str(len(seconds)), f"{cuts[49]:.1f}", f"{cuts[98]:.1f}")],
    )


def actors(options: argparse.Namespace) -> None:
    """Milliseconds from a fragment built to acknowledged, with many actors at one broker; once."""
    crowd = Crowd(
        actors=options.actors,
        rate=options.rate,
        seconds=options.seconds,
        processes=max(2, (os.cpu_count() or 2) // 2),
    )
    with services(durability="fsync_1s") as here:
        outcome = many_actors.measure(here, crowd)
    show(
        f"{crowd.actors} simulated actors × {crowd.rate:g} fragments/s of 64 KiB at one broker, "
        f"{crowd.seconds:g} s, AOF everysec",
        ("fragments/s", "ack p50 ms", "ack p99 ms", "sent again", "lost", "broker memory MiB"),
        [
            (
                f"{outcome.acked / crowd.seconds:,.0f}",
                *(f"{outcome.quantile_s(q) * 1000:,.1f}" for q in (0.5, 0.99)),
                f"{outcome.resent:,}",
                str(outcome.lost),
                f"{outcome.broker_memory / MIB:,.0f}",
            )
        ],
    )


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
