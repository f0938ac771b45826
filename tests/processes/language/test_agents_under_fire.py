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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.support.language.agents_run import agents_run, gateway
from tests.support.language.tiny_models import make_guesser
from tests.support.run.harness import Training, eventually, is_alive

CLIENT: Final = "client"
VICTIMS: Final = ("server", "broker", "learner", CLIENT)
TOKENS: Final = 4
"""Of an answer, at most."""
PATIENCE_S: Final = 120.0
_FOREVER: Final = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Dose:
    """turns: answers of the server at least. kills: of all victims together, in turn.

    goes_on: tokens that are trained after the last kill. taught: steps of the model that guesses. agents,
    crowd: conversations at once by OpenAI's API, and by the text client. thinks_s: of an agent, in seconds.
    """

    turns: int
    kills: int
    goes_on: int
    taught: int
    agents: int
    crowd: int
    thinks_s: float


FEW: Final = Dose(turns=120, kills=4, goes_on=128, taught=20, agents=2, crowd=4, thinks_s=0.5)
MANY: Final = Dose(turns=100_000, kills=60, goes_on=600, taught=40, agents=8, crowd=32, thinks_s=0.0)


class Crew:
    """Processes of clients, each of which converses on until it is killed; another one then takes its place.

    One knows OpenAI's API alone, the other speaks to the server itself.
    """

    def __init__(self, base_url: str, socket: Path, dose: Dose) -> None:
        self._commands = (
            ("tests.support.language.agents", "unruly", base_url, str(_FOREVER)),
            ("tests.support.language.text_crowd", f"unix:{socket}"),
        )
        self._at_once, self._thinks_s = (dose.agents, dose.crowd), dose.thinks_s
        self._lives = 0
        self._processes = [self._begin(place) for place in range(len(self._commands))]

    def _begin(self, place: int) -> "subprocess.Popen[bytes]":
        self._lives += 1
        return subprocess.Popen(
            [
                *(sys.executable, "-m", *self._commands[place]),
                *map(str, (self._lives, self._at_once[place], self._thinks_s)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill_one(self) -> None:
        place = self._lives % len(self._processes)
        assert self._processes[place].poll() is None, "a client has ended by itself"
        self._processes[place].kill()
        self._processes[place].wait()
        self._processes[place] = self._begin(place)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def crew_of(base_url: str, socket: Path, dose: Dose) -> Iterator[Crew]:
    crew = Crew(base_url, socket, dose)
    try:
        yield crew
    finally:
        crew.end()


class Turns:
    def __init__(self, journals: Path) -> None:
        self._journals, self._read, self._count = journals, dict[Path, int](), 0

    def so_far(self) -> int:
        for path in self._journals.glob("*.sampled.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._count += whole.count(b'"sha256":""')
        return self._count


def is_past(turns: Turns, goal: int) -> bool:
    return turns.so_far() >= goal


def kill(training: Training, name: str) -> None:
    before = training.pids()[name]
    os.kill(before, signal.SIGKILL)
    eventually(
        lambda: (pid := training.pids().get(name, before)) != before and is_alive(pid),
        f"another {name}",
        PATIENCE_S,
    )


@pytest.mark.promise("whatever-killed-agents-tools")
@pytest.mark.parametrize(
    "dose",
    [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
    ids=["few", "many"],
)
def test_every_trained_token_was_sampled_even_when_processes_are_killed(
    tmp_path: Path, short_folder: Path, dose: Dose
) -> None:
    draw, hits = random.Random(7), Counter[str]()
    socket, base = short_folder / "text.sock", make_guesser(tmp_path / "base", steps=dose.taught)
    with (
        agents_run(tmp_path, socket, base, batch_steps=64) as training,
        gateway(socket, tmp_path) as base_url,
        crew_of(base_url, socket, dose) as crew,
    ):
        turns, pace = Turns(training.run_dir / "journals"), dose.turns // (dose.kills + 1)
        while hits.total() < dose.kills or turns.so_far() < dose.turns:
            goal = turns.so_far() + draw.randint(pace // 2, pace + pace // 2)
            training.until(partial(is_past, turns, goal))
            if hits.total() < dose.kills:
                victim = VICTIMS[hits.total() % len(VICTIMS)]
                kill(training, victim) if victim != CLIENT else crew.kill_one()
                hits[victim] += 1
        trained = training.steps()
        training.until(lambda: training.steps() >= trained + dose.goes_on)
        crew.end()
        training.process.send_signal(signal.SIGTERM)
        code, _, err = training.end()
        assert code == 130, err
        report = training.audited()
    print(json.dumps({"kills": hits, "sampled": report["sampled"], "fragments": report["fragments"]}))
    assert report["sampled"]["answers"] >= dose.turns
    assert report["sampled"]["trained"] >= dose.goes_on // TOKENS
    assert min(hits[name] for name in VICTIMS) >= 1
