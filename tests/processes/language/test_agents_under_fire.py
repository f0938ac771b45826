"""kill -9 of server, broker, learner and clients while agents with tools teach a run: its books balance.

Agents repeat themselves, edit their history and reward twice, late or never. Afterwards the run drains, and
`penstock audit` joins what the servers wrote down before each answer left with what was trained.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from launch.run.child_process import penstock
from tests.support.language.agents_run import agents_run, gateway
from tests.support.language.guessers import make_guesser
from tests.support.run.broker_process import eventually
from tests.support.run.training import Training, is_alive

CLIENT: Final = "client"
VICTIMS: Final = ("server", "broker", "learner", CLIENT)
GOES_ON: Final = 600
"""Tokens that are trained after the last kill."""
TOKENS: Final = 4
"""Of an answer, at most."""
PATIENCE_S: Final = 120.0
_FOREVER: Final = 100_000_000


class Crew:
    """Processes of clients, each of which converses on until it is killed; another one then takes its place.

    One knows OpenAI's API alone, the other speaks to the server itself.
    """

    def __init__(self, base_url: str, socket: Path) -> None:
        self._commands = (
            ("tests.support.language.agents", "unruly", base_url, str(_FOREVER)),
            ("tests.support.language.text_crowd", f"unix:{socket}"),
        )
        self._lives = 0
        self._processes = [self._begin(place) for place in range(len(self._commands))]

    def _begin(self, place: int) -> "subprocess.Popen[bytes]":
        self._lives += 1
        return subprocess.Popen(
            [sys.executable, "-m", *self._commands[place], str(self._lives)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill_one(self) -> None:
        """Kill -9, in the middle of its conversations; they take turns."""
        place = self._lives % len(self._processes)
        assert self._processes[place].poll() is None, "a client has ended by itself"
        self._processes[place].kill()
        self._processes[place].wait()
        self._processes[place] = self._begin(place)

    def end(self) -> None:
        """End the processes that ask."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def crew_of(base_url: str, socket: Path) -> Iterator[Crew]:
    """Clients of both kinds, until the block ends."""
    crew = Crew(base_url, socket)
    try:
        yield crew
    finally:
        crew.end()


class Turns:
    """Counts the answers that servers wrote down, from where it read last."""

    def __init__(self, journals: Path) -> None:
        self._journals, self._read, self._count = journals, dict[Path, int](), 0

    def so_far(self) -> int:
        """Answers of all lives of the server."""
        for path in self._journals.glob("*.sampled.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._count += whole.count(b'"sha256":""')
        return self._count


def is_past(turns: Turns, goal: int) -> bool:
    """Whether there were so many answers."""
    return turns.so_far() >= goal


def kill(training: Training, name: str) -> None:
    """Kill -9, and wait for the next life."""
    before = training.pids()[name]
    os.kill(before, signal.SIGKILL)
    eventually(
        lambda: (pid := training.pids().get(name, before)) != before and is_alive(pid),
        f"another {name}",
        PATIENCE_S,
    )


def audited(run_dir: Path) -> dict[str, Any]:
    """What `penstock audit` says of a run that has ended; nothing is wrong."""
    done = subprocess.run(
        penstock("audit", str(run_dir), "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("most", "kills"),
    [(160, 4), pytest.param(100_000, 60, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
    ids=["few", "many"],
)
def test_every_trained_token_was_sampled_under_kills(
    tmp_path: Path, short_folder: Path, most: int, kills: int
) -> None:
    """So many answers, with kills in turn among them; the audit finds no exception, and the run learned."""
    draw, hits = random.Random(7), Counter[str]()
    socket = short_folder / "text.sock"
    with (
        agents_run(tmp_path, socket, make_guesser(tmp_path / "base", steps=40), batch_steps=64) as training,
        gateway(socket, tmp_path) as base_url,
        crew_of(base_url, socket) as crew,
    ):
        turns, pace = Turns(training.run_dir / "journals"), most // (kills + 1)
        while hits.total() < kills or turns.so_far() < most:
            goal = turns.so_far() + draw.randint(pace // 2, pace + pace // 2)
            training.until(partial(is_past, turns, goal))
            if hits.total() < kills:
                victim = VICTIMS[hits.total() % len(VICTIMS)]
                kill(training, victim) if victim != CLIENT else crew.kill_one()
                hits[victim] += 1
        trained = training.steps()
        training.until(lambda: training.steps() >= trained + GOES_ON)
        crew.end()
        training.process.send_signal(signal.SIGTERM)
        code, _, err = training.end()
        assert code == 130, err
        report = audited(training.run_dir)
    print(json.dumps({"kills": hits, "sampled": report["sampled"], "fragments": report["fragments"]}))
    assert report["sampled"]["answers"] >= most
    assert report["sampled"]["trained"] >= GOES_ON // TOKENS
    assert min(hits[name] for name in VICTIMS) >= 1
