"""Seconds from the shell's `penstock train CartPole-v1` to the first update, beside two bare imports.

The run is asked for one step, so it ends with its first update, and what the learner logs then is the time;
up to there it does what every run does. The imports are two interpreters at the same time, each with
`import torch, gymnasium`, until both have ended: what a learner and an actor whose network needs torch cannot
start without; an actor of a small network needs less. All are measured in turn, after one round that only
warms the disk's cache.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from benchmarks.table import Cell, Options, Table
from benchmarks.training import PENSTOCK, ROLES, spent_by_role

TRAIN: Final = "penstock train → first update"
LEAST_RUNS: Final = 5
FIRST_UPDATE: Final = "learning ended"
IMPORTS: Final = (sys.executable, "-c", "import torch, gymnasium")
AIM: Final = 1.5
AIM_HELP_S: Final = 0.3


def table(options: Options) -> Table:
    """Return median seconds of each, and the ratio to the imports of the same round."""
    spent: list[Mapping[str, float]] = []

    def first_update() -> float:
        seconds, cpu_seconds = first_update_s()
        spent.append(cpu_seconds)
        return seconds

    measures: dict[str, Callable[[], float]] = {
        TRAIN: first_update,
        "two imports of torch and gymnasium": imports_s,
        "penstock --help": help_s,
    }
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(1 + max(options.repeat, LEAST_RUNS)):
        for name, measure in measures.items():
            value = measure()
            if turn:
                seconds[name].append(value)
    imports = seconds["two imports of torch and gymnasium"]
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            statistics.median(of),
            statistics.median(own / other for own, other in zip(of, imports, strict=True)),
            *(statistics.median(one[role] for one in spent) if name == TRAIN else None for role in ROLES),
        )
        for name, of in seconds.items()
    ]
    return Table(
        title="start-up of penstock train CartPole-v1",
        columns=("what", "seconds", "of the imports", *(f"{role}: CPU s" for role in ROLES)),
        rows=rows,
        note=(
            f"aims: the first update within {AIM} of the imports, help within {AIM_HELP_S} s; CPU seconds of "
            "a process from its start to its end, an evaluation and the end of the run included"
        ),
    )


def first_update_s() -> tuple[float, Mapping[str, float]]:
    """Return the seconds until the learner has made its first update, and the processes' CPU seconds by role.

    Raises RuntimeError with the last line of its error output when the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        run = Path(folder) / "run"
        began_s = time.time()
        command = f"exec {PENSTOCK} train CartPole-v1 --total-steps 1 --run-dir {run} --json"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no error output"])[-1])
        spent = spent_by_role(json.loads(done.stdout))
        return logged_at_s((run / "logs" / "learner.log").read_text(), FIRST_UPDATE) - began_s, spent


def logged_at_s(log: str, message: str) -> float:
    """Return when a process first logged `message`, in seconds since the epoch.

    Raises ValueError if it never did.
    """
    for line in log.splitlines():
        if message in line:
            return datetime.fromisoformat(line.partition(" ")[0]).timestamp()
    raise ValueError(f"the log does not say {message!r}: {log[-500:]!r}")


def imports_s() -> float:
    """Return the seconds until both of two interpreters have imported torch and gymnasium and ended."""
    began_s = time.perf_counter()
    processes = [subprocess.Popen(IMPORTS) for _ in range(2)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"{' '.join(IMPORTS)}: exit {codes}")
    return time.perf_counter() - began_s


def help_s() -> float:
    """Return the seconds of `penstock --help`."""
    began_s = time.perf_counter()
    subprocess.run([PENSTOCK, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began_s
