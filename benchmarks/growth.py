"""The cost of a crowd: CPU and memory at one broker by number of actors, at the same total rate.

Once with only experience on its way, and once with a learner that publishes twice a second to every
actor. Also the peak memory of each process of a whole `penstock train`.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.experience_path import RUN, STEPS, fetch
from benchmarks.fragments import shape_of
from benchmarks.many_actors import peak_memory
from benchmarks.plain_redis import redis_pid
from benchmarks.rate import touch
from benchmarks.services import Services, services
from benchmarks.table import Cell, Options, Table
from benchmarks.training import PENSTOCK
from benchmarks.transfer import cpu_seconds
from broker.log.learner_log import LearnerLog
from penstock.wire.limits import KIB

SIZE: Final = 64 * KIB
SHAPE: Final = shape_of(SIZE, steps=STEPS, slots=8)
"""As many slots as a run has environments by default."""
ACTORS: Final = (1, 16, 64)
CROWD: Final = 200
"""Numbers of actors that are measured once: for these the memory is of interest."""
TOTAL_RATE: Final = 100.0
"""Fragments per second of all actors together: much less than the broker can take."""
WARM_S, WINDOW_S = 1.0, 6.0
READ_COUNT: Final = 64
IN_FLIGHT: Final = 100_000
"""Credit for all that is sent while nothing is published."""
WEIGHTS: Final = bytes(40 * KIB)
"""Bytes of weights, about those of a 64-64 policy."""
PUBLISH_EVERY_S: Final = 0.5
PROCESSES: Final = 2
"""Number of processes of simulated actors."""
PATIENCE_S: Final = 60.0
FLAT: Final = 0.10
BROKER_BAR_MB, ROLLOUT_BAR_MB = 150, 350
TRAIN_STEPS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """CPU seconds within WINDOW_S, the fragments that arrived in it, and the broker's memory at its peak."""

    broker_s: float
    redis_s: float
    fragments: int
    broker_bytes: int

    @property
    def per_gb(self) -> float:
        """Return the CPU seconds of broker and Redis for 10⁹ bytes of experience."""
        return (self.broker_s + self.redis_s) / self.gb

    @property
    def gb(self) -> float:
        """Return the experience that arrived, in 10⁹ bytes."""
        return self.fragments * SHAPE.fragment_bytes / 1e9


def table(options: Options) -> Table:
    """Return CPU seconds per GB, and the broker's memory, by number of actors."""
    crowds = (*ACTORS, CROWD)
    quiet: dict[int, list[Spell]] = {actors: [] for actors in crowds}
    busy: dict[int, list[Spell]] = {actors: [] for actors in crowds}
    for number in range(options.repeat):
        for actors in ACTORS if number else crowds:
            quiet[actors].append(measure(actors, None))
            busy[actors].append(measure(actors, PUBLISH_EVERY_S))
    return Table(
        title=f"{TOTAL_RATE:g} fragments/s of {SIZE // KIB} KiB in all, by number of actors that send them",
        columns=(
            "actors",
            "fragments/s",
            "broker CPU s per GB",
            "Redis CPU s per GB",
            "× one actor",
            "CPU s per GB, 2 publications/s",
            "× one actor",
            "broker MB",
        ),
        rows=[(actors, *_row(quiet[actors], busy[actors], quiet[1], busy[1])) for actors in crowds],
        note=(
            f"wanted: × 1 within {FLAT:.0%} up to {ACTORS[-1]} actors; broker below {BROKER_BAR_MB} MB at "
            f"{CROWD}"
        ),
    )


def _row(
    quiet: Sequence[Spell], busy: Sequence[Spell], quiet_alone: Sequence[Spell], busy_alone: Sequence[Spell]
) -> Sequence[Cell]:
    return (
        median(spell.fragments for spell in quiet) / WINDOW_S,
        median(spell.broker_s / spell.gb for spell in quiet),
        median(spell.redis_s / spell.gb for spell in quiet),
        _ratio(quiet, quiet_alone),
        median(spell.per_gb for spell in busy),
        _ratio(busy, busy_alone),
        median(spell.broker_bytes for spell in busy) / 1e6,
    )


def _ratio(spells: Sequence[Spell], alone: Sequence[Spell]) -> float:
    return median(spell.per_gb / one.per_gb for spell, one in zip(spells, alone, strict=False))


