"""A day with injectors on several hosts: goals succeed more often from hour to hour.

A policy server and a learner as processes, four simulated hosts whose faults arrive all the time, and a
policy that begins untrained. Every goal that it draws is tried (`--explore 1`), so that it learns
within the day.
"""

import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import pytest

from penstock.launch.run.supervisor import penstock

RECIPE: Final = Path(__file__).resolve().parents[2] / "penstock" / "recipes" / "goals.toml"
INTERVALS: Final = 2880
"""Of 30 seconds, in a day."""
HOURS: Final = 24
SETTINGS: Final = (
    "algorithm.batch_steps=256",
    "algorithm.minibatches=4",
    "algorithm.epochs=8",
    "algorithm.learning_rate=2e-3",
    "algorithm.learning_rate_schedule=constant",
    "actor.unroll_length=16",
    "learner.stop_at_target=false",
    "learner.stall_timeout_s=600",
)
READY_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """success: of the goals of all hosts, in the order in which they ended.

    summary: of the run. codes: how the injectors ended.
    """

    success: Sequence[bool]
    summary: dict[str, Any]
    codes: Sequence[int]

    def by_hour(self) -> list[float]:
        """Return the share of goals that succeeded, in 24 parts of equal size."""
        size = len(self.success) / HOURS
        parts = [self.success[round(hour * size) : round((hour + 1) * size)] for hour in range(HOURS)]
        return [sum(part) / len(part) for part in parts]


def play(folder: Path, hosts: int, intervals: int) -> Day:
    """Play a day in a folder with real processes; raises RuntimeError where no policy server came up."""
    address = f"unix:{folder}/serve.sock"
    with _learning(folder / "run", address):
        injectors = [
            subprocess.Popen(
                penstock("inject", "--server", address, *_words(folder, host, intervals)),
                stdout=subprocess.DEVNULL,
            )
            for host in range(hosts)
        ]
        codes = [injector.wait() for injector in injectors]
    outcomes = sorted(
        (line["timestamp"], line["success"])
        for host in range(hosts)
        for line in map(json.loads, (folder / f"host-{host}" / "rl_feedback.jsonl").read_text().splitlines())
    )
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return Day(success=[success for _, success in outcomes], summary=summary, codes=codes)


def _words(folder: Path, host: int, intervals: int) -> tuple[str, ...]:
    name = f"host-{host}"
    return (
        *(
            "--simulated",
            str(host),
            "--seed",
            str(host),
            "--client-key",
            name,
            "--folder",
            str(folder / name),
        ),
        *(
            "--auto",
            "--explore",
            "1",
            "--interval",
            "0",
            "--daily-limit",
            "100000",
            "--steps",
            str(intervals),
        ),
    )


@contextmanager
def _learning(run_dir: Path, address: str) -> Iterator[None]:
    words = [word for one in SETTINGS for word in ("--set", one)]
    command = penstock(
        "train", str(RECIPE), "--run-dir", str(run_dir), "--actors", "0", "--serve", address, "--total-steps",
        "100000000", *words,
    )  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
        try:
            wait_for_server(training, run_dir / "endpoints.json")
            yield
        finally:
            training.terminate()


def wait_for_server(training: "subprocess.Popen[bytes]", endpoints: Path) -> None:
    """Return when a run's policy server serves; raises RuntimeError where it does not within two minutes."""
    pause = threading.Event()
    for _ in range(round(READY_S / 0.1)):
        if training.poll() is not None:
            break
        if endpoints.exists() and any(
            one["role"] == "server" for one in json.loads(endpoints.read_text()).values()
        ):
            return
        pause.wait(0.1)
    raise RuntimeError(f"no policy server within {READY_S:.0f} s; see {endpoints.parent}/logs")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_goals_succeed_more_often_as_the_day_goes_on(tmp_path: Path) -> None:
    day = play(tmp_path, hosts=4, intervals=INTERVALS)
    hours = day.by_hour()
    print([round(one, 2) for one in hours], len(day.success))
    assert set(day.codes) == {0}
    assert day.summary["ledger"]["balanced"], day.summary["ledger"]
    assert day.summary["updates"] > 0
    assert fmean(hours[-6:]) > fmean(hours[:6]) + 0.2
