"""Endurance: CPU and memory of each process of an old run beside a fresh one.

Both are `penstock train CartPole-v1` as typed, but without an end, and both run while they are compared: a
host that is slower than an hour ago slows both.
"""

import json
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.many_actors import peak_memory
from benchmarks.table import Options, Table
from benchmarks.training import PENSTOCK
from benchmarks.transfer import cpu_seconds
from penstock.wire.limits import KIB

PROCESSES: Final = ("redis", "broker", "actor-0", "learner")
"""The processes on the way of experience; the evaluator is not among them."""
WARM_S: Final = 60.0
WINDOW_S: Final = 20.0
ENDLESS_STEPS: Final = 10**9
PATIENCE_S: Final = 600.0
_TAIL_BYTES: Final = 16 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """CPU seconds by process for a million environment steps, and the steps that they were measured over."""

    cpu: Mapping[str, float]
    steps: int

    @property
    def whole(self) -> float:
        """Return the CPU seconds of all processes together."""
        return sum(self.cpu.values())


def table(options: Options) -> Table:
    """Return a row for each process; medians of the windows, in which both runs were measured at once."""
    with _endless() as old:
        old.wait_for_steps()
        time.sleep(WARM_S)
        [alone_early] = _windows([old], 1)
        time.sleep(options.seconds)
        [alone_late] = _windows([old], 1)
        age, steps = old.age_s, old.steps()
        with _endless() as fresh:
            fresh.wait_for_steps()
            time.sleep(WARM_S)
            measured = _windows([fresh, old], options.repeat)
            memory = {name: (fresh.peak(name), old.peak(name)) for name in PROCESSES}
    pairs = list(zip(measured[::2], measured[1::2], strict=True))
    rows = [
        (
            name,
            statistics.median(young.cpu[name] for young, _ in pairs),
            statistics.median(late.cpu[name] for _, late in pairs),
            statistics.median(late.cpu[name] / young.cpu[name] for young, late in pairs),
            *(size / 1e6 for size in memory[name]),
        )
        for name in PROCESSES
    ]
    whole = (
        "together",
        statistics.median(young.whole for young, _ in pairs),
        statistics.median(late.whole for _, late in pairs),
        statistics.median(late.whole / young.whole for young, late in pairs),
        *(sum(sizes) / 1e6 for sizes in zip(*memory.values(), strict=True)),
    )
    return Table(
        title=f"a run of {age / 60:.0f} minutes ({steps:,} steps) beside one of a minute",
        columns=(
            "process",
            "fresh: CPU s per 10⁶ steps",
            "old: CPU s per 10⁶ steps",
            "× fresh",
            "fresh: MB at its peak",
            "old: MB at its peak",
        ),
        rows=[*rows, whole],
        note=f"the old run by itself: {alone_early.whole:.3g} CPU s per 10⁶ steps after a minute, "
        f"{alone_late.whole:.3g} at its end; wanted: × 1 within 10%",
    )


class EndlessRun:
    """A run of `penstock train` without an end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began_s = time.monotonic()

    @property
    def age_s(self) -> float:
        """Return the seconds since it was started."""
        return time.monotonic() - self._began_s

    def wait_for_steps(self) -> None:
        """Wait until it has learned from something; raises RuntimeError when nothing comes."""
        while not self.steps():
            if self.age_s > PATIENCE_S:
                raise RuntimeError(f"{self._folder}: no step within {PATIENCE_S:g} s")
            time.sleep(0.1)

    def steps(self) -> int:
        """Return the environment steps learned from, as of the newest record; 0 before the first."""
        return int(self.newest().get("env_steps", 0))

    def newest(self) -> dict[str, Any]:
        """Return the last whole line of `metrics.jsonl`; {} before the first."""
        path = self._folder / "metrics.jsonl"
        if not path.exists():
            return {}
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0].splitlines()
        newest: dict[str, Any] = json.loads(whole[-1]) if whole else {}
        return newest

    def spent(self, name: str) -> float:
        """Return the CPU seconds of a process until now."""
        return cpu_seconds(self._pid(name))

    def peak(self, name: str) -> int:
        """Return the most bytes that a process has had resident."""
        return peak_memory(self._pid(name))

    def _pid(self, name: str) -> int:
        endpoint = json.loads((self._folder / "endpoints.json").read_text())[name]
        return int(endpoint["server_pid"] or endpoint["pid"])


def _windows(runs: Sequence[EndlessRun], count: int) -> list[Window]:
    """Measure each run in turn, `count` times; the windows of one time are of the same seconds."""
    found: list[Window] = []
    for _ in range(count):
        before = [(run.steps(), {name: run.spent(name) for name in PROCESSES}) for run in runs]
        time.sleep(WINDOW_S)
        for run, (steps, spent) in zip(runs, before, strict=True):
            made = run.steps() - steps
            if not made:
                raise RuntimeError(f"no step within {WINDOW_S:g} s")
            cpu = {name: (run.spent(name) - spent[name]) / made * 1e6 for name in PROCESSES}
            found.append(Window(cpu=cpu, steps=made))
    return found


@contextmanager
def _endless() -> Iterator[EndlessRun]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name) / "run"
        command = (PENSTOCK, "train", "CartPole-v1", "--run-dir", str(folder), "--json")
        goes_on = ("--total-steps", str(ENDLESS_STEPS), "--set", "learner.stop_at_target=false")
        with subprocess.Popen(
            (*command, *goes_on), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield EndlessRun(folder)
            finally:
                process.send_signal(signal.SIGTERM)
