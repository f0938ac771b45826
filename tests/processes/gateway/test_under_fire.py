"""Feedback and experience of many programs while each process that they pass through is killed in turn.

What was acknowledged of feedback is there once. A step of experience is learned from once at most; an
episode that was stored is, unless the policy server or the gateway that held it was killed before the next
update.
"""

import base64
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import numpy as np
import pytest

from penstock.learner.feed.recorded_feed import Recording
from tests.support.gateway.gateway_stand import new_token, until
from tests.support.prompts.prompts_gateway import SMALL, PromptsGateway
from tests.support.run.harness import GatewayProcess
from tests.support.storage.postgresql_server import PostgresqlServer, find_programs, own_server

GIVE: Final = "/api/policies/feedback/my_agent"
LINES: Final = "/api/projects/alpha/agents/my_agent/feedback"
STEPS: Final = 2
"""Of an episode; the last one ends it."""
MOST_EPISODES: Final = 4096
PAUSE_S: Final = 0.1
REFUSED_FOR_NOW: Final = frozenset({429, 502, 503, 504})
PARTS: Final = ("gateway", "server", "broker", "learner", "database", "people")
pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found"),
]


class Place:
    """A gateway for people on a PostgreSQL, each of which may be killed and started again."""

    def __init__(self, folder: Path, server: PostgresqlServer) -> None:
        self._folder, self._server = folder, server
        database = server.new_database("gateway")
        self._options = ("--database", database, "--registry", database)
        self.token = new_token(folder, "alpha", "--database", database)
        self.gateway = self._begun()

    def _begun(self) -> GatewayProcess:
        return GatewayProcess(self._folder, *self._options).__enter__()

    def kill_gateway(self) -> None:
        self.gateway.process.send_signal(signal.SIGKILL)
        self.gateway.process.wait()
        self.gateway = self._begun()

    def kill_database(self) -> None:
        self._server.stop()
        self._server.start()


def sent(http: httpx2.Client, url: str, body: dict[str, Any], key: str) -> str | None:
    try:
        reply = http.post(url, json=body, headers={"Idempotency-Key": key})
    except httpx2.TransportError:
        return None
    assert reply.status_code in {200, 429, 503}, reply.text
    return str(reply.json()["id"]) if reply.status_code == 200 else None


def stored(place: Place) -> list[dict[str, Any]]:
    found, after = list[dict[str, Any]](), 0
    url, headers = f"{place.gateway.url}{LINES}", {"Authorization": f"Bearer {place.token}"}
    while lines := httpx2.get(f"{url}?after={after}", headers=headers).text.splitlines():
        found += map(json.loads, lines)
        after = found[-1]["number"]
    return found


@dataclass
class Books:
    """What clients know. A step is known by its reward, which no other one has.

    ratings: id by key. episodes: rewards of those that were stored, and in which life of what held them.
    unsure: rewards of steps of which a client does not know whether they were stored. settled: rewards of
    steps that an update which was made came after.
    """

    ratings: dict[str, str] = field(default_factory=dict)
    episodes: dict[tuple[float, ...], int] = field(default_factory=dict)
    unsure: set[float] = field(default_factory=set)
    settled: set[float] = field(default_factory=set)


