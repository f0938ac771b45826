"""A day of a chat in minutes: simulated people who talk and rate, and a model that learns from it as they do.

`python -m benchmarks.chat_day OUTPUT.png --conversations 10000` plays it with real processes (a gateway over
HTTP, a server of text, Redis, a learner) and draws satisfaction over the day. With `--changes` people have
another taste from noon on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from benchmarks.chat_people import TURNS, Plan
from benchmarks.liked_answers import LIKED
from benchmarks.people_base import make_people_base
from launch.run.child_process import penstock
from penstock.runtime.health import read_endpoint
from workloads.chat.people.chat_texts import draw_prompt

HOURS: Final = 24
PROMPTS: Final = 400
"""Questions, of which the evaluation holds some out."""
READY_S: Final = 300.0
SETTINGS: Final = (
    "actor.unroll_length=63",
    "algorithm.batch_steps=1024",
    "algorithm.kl_coefficient=0.1",
    "algorithm.learning_rate=2e-3",
    "algorithm.critic_learning_rate=2e-3",
    "algorithm.turn_discount=0.0",
    "serving.reward_window_s=0.0",
    "learner.total_steps=100_000_000",
    "evaluation.episodes=2",
)
"""What people say of a turn is of that turn; nobody thinks for a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """What became of a day. said: a row of each answer (`chat_people`), in order. summary: of the run."""

    said: Sequence[dict[str, Any]]
    summary: dict[str, Any]

    def shares(self, parts: int = HOURS) -> list[float]:
        """Return the share of thumbs up in so many parts of equal size."""
        return [float(np.mean([one["up"] for one in part])) for part in self._parts(parts)]

    def chances(self, parts: int = HOURS) -> list[float]:
        """Return the mean chance that somebody likes an answer, in so many parts of equal size."""
        return [float(np.mean([one["chance"] for one in part])) for part in self._parts(parts)]

    def _parts(self, parts: int) -> list[Sequence[dict[str, Any]]]:
        size = len(self.said) / parts
        return [self.said[round(part * size) : round((part + 1) * size)] for part in range(parts)]


def play(folder: Path, plan: Plan, *settings: str) -> Day:
    """Play a day in a folder. settings: of the run, over SETTINGS. Raises RuntimeError where it fails."""
    with chatting(folder, plan.seed, *settings) as address:
        command = [
            sys.executable, "-m", "benchmarks.chat_people", address, "--conversations",
            str(plan.conversations), "--at-once", str(plan.at_once), "--seed", str(plan.seed),
            "--taste-after", str(plan.taste_after),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads((folder / "state" / "run" / "summary.json").read_text())
    return Day(said=[json.loads(line) for line in done.stdout.splitlines()], summary=summary)


def draw(day: Day, path: Path) -> None:
    """Draw the share of thumbs up over the hours of the day."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, HOURS + 1), day.shares(), marker="o", markersize=3, color="#0072b2", label="thumbs up")
    axes.plot(range(1, HOURS + 1), day.chances(), color="#d55e00", linewidth=1, label="chance of one")
    axes.set(xlabel="hour of the day", ylabel="satisfaction", ylim=(0, 1))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


@contextmanager
def chatting(folder: Path, seed: int, *settings: str) -> Iterator[str]:
    """Serve a chat that learns, from nothing; its address. Raises RuntimeError where it does not come up."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, endpoint, state = folder / "asked.jsonl", folder / "gateway.json", folder / "state"
    base, rng = (
        make_people_base(folder / "base", steps=400, turns=TURNS, seed=seed),
        np.random.default_rng(seed),
    )
    asked.write_text("".join(json.dumps({"prompt": draw_prompt(rng)}) + "\n" for _ in range(PROMPTS)))
    kwargs = (
        f'environment.kwargs={{model = "{base}", prompts = "{asked}", reward = "{LIKED}", '
        "response_tokens = 12, held_out = 0.1}"
    )
    policy = f'policy.kwargs={{model = "{base}", rank = 8, alpha = 16.0}}'
    said = [f"--train={one}" for one in (kwargs, policy, f"seed={seed}", *SETTINGS, *settings)]
    words = ("--listen", "127.0.0.1:0", "--endpoints", str(endpoint), "--state", str(state))
    with (folder / "gateway.log").open("wb") as log:
        gateway = subprocess.Popen(
            penstock("gateway", "chat", *words, *said), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield _ready(gateway, endpoint, folder)
    finally:
        gateway.terminate()
        gateway.wait()


def _ready(gateway: "subprocess.Popen[bytes]", endpoint: Path, folder: Path) -> str:
    pause = threading.Event()
    for _ in range(round(READY_S / 0.2)):
        found = read_endpoint(endpoint)
        if found is not None and _is_healthy(found.address):
            return found.address
        if gateway.poll() is not None:
            break
        pause.wait(0.2)
    raise RuntimeError(f"no chat came up; see {folder}/gateway.log and {folder}/state/train.log")


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=30) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def main() -> None:
    """Play a day and draw it."""
    parser = argparse.ArgumentParser(description="A day of a chat in minutes.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--changes", action="store_true", help="people have another taste from noon on")
    said = parser.parse_args()
    plan = Plan(
        conversations=said.conversations,
        at_once=said.at_once,
        seed=said.seed,
        taste_after=said.conversations // 2 if said.changes else 0,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        day = play(Path(place), plan)
    draw(day, said.output)
    shares = [round(one, 2) for one in day.shares()]
    sys.stdout.write(f"{shares} of {len(day.said)} answers; {day.summary.get('updates')} updates\n")


if __name__ == "__main__":
    main()
