"""Each process is killed while two people chat: ratings count once, answers are a version's or the base's."""

import itertools
import json
import os
import secrets
import signal
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from launch.inspection.processes import read_endpoints
from penstock.registry.registry import Registry
from tests.support.chat.chat_gateway import ChatGateway
from tests.support.run.broker_process import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PARTS = ("server", "learner", "broker", "redis", "launcher", "gateway")
NOT_NOW = frozenset({429, 502, 503, 504})
PAUSE_S = 0.2
PATIENCE_S = 300.0


@dataclass
class Place:
    """The gateway of now, and its run."""

    folder: Path
    gateway: ChatGateway

    def kill(self, part: str) -> None:
        """Kill a process, and return when people are answered again."""
        if part == "gateway":
            self.gateway.kill()
            self._begin()
            return
        before = self.pid_of(part)
        os.kill(before, signal.SIGKILL)
        if part == "launcher":  # the gateway ends with its run, and the next one resumes that
            self.gateway.process.wait(PATIENCE_S)
            self._begin()
            return
        eventually(lambda: self.pid_of(part) not in {0, before}, f"another {part}", PATIENCE_S)
        self.gateway.await_healthy()

    def pid_of(self, part: str) -> int:
        """Of a process of the run; of Redis that of its server; 0 while there is none."""
        found = read_endpoints(self.gateway.state / "run").get(part)
        return 0 if found is None else found.server_pid or found.pid

    def _begin(self) -> None:
        self.gateway.session.close()
        self.gateway = ChatGateway(self.folder)
        self.gateway.await_healthy()


@dataclass
class Person:
    """Asks twice, rates both answers, begins anew, until it is over.

    kept: ratings that were acknowledged, by name. unsure: those of which no answer came.
    """

    place: Place
    over: threading.Event
    me: str = field(default_factory=lambda: secrets.token_hex(16))
    kept: dict[str, bool] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Its body."""
        for count in itertools.count():
            if self.over.wait(PAUSE_S):
                return
            status, begun = self._posted("begin")
            if status == 200:
                self._talk(count, begun["conversation"])

    def _talk(self, count: int, conversation: str) -> None:
        for turn in range(2):
            status, told = self._posted("say", conversation=conversation, text="how are you")
            if status != 200 or told.get("kind") != "answer":
                return  # the conversation, or its server, is gone
            self.answers.append(told)
            up = (count + turn) % 2 == 0
            self._rate(f"{self.me}-{count}-{turn}", conversation=conversation, turn=told["turn"], up=up)

    def _rate(self, name: str, **thumb: Any) -> None:
        """Say it until somebody answers; a conversation that is forgotten takes no rating."""
        while not self.over.wait(PAUSE_S):
            status, said = self._posted("thumb", id=name, **thumb)
            if status == 200:
                self.kept[name] = thumb["up"]
                self.unsure.discard(name)
                return
            if status == 0:
                self.unsure.add(name)
            elif status == 404:
                return
            else:
                assert status in NOT_NOW, said

    def _posted(self, what: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """The status, and what was answered; of what is said the last event. Status 0: nothing came."""
        url = f"{self.place.gateway.url}/api/chat/{what}"
        try:
            reply = requests.post(url, json={"me": self.me, **body}, timeout=60)
        except (requests.RequestException, AssertionError):  # it is not there, or not yet
            return 0, {}
        if reply.status_code == 200 and what == "say":
            kind, data = reply.text.split("\n\n")[-2].split("\n")
            return 200, {**json.loads(data.removeprefix("data: ")), "kind": kind.removeprefix("event: ")}
        return reply.status_code, reply.json()


def test_no_rating_is_lost_or_doubled_and_no_answer_is_of_anything_else(tmp_path: Path) -> None:
    """Server, learner, broker, Redis, launcher and gateway, one after the other; the books balance."""
    first = ChatGateway(tmp_path, "--train=algorithm.batch_steps=64")
    first.await_healthy()
    place, over = Place(tmp_path, first), threading.Event()
    people = [Person(place, over) for _ in range(2)]
    threads = [threading.Thread(target=one.run, daemon=True) for one in people]
    for thread in threads:
        thread.start()
    try:
        for part in PARTS:
            wait_for_ratings(people)
            place.kill(part)
        wait_for_ratings(people)
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    with Registry.read(f"sqlite:///{place.gateway.state}/run/registry.sqlite") as registry:
        stored = [one.rating for one in registry.ratings("default", 0, 1000)]
    names = Counter(str(one.request_key).removeprefix("chat-") for one in stored)
    assert set(names.values()) == {1}
    acknowledged = {name: up for one in people for name, up in one.kept.items()}
    assert acknowledged.keys() <= names.keys()
    assert names.keys() - acknowledged.keys() <= {name for one in people for name in one.unsure}
    up = {str(one.request_key).removeprefix("chat-"): one.score == 1.0 for one in stored}
    assert all(up[name] is liked for name, liked in acknowledged.items())
    for answer in (answer for one in people for answer in one.answers):
        assert (answer["version"] == 0) is answer["fallback"], answer
        assert answer["finish"] in {"stop", "length"}, answer
    assert place.gateway.end() == 0, place.gateway.said()
    assert place.gateway.summary()["ledger"]["balanced"]


def wait_for_ratings(people: list[Person]) -> None:
    """Until each of them has had two more acknowledged."""
    before = [len(one.kept) for one in people]
    eventually(
        lambda: all(len(one.kept) >= count + 2 for one, count in zip(people, before, strict=True)),
        "ratings of both",
        PATIENCE_S,
    )
