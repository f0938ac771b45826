"""Feedback of many programs while what it passes through is killed: acknowledged means there, once."""

import itertools
import json
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import httpx2
import psutil

from tests.processes.gateway.test_gateway_process import new_token
from tests.processes.gateway.test_jobs import LONG, Client, trainings, until
from tests.support.gateway.job_templates import end_jobs, write_templates
from tests.support.run.harness import GatewayProcess
from tests.support.storage.postgresql_server import PostgresqlServer, find_programs

CLIENTS: Final = 32
ROUNDS: Final = 2
GIVE: Final = "/api/policies/feedback/my_agent"
LINES: Final = "/api/projects/alpha/agents/my_agent/feedback"
PAUSE_S: Final = 0.5
"""Of a client, between two ratings and before it sends one again."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found"),
]


class Place:
    """A gateway on a PostgreSQL, each of which may be killed and started again."""

    def __init__(self, folder: Path, server: PostgresqlServer) -> None:
        self._folder, self._server = folder, server
        database = server.new_database("gateway")
        self._options = ("--database", database, "--registry", database, "--templates", "templates")
        self.token = new_token(folder, "alpha", "--database", database)
        self.gateway = self._begun()

    def _begun(self) -> GatewayProcess:
        return GatewayProcess(self._folder, *self._options).__enter__()

    def kill_gateway(self) -> None:
        """It is gone in the middle of what it does, and comes back at another port."""
        self.gateway.process.send_signal(signal.SIGKILL)
        self.gateway.process.wait()
        self.gateway = self._begun()

    def kill_database(self) -> None:
        """It is gone for as long as it takes to start."""
        self._server.stop()
        self._server.start()

    def kill_learner(self, job: dict[str, Any]) -> None:
        """It is gone, until the run has started it again."""
        first = learner(self._folder, job)
        assert first is not None
        first.kill()
        until(lambda: learner(self._folder, job) not in {None, first})

    def client(self) -> Client:
        """An editor at the gateway as it is now."""
        return Client(self.gateway, self.token)


def learner(folder: Path, job: dict[str, Any]) -> psutil.Process | None:
    """The learner of a job that goes on, None while there is none."""
    for training in trainings(folder, job):
        for child in training.children(recursive=True):
            try:
                if "learner" in child.cmdline():
                    return child
            except psutil.Error:
                continue  # it has just ended
    return None


@contextmanager
def surroundings(folder: Path) -> Iterator[Place]:
    """A gateway and a database of its own, since they are killed; both are gone afterwards."""
    programs = find_programs()
    assert programs is not None
    short = Path(tempfile.mkdtemp(prefix="ps-"))
    server = PostgresqlServer(programs, short)
    write_templates(folder / "templates")
    try:
        server.start()
        made = Place(folder, server)
        yield made
        made.gateway.end()
    finally:
        end_jobs(folder)
        server.stop()
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """One of its own."""
    with surroundings(tmp_path) as made:
        yield made


def give(place: Place, number: int, over: threading.Event, acknowledged: dict[str, str]) -> None:
    """Store ratings until it is over, one after the other; notes the id of each that was acknowledged."""
    pause = threading.Event()
    headers = {"Authorization": f"Bearer {place.token}"}
    with httpx2.Client(headers=headers, timeout=30) as http:
        for count in itertools.count():
            key = f"client-{number}-{count}"
            body = {"prompt": f"of {number}", "response": key, "score": 0.5}
            while (reply := sent(http, f"{place.gateway.url}{GIVE}", body, key)) is None:
                pause.wait(PAUSE_S)
            acknowledged[key] = reply
            if over.wait(PAUSE_S):
                return


def sent(http: httpx2.Client, url: str, body: dict[str, Any], key: str) -> str | None:
    """The id of a rating that was acknowledged; None where it has to be sent again."""
    try:
        reply = http.post(url, json=body, headers={"Idempotency-Key": key})
    except httpx2.TransportError:
        return None
    assert reply.status_code in {200, 429, 503}, reply.text
    return str(reply.json()["id"]) if reply.status_code == 200 else None


def stored(place: Place) -> list[dict[str, Any]]:
    """All ratings of the agent."""
    found, after = list[dict[str, Any]](), 0
    client = place.client().http
    while lines := client.get(f"{LINES}?after={after}").text.splitlines():
        found += map(json.loads, lines)
        after = found[-1]["number"]
    return found


@pytest.mark.promise("feedback-gateway-acknowledged-once")
def test_acknowledged_feedback_is_there_once(place: Place, tmp_path: Path) -> None:
    job = place.client().submit("my_agent", steps=LONG)
    until(lambda: learner(tmp_path, job) is not None)
    over, acknowledged = threading.Event(), dict[str, str]()

    def go_on() -> None:
        """Wait until as many ratings more were stored as there are clients."""
        enough = len(acknowledged) + CLIENTS
        until(lambda: len(acknowledged) >= enough)

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(give, place, number, over, acknowledged) for number in range(CLIENTS)]
        try:
            for _ in range(ROUNDS):
                go_on()
                place.kill_gateway()
                go_on()
                place.kill_database()
                go_on()
                place.kill_learner(job)
        finally:
            over.set()
        for one in clients:
            one.result()
    found = stored(place)
    assert {one["request"]: one["id"] for one in found} == acknowledged
    assert Counter(one["request"] for one in found).most_common(1)[0][1] == 1
    assert place.client().job(job)["state"] == "running"
    place.client().cancel(job)
    assert place.client().ended(job)["state"] == "cancelled"