def measure(actors: int, publish_every_s: float | None) -> Spell:
    """Let so many actors send TOTAL_RATE together, on services of their own."""
    with services(durability="memory") as here, ExitStack() as stack:
        learner = _Learner(here, publish_every_s)
        stack.callback(learner.close)
        for index in range(min(PROCESSES, actors)):
            _start(stack, here, actors, index)
        learner.await_sessions(actors)
        learner.publish()
        learner.read_for(WARM_S)
        pids = here.endpoint("broker").pid, redis_pid(here)
        before, fragments = [cpu_seconds(pid) for pid in pids], learner.fragments
        learner.read_for(WINDOW_S)
        broker_s, redis_s = (cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True))
        return Spell(
            broker_s=broker_s,
            redis_s=redis_s,
            fragments=learner.fragments - fragments,
            broker_bytes=peak_memory(pids[0]),
        )


class _Learner:
    """The learner's side: reads what arrives; publishes now and then, or only the first time."""

    def __init__(self, here: Services, publish_every_s: float | None) -> None:
        self._log = LearnerLog.connect(here.redis_url, wait_s=10.0)
        self._log.acquire(RUN, "bench", 600_000)
        self._log.start(SHAPE.specification().encode(), SHAPE.pacing(IN_FLIGHT))
        self._every_s = publish_every_s or float("inf")
        self._published_s = 0.0
        self._updates = self._position = 0
        self.fragments = 0

    def await_sessions(self, count: int) -> None:
        """Wait until all have a session; no actor sends before the first publication."""
        deadline = time.monotonic() + PATIENCE_S
        while (there := len(self._log.status().sessions)) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{there} of {count} actors have a session after {PATIENCE_S} s")
            time.sleep(0.1)

    def publish(self) -> None:
        """Publish the same weights again, and settle what was read."""
        self._published_s = time.monotonic()
        self._log.publish(WEIGHTS, update=self._updates, settled=self._position, scalars={})
        self._updates += 1

    def read_for(self, seconds: float) -> None:
        """Read arrivals for so many seconds."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if now - self._published_s >= self._every_s:
                self.publish()
            entries = self._log.read(self._position, READ_COUNT, 50)
            for payload in fetch(self._log, entries):
                touch(payload or b"")
            self.fragments += len(entries)
            self._position = entries[-1].number if entries else self._position

    def close(self) -> None:
        """Give the lease back."""
        self._log.release()
        self._log.close()


def _start(stack: ExitStack, here: Services, actors: int, index: int) -> None:
    count = actors // PROCESSES + (index < actors % PROCESSES)
    command = (
        *(sys.executable, "-m", "benchmarks.simulated_actor", "--broker", here.broker),
        *("--actor-id", f"sim-{index}", "--count", str(count), "--rate", str(TOTAL_RATE / actors)),
    )
    with (here.folder / f"sim-{index}.log").open("wb") as log:
        simulator = subprocess.Popen(command, stderr=log)
    stack.callback(simulator.wait)
    stack.callback(simulator.kill)


# ---- a whole run


def memory_table(options: Options) -> Table:
    """Return the peak memory of each process of a run."""
    runs = [whole_run() for _ in range(options.repeat)]
    return Table(
        title=f"resident memory at its peak, `penstock train CartPole-v1`, {TRAIN_STEPS:,} steps",
        columns=("process", "MB"),
        rows=[(name, median(run.get(name, 0) for run in runs) / 1e6) for name in runs[0]],
        note=f"wanted: a rollout worker below {ROLLOUT_BAR_MB} MB",
    )


def whole_run() -> dict[str, int]:
    """Return bytes by process of one run; raises RuntimeError when it fails."""
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        command = (PENSTOCK, "train", "CartPole-v1", "--run-dir", f"{folder}/run", "--json")
        steps = ("--total-steps", str(TRAIN_STEPS), "--set", "learner.stop_at_target=false")
        with subprocess.Popen(
            (*command, *steps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            while run.poll() is None:
                time.sleep(0.05)
                peaks |= _peaks(Path(folder) / "run" / "endpoints.json")
    if run.returncode != 0:
        raise RuntimeError(f"penstock train ended with {run.returncode}")
    return peaks


def _peaks(endpoints: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    if not endpoints.exists():
        return found
    for name, endpoint in json.loads(endpoints.read_text()).items():
        try:
            found[name] = peak_memory(endpoint["server_pid"] or endpoint["pid"])
        except (OSError, RuntimeError):
            continue  # it has ended
    return found
