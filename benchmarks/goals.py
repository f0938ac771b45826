"""How fast goals are proposed and tried: a suggestion alone and beside a learner, and episodes by executor.

A suggestion is what an injector does before it acts: observe, encode, ask, decide. The policy server is the
run's own; beside a learner it answers while a rollout worker and the learner take what they can.
"""

import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import gymnasium as gym
import numpy as np

from benchmarks.goals_day import RECIPE, wait_for_server
from benchmarks.table import Cell, Options, Table
from launch.run.child_process import penstock
from penstock.client import PolicyClient
from workloads.goals.executors.history import History
from workloads.goals.executors.simulated import SimulatedHost
from workloads.goals.injector.asked_policy import AskedPolicy, Unanswered
from workloads.goals.injector.gate import Gate

SUGGESTIONS: Final = 1000
STEPS: Final = 50
EPISODES: Final = {"simulated": 100, "commands": 3}
AIM_MS: Final = 10.0
AT_ONCE: Final = 16
STEPS_AT_ONCE: Final = 60


def table(_options: Options) -> Table:
    """Return the table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        address = f"unix:{folder}/serve.sock"
        run = ("--run-dir", str(folder / "run"), "--serve", address, "--total-steps", "100000000")
        with _started("train", str(RECIPE), *run, "--set", "learner.stop_at_target=false") as training:
            wait_for_server(training, folder / "run" / "endpoints.json")
            beside = _suggestions(address)
        kept = sum(one.stat().st_size for one in (folder / "run" / "checkpoints").rglob("*") if one.is_file())
        with _started("serve", "--run", str(folder / "run"), "--listen", address):
            alone = _suggestions(address)
        rows: list[list[Cell]] = [
            ["suggestion alone, p50 / p99 ms", *_quantiles(alone)],
            ["suggestion beside a learner, p50 / p99 ms", *_quantiles(beside)],
            ["episodes of 50 steps a minute, simulated", _episodes("simulated", folder), None],
            ["episodes of 50 steps a minute, commands (true)", _episodes("commands", folder), None],
            [f"episodes a minute, {AT_ONCE} environments, commands of 100 ms", _at_once(folder), None],
            ["checkpoints of the run, KB", kept / 1000, None],
        ]
    return Table(
        title="goals",
        columns=("what", "value", "p99"),
        rows=rows,
        note=f"{SUGGESTIONS} suggestions each; wanted below {AIM_MS:.0f} ms. Episodes of one environment, or "
        f"of {AT_ONCE} in a process each (environment.vectorise=async), which do a goal in each step.",
    )


@contextmanager
def _started(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(penstock(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def _suggestions(address: str) -> list[float]:
    """Return the seconds of each suggestion."""
    host, history = SimulatedHost(), History(SimulatedHost.goals)
    gate = Gate(threshold=0.7, explore=0.02, safe=(False, *(True for _ in host.goals)))
    took: list[float] = []
    with PolicyClient(address, deadline_s=120) as client:
        policy = AskedPolicy(client, "bench", history.width, host.goals)
        while len(took) < SUGGESTIONS:
            begun = time.perf_counter()
            try:
                found = policy.suggest(history.observation(host.read()))
            except Unanswered:
                continue
            gate.decide(found.chances, found.action, 0.5)
            took.append(time.perf_counter() - begun)
            host.idle()
            history.idle()
    return took


def _quantiles(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.quantile(np.array(seconds) * 1000, [0.5, 0.99])
    return float(p50), float(p99)


def _at_once(folder: Path) -> float:
    """Return episodes a minute of 16 environments in processes of their own, of commands that take 100 ms."""
    goals = folder / "slow.toml"
    goal = '[[goal]]\nname = "wait"\ncommand = ["/usr/bin/sleep", "0.1"]\n'
    goals.write_text(f'folder = "{folder}"\nallow = ["/usr/bin/sleep"]\n{goal}')
    environments = gym.make_vec(
        "workloads.goals.tasks:Goals-v0", AT_ONCE, vectorization_mode="async", executor="commands",
        goals=str(goals), actors_act=True,
    )  # fmt: skip
    try:
        environments.reset(seed=0)
        begun = time.perf_counter()
        for _ in range(STEPS_AT_ONCE):
            environments.step(np.ones(AT_ONCE, np.int64))
        return 60 * AT_ONCE * STEPS_AT_ONCE / STEPS / (time.perf_counter() - begun)
    finally:
        environments.close()


def _episodes(executor: str, folder: Path) -> float:
    """Return episodes a minute of one environment that draws its actions at random."""
    goals = folder / "goals.toml"
    goal = '[[goal]]\nname = "true"\ncommand = ["/usr/bin/true"]\n'
    goals.write_text(f'folder = "{folder}"\nallow = ["/usr/bin/true"]\n{goal}')
    named = str(goals) if executor == "commands" else ""
    environment = gym.make(
        "workloads.goals.tasks:Goals-v0", executor=executor, goals=named, actors_act=executor == "commands"
    )
    count = EPISODES[executor]
    begun = time.perf_counter()
    for seed in range(count):
        environment.reset(seed=seed)
        for _ in range(STEPS):
            environment.step(environment.action_space.sample())
    return 60 * count / (time.perf_counter() - begun)
