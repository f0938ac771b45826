"""Experience of pictures: 64 steps of one 84 × 84 frame each, written and read at once.

A frame travels once, and actors and learners stack it with the three before it; an observation of four
stacked frames would be four times the bytes. The sender packs every fragment afresh, as an actor does, and
the reader unpacks it and reads every pixel. `python -m benchmarks.frames ADDRESS COUNT KIND` is the sending
process.
"""

import functools
import statistics
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

import numpy as np

from benchmarks.experience_path import PROCESSES, Source, receive, send
from benchmarks.fragments import Shape
from benchmarks.rate import touch
from benchmarks.services import Services, services
from benchmarks.table import Cell, Options, Table
from benchmarks.transfer import Transfer
from broker.log.learner_records import LogEntry
from penstock.config.settings import EnvironmentSection
from penstock.wire.fragment import build, read_payload
from penstock.wire.spaces import Box
from penstock.wire.tensor import Array
from workloads.control.environment import make

SIDE: Final = 84
STEPS: Final = 64
STACKED: Final = 4
SHAPE: Final = Shape(Box(np.zeros((SIDE, SIDE), np.uint8), np.full((SIDE, SIDE), 255, np.uint8)), STEPS, 1)
COUNT: Final = 1_000
READ_COUNT: Final = 8
POOL: Final = 8
"""Number of different fragments; the sender takes them in turns."""
RECTANGLES: Final = 24
NOISE, SPRITES = "random", "sprites"
LZ4: Final = "lz4"
GAMES: Final = ("ALE/Pong-v5", "ALE/Breakout-v5") if find_spec("envpool") else ()
"""Played at random, where EnvPool is there to play them."""
KINDS: Final = (NOISE, *(kind for name in (SPRITES, *GAMES) for kind in (name, f"{name} {LZ4}")))
REVERB_STEPS: Final = 28_700
BAR_STEPS: Final = 2.0 * REVERB_STEPS
"""Twice the steps per second that Reverb reaches, measured elsewhere on the same kind of cores."""
BAR_FRAMES: Final = 20_000.0


def table(options: Options) -> Table:
    """Return fragments, steps and bytes per second."""
    runs: dict[str, list[Transfer]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeat):
        for kind, done in runs.items():
            with services(durability="memory") as here:
                done.append(measure(here, kind))
    return Table(
        title=(
            f"frames of {SIDE} × {SIDE}, {STEPS} steps a fragment, from an actor to the learner, nothing "
            "durable"
        ),
        columns=(
            "frames",
            "fragments/s",
            "steps/s",
            "× wanted",
            "MB/s of frames",
            "bytes sent per step",
            "stacked / sent",
            *(f"{process} CPU µs per step" for process in PROCESSES),
        ),
        rows=[_row(kind, runs[kind]) for kind in KINDS],
        note=(
            f"wanted: {BAR_STEPS:,.0f} steps/s, twice what Reverb reached, measured elsewhere on the same "
            f"kind of cores, and {BAR_FRAMES:,.0f} frames/s"
        ),
    )


def _row(kind: str, runs: "list[Transfer]") -> tuple[Cell, ...]:
    per_second = statistics.median(run.entries_per_second for run in runs)
    sent = statistics.median(run.megabytes_per_second / run.entries_per_second for run in runs) * 1e6 / STEPS
    steps = per_second * STEPS
    return (
        kind,
        per_second,
        steps,
        steps / BAR_STEPS,
        per_second * SHAPE.fragment_bytes / 1e6,
        sent,
        STACKED * SIDE * SIDE / sent,
        *(
            statistics.median(run.cpu_seconds_per_gb[process] for run in runs) * sent / 1e3
            for process in PROCESSES
        ),
    )


def measure(here: Services, kind: str) -> Transfer:
    """Send COUNT fragments of one kind."""
    command = ("-m", __spec__.name, here.broker, str(COUNT), kind)
    return receive(here, SHAPE, command, count=COUNT, read_count=READ_COUNT, take=_unpack)


def _unpack(entry: LogEntry, payload: bytes) -> int:
    assert entry.header is not None
    return sum(touch(array.data) for array in read_payload(entry.header, payload).values() if array.size)


def pictures(kind: str, seed: int) -> Array:
    """Return the observations of one fragment, uint8 [STEPS + 1, 1, SIDE, SIDE].

    Noise, moving rectangles, or a game.
    """
    if kind in GAMES:
        return _played(kind, seed)
    random = np.random.default_rng(seed)
    if kind == NOISE:
        return random.integers(0, 256, (STEPS + 1, 1, SIDE, SIDE), np.uint8)
    frames = np.full((STEPS + 1, 1, SIDE, SIDE), 87, np.uint8)
    for _ in range(RECTANGLES):
        corner, speed = random.integers(0, SIDE, 2), random.integers(-2, 3, 2)
        height, width = random.integers(2, 16, 2)
        shade = random.integers(100, 256)
        for step in range(STEPS + 1):
            y, x = (corner + step * speed) % SIDE
            frames[step, 0, y : y + height, x : x + width] = shade
    return frames


def _played(game: str, seed: int) -> Array:
    section = EnvironmentSection(id=game, vectorise="envpool", count=1)
    environment, skipped = make(section, 1, 0), 100 * (seed + 1)
    environment.reset(seed=seed)
    environment.action_space.seed(seed)
    shown = [environment.step(environment.action_space.sample())[0] for _ in range(skipped + STEPS + 1)]
    return np.stack(shown[skipped:])


def packed(kind: str, session: int) -> Source:
    """Return a source of fragments of prepared pictures, each packed when it is asked for."""
    header = SHAPE.header(session)
    pool = [SHAPE.arrays(observation=pictures(kind.partition(" ")[0], seed)) for seed in range(POOL)]
    compress = ("observation",) if kind.endswith(LZ4) else ()
    return lambda sequence: build(
        replace(header, sequence=sequence, created_us=time.time_ns() // 1000), pool[sequence % POOL], compress
    )


if __name__ == "__main__":
    send(sys.argv[1], int(sys.argv[2]), functools.partial(packed, sys.argv[3]))
