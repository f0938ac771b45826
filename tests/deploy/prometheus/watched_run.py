"""A run in which everything that a dashboard shows happens: clients, versions on trial, deaths, a pause.

python -m tests.deploy.prometheus.watched_run [--seconds N]: the pictures of docs/dashboards.md.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from deploy.grafana import queries
from deploy.grafana.draw import View, save
from penstock import PolicyClient
from penstock.client import UnknownVersion
from penstock.launch.run.supervisor import penstock
from tests.deploy.manifests import ROOT
from tests.deploy.prometheus.prometheus_server import watching
from tests.support.run.harness import Training, wait_until_gone

SMALL: Final = (
    "CartPole-v1", "--actors=2", "--serve=127.0.0.1:0", "--total-steps=100000000",
    "--set=learner.stop_at_target=false", "--set=learner.checkpoint_interval_s=2",
    "--set=learner.keep_every_updates=10", "--set=algorithm.batch_steps=1024",
    "--set=algorithm.learning_rate_schedule='linear'",
    "--set=evaluation.interval_steps=3000", "--set=evaluation.episodes=8",
)  # fmt: skip
UNROLL: Final = 64


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


Key = tuple[str, str, str]

NOTHING_WRONG: Final[dict[Key, str]] = {
    ("flow", "Staged", "{{run}}"): "for a millisecond, which a look rarely meets",
    ("flow", "Repeated", "acknowledged again {{run}}"): "only for a reply lost after its append",
    ("flow", "Repeated", "given up: {{reason}} {{run}}"): "no session ends with something unacknowledged",
    ("flow", "Dropped and lost", "{{reason}} {{run}}"): "nothing is stale or damaged here",
    ("flow", "Dropped and lost", "lost with Redis {{run}}"): "Redis is not killed here",
    ("serving", "Shed", "{{run}}"): "eight clients are no load",
    ("serving", "Fallbacks", "{{run}}"): "every version can answer",
    ("serving", "Fallbacks", "{{fallback}} {{run}}"): "as above",
    ("serving", "Canaries withdrawn", "{{run}}"): "the canary is as good as the active version",
    ("serving", "Canary not judged", "{{reason}} {{run}}"): "a canary that is there is judged",
    ("serving", "Canary not judged", "undecided {{run}}"): "eight clients are fewer than the horizon",
    ("serving", "Cost of the shadow", "left out /s {{run}}"): "eight clients leave it time",
    ("training", "Updates", "skipped: {{reason}} {{run}}"): "every update is finite",
    ("fleet", "Alerts", "firing"): "none should",
    (
        "fleet",
        "Sessions and retries",
        "sessions {{run}}",
    ): "the first of a process is there before it is looked at",
    ("fleet", "What is wrong with Redis", "log closed {{run}}"): "Redis is not restarted here",
    ("fleet", "What is wrong with Redis", "cannot write {{run}}"): "its disk is not full",
    ("fleet", "What is wrong with Redis", "cannot rewrite {{run}}"): "its disk is not full",
}
OF_TEXT: Final[dict[Key, str]] = dict.fromkeys(
    (
        ("serving", f"{title} by arm", "{{arm}} {{run}}")
        for title in ("Thoughts", "Length of thoughts", "Time to think")
    ),
    "a policy of numbers does not think; see tests/learning/test_thoughts.py",
)


def nowhere(keys: AbstractSet[Key]) -> AbstractSet[Key]:
    """Those for which no dashboard has a query: a reason outlives no panel."""
    return keys - {
        (panel.dashboard, panel.title, query.legend)
        for file in queries.files()
        for panel in queries.panels(file)
        for query in panel.queries
    }


OUT: Final = ROOT / "docs" / "images"


def main() -> None:
    """A run with clients; versions on trial after a while; an actor and the broker killed later."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0)
    seconds = float(parser.parse_args().seconds)
    pause = threading.Event()
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as name:
        folder = Path(name)
        with running(folder / "run") as run, watching(folder / "prometheus", run.targets) as prometheus:
            prometheus.until(lambda: bool(prometheus.query("penstock_updates_total > 0")), "an update")
            began_s = time.time()
            pause.wait(seconds * 0.3)
            prometheus.until(lambda: len(run.versions()) > 1, "two versions")
            run.try_versions()
            run.err()
            pause.wait(seconds * 0.3)
            run.kill("actor-0")
            pause.wait(seconds * 0.2)
            run.kill("broker")
            pause.wait(seconds * 0.2)
            view = View(prometheus=prometheus, began_s=began_s, ended_s=time.time(), scrape_s=1.0)
            for path in save(view, OUT):
                print(path)


if __name__ == "__main__":
    main()
