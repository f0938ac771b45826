"""A run in which everything that a dashboard shows happens: clients, versions on trial, deaths, a pause."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock import PolicyClient
from penstock.client import UnknownVersion
from penstock.launch.run.supervisor import penstock
from tests.support.run.training import Training, wait_until_gone

SMALL: Final = (
    "CartPole-v1", "--actors=2", "--serve=127.0.0.1:0", "--total-steps=100000000",
    "--set=learner.stop_at_target=false", "--set=learner.checkpoint_interval_s=2",
    "--set=learner.keep_every_updates=10", "--set=algorithm.batch_steps=1024",
    "--set=algorithm.learning_rate_schedule='linear'",
    "--set=evaluation.interval_steps=3000", "--set=evaluation.episodes=8",
)  # fmt: skip
UNROLL: Final = 64
ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    training: Training

    @property
    def targets(self) -> Path:
        return self.training.run_dir / "targets.json"

    def endpoint(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.training.run_dir / "endpoints.json").read_text())[name])

    def versions(self) -> list[int]:
        done = self._penstock("policy", "list", str(self.training.run_dir), "--json", check=False)
        if done.returncode != 0:
            return []  # nothing is registered yet
        kept = ("candidate", "active", "canary")
        return sorted(one["version"] for one in json.loads(done.stdout)["versions"] if one["status"] in kept)

    def try_versions(self) -> None:
        """One becomes active, another its canary and the shadow.

        Half of the clients stay on the learner's newest.
        """
        run = str(self.training.run_dir)
        active, canary = self.versions()[-2:]
        self._penstock("policy", "promote", run, str(active), "--reason=watched")
        self._penstock(
            "policy", "promote", run, str(canary), "--reason=watched", "--to=canary", "--canary-share=0.3"
        )
        self._penstock(
            "policy", "traffic", run, "--latest-share=0.5", f"--shadow={active}", "--reason=watched"
        )

    def err(self) -> None:
        """A client asks for a version that never was, and rewards a step that was learned from already."""
        seen = np.zeros(4, np.float32)
        with PolicyClient(str(self.endpoint("server")["address"]), deadline_s=30.0) as client:
            with contextlib.suppress(UnknownVersion):
                client.act(seen, version=2**40)
            # Which arm a client gets depends on its name: one of these is on the newest weights.
            for name in map(str, range(64)):
                episode = client.start_episode(name)
                if episode.learned:
                    episode.act(seen)
                    for _ in range(3 * UNROLL):
                        episode.act(seen, reward=1.0)
                    episode.reward(1.0, step=0)
                    episode.abandon()
                    return
                episode.abandon()

    def kill(self, name: str) -> None:
        """`kill -9`: the launcher starts it again."""
        pid = self.endpoint(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        self.training.until(lambda: self.endpoint(name)["pid"] != pid)

    def _penstock(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(penstock(*words), capture_output=True, text=True, timeout=120, check=check)


@contextmanager
def running(run_dir: Path, *more: str) -> Iterator[WatchedRun]:
    """A run with eight clients that play and learn; nothing of it is left afterwards."""
    training = Training(run_dir, *SMALL, *more)
    players = None
    try:
        run = WatchedRun(training=training)
        training.until(lambda: "server" in _names(run.targets))
        players = subprocess.Popen(
            [
                sys.executable, "-m", "tests.learning.cartpole_clients",
                run.endpoint("server")["address"], "8", "0",
            ],
            cwd=ROOT, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        yield run
    finally:
        if players is not None:
            players.kill()
            players.wait()
        training.process.send_signal(signal.SIGTERM)
        if not training.ends_within(30):
            training.process.kill()
            training.process.communicate()
        wait_until_gone(training)


def _names(targets: Path) -> set[str]:
    try:
        return {one["labels"]["instance"] for one in json.loads(targets.read_text())}
    except FileNotFoundError:
        return set()
