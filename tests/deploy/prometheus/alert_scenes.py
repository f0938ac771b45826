"""Scenes in which alerts fire and clear, watched by a real Prometheus with the shipped rules.

Every duration in the rules is divided by FASTER and by nothing else: ten minutes become ten seconds.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from penstock.runtime.health import Endpoint
from penstock.v1.experience_pb2 import CloseSessionRequest
from tests.deploy.prometheus.prometheus_server import WatchingPrometheus, watching
from tests.support.run.harness import Training, wait_until_gone
from tests.support.run.simulated_actor import DEADLINE_S, SimulatedActor

FASTER: Final = 60
PATIENCE_S: Final = 240.0
ENDLESS: Final = ("--total-steps=1000000000", "--set=learner.stop_at_target=false")


class Scene:
    def __init__(self, prometheus: WatchingPrometheus) -> None:
        self.prometheus = prometheus

    def fires(self, *alerts: str) -> None:
        self.prometheus.until(lambda: set(alerts) <= self.prometheus.firing(), f"{alerts}", PATIENCE_S)

    def clears(self, *alerts: str) -> None:
        self.prometheus.until(lambda: not set(alerts) & self.prometheus.firing(), f"no {alerts}", PATIENCE_S)

    def follows(self, alert: str, cause: AbstractContextManager[Any]) -> None:
        """The alert fires during the cause, and neither before nor after it."""
        self.clears(alert)
        with cause:
            self.fires(alert)
        self.clears(alert)

    def until_seen(self, query: str) -> None:
        self.prometheus.until(lambda: bool(self.prometheus.query(query)), query, PATIENCE_S)


@contextmanager
def training(run_dir: Path, *words: str, steps: int = 20_000) -> Iterator[Training]:
    running = Training(run_dir, *words)
    try:
        running.until_steps(steps)
        yield running
    finally:
        running.process.terminate()
        running.process.communicate()
        wait_until_gone(running)


@contextmanager
def seen(folder: Path, run: Training) -> Iterator[Scene]:
    with watching(folder, run.run_dir / "targets.json", faster=FASTER) as prometheus:
        scene = Scene(prometheus)
        scene.until_seen("penstock:actors_wanted")
        yield scene


@contextmanager
def watched(folder: Path, **services: Endpoint) -> Iterator[Scene]:
    """Prometheus over single services, by name."""
    file = _targets(folder / "targets.json", services)
    with watching(folder / "prometheus", file, faster=FASTER) as prometheus:
        prometheus.until(lambda: len(prometheus.query("up == 1")) == len(services), "the services")
        yield Scene(prometheus)


def _targets(file: Path, services: dict[str, Endpoint]) -> Path:
    content = [
        {"targets": [f"127.0.0.1:{one.metrics_port}"], "labels": {"run": "a", "instance": name}}
        for name, one in services.items()
    ]
    file.write_text(json.dumps(content))
    return file


@contextmanager
def going_on(act: Callable[[], Any]) -> Iterator[None]:
    """Somebody does this again and again."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(0.05):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def stopped(run: Training, *names: str) -> Iterator[None]:
    pids = [run.pids()[name] for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # its launcher has killed it: it did not answer for too long
                os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(run: Training, name: str, *, still_s: float, going_s: float) -> Iterator[None]:
    """A service stands still most of the time, also once its launcher has started it again."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            # It has no pid between its end and its next start; a launcher ends what is silent for long.
            with suppress(ProcessLookupError, KeyError):
                os.kill(pid := run.pids()[name], signal.SIGSTOP)
                over.wait(still_s)
                os.kill(pid, signal.SIGCONT)
            over.wait(going_s)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def stranger(run: Training) -> Iterator[SimulatedActor]:
    """One more actor of the run, with a session, that sends what a test says."""
    address = json.loads((run.run_dir / "endpoints.json").read_text())["broker"]["address"]
    with SimulatedActor(address, "stranger") as actor:
        actor.open()
        yield actor
        actor.experience.CloseSession(CloseSessionRequest(session=actor.session), timeout=DEADLINE_S)


@contextmanager
def launcher_stopped(run: Training) -> Iterator[None]:
    """What dies meanwhile is not started again."""
    run.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        run.process.send_signal(signal.SIGCONT)
