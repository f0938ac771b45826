"""A day of a chat in minutes: simulated people who talk and rate, and a model that learns from it as they do.

Real processes: a gateway over HTTP, a server of text, Redis, a learner.
"""

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.launch.run.supervisor import penstock
from penstock.runtime.health import read_endpoint
from penstock.workloads.chat.people import draw_prompt
from tests.support.chat.chat_people import TURNS, Plan
from tests.support.chat.liked_answers import LIKED
from tests.support.chat.opinions import make_people_base

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
    """A day. liked: the chance that somebody likes an answer, of each in order. summary: of the run."""

    liked: Sequence[float]
    summary: dict[str, Any]

    def chances(self, parts: int) -> list[float]:
        """Return the mean chance in so many parts of equal size."""
        return [float(part.mean()) for part in np.array_split(self.liked, parts)]


def play(folder: Path, plan: Plan, *settings: str) -> Day:
    """Play a day in a folder. settings: of the run, over SETTINGS. Raises RuntimeError where it fails."""
    with chatting(folder, plan.seed, *settings) as address:
        command = [
            sys.executable, "-m", "tests.support.chat.chat_people", address, "--conversations",
            str(plan.conversations), "--at-once", str(plan.at_once), "--seed", str(plan.seed),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads((folder / "state" / "run" / "summary.json").read_text())
    return Day(liked=[float(line) for line in done.stdout.splitlines()], summary=summary)


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
