"""Steps per second of environments alone, by vectoriser: random actions, as an actor steps them.

The ways are taken in turns, so that an hour of a shared host is that of all of them. CPU seconds are those of
this process with its threads; those of the processes of `async` are not known before they have ended.
"""

import statistics
import time
from importlib.util import find_spec
from typing import Any, Final

from actor.acting.stepper import Stepper
from benchmarks.table import Cell, Options, Table
from penstock.config.settings import EnvironmentSection
from workloads.control.environment import make, spaces

SLOTS: Final = 16
MEASURED_S: Final = 1.0
WAYS: Final[dict[str, tuple[Any, ...]]] = {
    "CartPole-v1": ("sync", "async", "vector", "envpool"),
    "Hopper-v5": ("sync", "async", "envpool"),
    "ALE/Pong-v5": ("sync", "async", "envpool"),
}
NEEDED: Final = {"Hopper-v5": ("mujoco", "imageio"), "ALE/Pong-v5": ("ale_py", "cv2")}


def table(options: Options) -> Table:
    """Return steps and CPU seconds by environment and vectoriser, those whose packages are here."""
    rows: list[tuple[Cell, ...]] = []
    for name, ways in WAYS.items():
        if not all(find_spec(package) for package in NEEDED.get(name, ())):
            continue
        here = [way for way in ways if way != "envpool" or find_spec("envpool")]
        runs: dict[str, list[tuple[float, float]]] = {way: [] for way in here}
        for _ in range(options.repeat):
            for way, done in runs.items():
                done.append(measure(name, way))
        base = statistics.median(rate for rate, _ in runs["sync"])
        for way, done in runs.items():
            rate, cpu = (statistics.median(column) for column in zip(*done, strict=True))
            rows.append((name, way, rate, rate / base, None if way == "async" else cpu * 1e6))
    return Table(
        title=f"{SLOTS} environments alone, random actions, the ways in turns",
        columns=("environment", "vectorise", "steps/s", "× sync", "CPU s per 10⁶ steps"),
        rows=rows,
    )


def measure(name: str, way: Any) -> tuple[float, float]:
    """Return steps per second, and CPU seconds per step of this process."""
    section = EnvironmentSection(id=name, vectorise=way)
    environment = make(section, SLOTS, 0)
    stepper = Stepper(environment, spaces(section)[0])
    stepper.reset(range(SLOTS))
    environment.action_space.seed(0)
    actions = [environment.action_space.sample() for _ in range(64)]
    began_s, began_cpu_s, steps = time.monotonic(), time.process_time(), 0
    while time.monotonic() - began_s < MEASURED_S:
        stepper.step(actions[steps % len(actions)])
        steps += 1
    took_s, spent_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    stepper.close()
    return steps * SLOTS / took_s, spent_s / (steps * SLOTS)