class Fire:
    """A gateway for people, and one of prompts with its run; each process of them may be killed."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self.books = place, Books()
        self.life = 0
        """Grows before and after what holds episodes is killed: one that saw it grow may be lost."""
        self._folder = folder / "prompts"
        self._folder.mkdir()
        record = f"--train=learner.record={folder / 'recording'}"
        self.prompts = PromptsGateway(self._folder, *SMALL, record)

    def begin(self) -> None:
        self.prompts.await_healthy()

    def kill(self, part: str) -> None:
        match part:
            case "people":
                self.place.kill_gateway()
            case "database":
                self.place.kill_database()
            case "gateway":
                self._lose(self.prompts.kill)
                self.prompts = PromptsGateway(self._folder)
                self.prompts.await_healthy()
            case "server":
                self._lose(lambda: self._kill_process(part))
            case _:
                self._kill_process(part)

    def settle(self) -> None:
        """Have an update made, and note what must be in it or in one before it."""
        before = dict(self.books.episodes)
        until(self._is_updated)
        held = [rewards for rewards, life in before.items() if life == self.life]
        self.books.settled.update(*held)

    def _is_updated(self) -> bool:
        try:
            reply = httpx2.post(f"{self.prompts.url}/update", json={}, timeout=150)
        except httpx2.TransportError:
            return False
        assert reply.status_code in {200, *REFUSED_FOR_NOW}, reply.text
        return reply.status_code == 200 and "update_count" in reply.json()

    def _lose(self, kill: Callable[[], None]) -> None:
        self.life += 1
        kill()
        self.life += 1

    def _kill_process(self, role: str) -> None:
        before = self.prompts.process_of(role)
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: self._is_back(role, before.pid))
        self.prompts.await_healthy()

    def _is_back(self, role: str, before: int) -> bool:
        try:
            return self.prompts.process_of(role).pid != before
        except StopIteration:
            return False


@dataclass
class Program:
    """One of the clients: it rates, and plays an episode, until it is over."""

    fire: Fire
    number: int
    over: threading.Event
    http: httpx2.Client = field(default_factory=lambda: httpx2.Client(timeout=30))

    def run(self) -> None:
        with self.http:
            for count in itertools.count():
                assert count < MOST_EPISODES
                self._rate(count)
                self._play(count)
                if self.over.wait(PAUSE_S):
                    return

    def _rate(self, count: int) -> None:
        place, key = self.fire.place, f"client-{self.number}-{count}"
        body = {"prompt": f"of {self.number}", "response": key, "score": 0.5}
        self.http.headers["Authorization"] = f"Bearer {place.token}"
        while (reply := sent(self.http, f"{place.gateway.url}{GIVE}", body, key)) is None:
            self.over.wait(PAUSE_S)
        self.fire.books.ratings[key] = reply

    def _play(self, count: int) -> None:
        books, life = self.fire.books, self.fire.life
        begin = STEPS * (MOST_EPISODES * self.number + count)
        rewards = tuple((begin + step + 1) / 2**20 for step in range(STEPS))
        states = [embedding(begin + self.number + count + step) for step in range(STEPS + 1)]
        known = [self._step(states, rewards, step) for step in range(STEPS)]
        if all(known) and life == self.fire.life:
            books.episodes[rewards] = life
        else:
            books.unsure.update(rewards)

    def _step(self, states: list[str], rewards: tuple[float, ...], step: int) -> bool:
        chosen = self._posted("/select_action", {"embedding": states[step]})
        assert chosen is not None
        body = {name: chosen[name] for name in ("action", "log_prob", "value", "ticket")}
        body |= {"state": states[step], "next_state": states[step + 1], "reward": rewards[step]}
        return self._posted("/store_experience", {**body, "done": step == STEPS - 1}) is not None

    def _posted(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        while True:
            try:
                reply = self.http.post(f"{self.fire.prompts.url}{route}", json=body)
            except (httpx2.TransportError, AssertionError):  # it is not there, or not yet
                self.over.wait(PAUSE_S)
                continue
            if reply.status_code in REFUSED_FOR_NOW:
                self.over.wait(PAUSE_S)
                continue
            if reply.status_code == 409:
                assert reply.json()["field"] == "ticket", reply.text
                return None
            assert reply.status_code == 200, reply.text
            return dict(reply.json())


def embedding(number: int) -> str:
    drawn = np.random.default_rng(number).uniform(-1, 1, 1536).astype("<f4")
    return base64.b64encode(drawn.tobytes()).decode()


def learned(folder: Path) -> Counter[float]:
    recording, found = Recording(folder), Counter[float]()
    for _, arrays in recording.load(recording.fragments):
        found.update(arrays["reward"][arrays["valid"]].tolist())
    return found


def failed(programs: list[Future[None]]) -> bool:
    for one in programs:
        if one.done():
            one.result()
    return False


@pytest.fixture
def fire(tmp_path: Path) -> Iterator[Fire]:
    with own_server() as server:
        place = Place(tmp_path, server)
        made = Fire(place, tmp_path)
        try:
            made.begin()
            yield made
        finally:
            if made.prompts.process.poll() is None:
                made.prompts.kill()
            made.prompts.end_run()
            place.gateway.end()


@pytest.mark.promise("feedback-gateway-acknowledged-once")
@pytest.mark.parametrize(
    ("clients", "rounds"), [(8, 1), pytest.param(32, 3, marks=pytest.mark.slow)], ids=["small", "full"]
)
def test_acknowledged_feedback_and_experience_are_there_once(
    fire: Fire, tmp_path: Path, clients: int, rounds: int
) -> None:
    over, books = threading.Event(), fire.books

    def go_on() -> None:
        ratings, episodes = len(books.ratings) + clients, len(books.episodes) + clients
        until(
            lambda: failed(programs) or min(len(books.ratings) - ratings, len(books.episodes) - episodes) >= 0
        )

    with ThreadPoolExecutor(clients) as threads:
        programs = [threads.submit(Program(fire, number, over).run) for number in range(clients)]
        try:
            go_on()
            for part in PARTS * rounds:
                fire.kill(part)
                go_on()
                fire.settle()
        finally:
            over.set()
        for one in programs:
            one.result()
    assert fire.prompts.end() == 0, fire.prompts.said()
    assert fire.prompts.summary()["ledger"]["balanced"]
    found = stored(fire.place)
    assert Counter(one["request"] for one in found) == Counter(books.ratings.keys())
    assert {one["request"]: one["id"] for one in found} == books.ratings
    steps = learned(tmp_path / "recording")
    assert {reward for reward, times in steps.items() if times > 1} == set()
    assert len(books.settled) >= clients * STEPS * len(PARTS) * rounds / 2
    assert books.settled - steps.keys() == set()
    known = books.unsure.union(*books.episodes)
    assert steps.keys() - known == set()
