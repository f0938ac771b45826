"""Processes are killed while people talk and rate: what was acknowledged is there, once."""

import os
import secrets
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import requests

from penstock.launch.inspection.processes import read_endpoints
from penstock.registry.registry import Registry
from tests.support.chat.chat_gateway import ChatGateway, read_event
from tests.support.prompts.prompts_gateway import PATIENCE_S
from tests.support.run.harness import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANSWERS: Final = 4
"""Of each person between two kills."""


class Talker(threading.Thread):
    """Somebody who talks and gives each answer a thumb, until it is over; begins anew where it must.

    answers: that came whole. kept: the thumbs that were acknowledged. unsure: those that may be kept.
    """

    def __init__(self, gateway: ChatGateway) -> None:
        super().__init__(daemon=True)
        self._url = gateway.url
        self._session = requests.Session()
        self._is_over = threading.Event()
        self.answers: list[dict[str, Any]] = []
        self.kept: list[str] = []
        self.unsure: set[str] = set()
        self.failure: Exception | None = None

    def run(self) -> None:
        """Talk."""
        try:
            while not self._is_over.is_set():
                self._converse()
        except Exception as error:  # noqa: BLE001 - raised by `end`
            self.failure = error

    def end(self) -> None:
        """Stop after what is under way; raises what went wrong."""
        self._is_over.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure

    def _converse(self) -> None:
        """A conversation of three turns, as far as it comes."""
        me = secrets.token_hex(16)  # nobody may say so much in a minute
        begun = self._post("begin", me=me)
        if begun.status_code == 503:
            self._is_over.wait(0.1)
            return
        assert begun.status_code == 200, begun.text
        named = {"me": me, "conversation": begun.json()["conversation"]}
        for _ in range(3):
            said = self._post("say", text="hello", **named)
            if said.status_code in (404, 503):
                return
            assert said.status_code == 200, said.text
            kind, data = read_event([one for one in said.text.split("\n\n") if one][-1])
            if kind == "refused":
                assert data["detail"]
                return
            self.answers.append(data)
            if not self._rate(data["turn"], named):
                return

    def _rate(self, turn: int, named: dict[str, str]) -> bool:
        """Send a thumb until it is kept; False where the conversation is forgotten."""
        thumb = secrets.token_hex(16)
        while (reply := self._post("thumb", id=thumb, turn=turn, up=True, **named)).status_code != 200:
            assert reply.status_code in (404, 503), reply.text
            self.unsure.add(thumb)
            if reply.status_code == 404:
                return False
            self._is_over.wait(0.1)
        self.kept.append(thumb)
        return True

    def _post(self, what: str, **body: Any) -> requests.Response:
        return self._session.post(f"{self._url}/api/chat/{what}", json=body, timeout=PATIENCE_S)


def test_two_people_talk_while_each_process_of_the_run_is_killed(tmp_path: Path) -> None:
    with ChatGateway(tmp_path, "--train=learner.keep_every_updates=10") as gateway:
        people = [Talker(gateway), Talker(gateway)]
        for person in people:
            person.start()
        _hear_more(people)
        run = gateway.state / "run"
        for name, endpoint in sorted(read_endpoints(run).items()):
            if endpoint.role == "launcher":
                continue  # without it the run is over, and with it the gateway
            os.kill(endpoint.pid, signal.SIGKILL)
            eventually(partial(_is_another, run, name, endpoint.pid), f"another {name}", PATIENCE_S)
            _hear_more(people)
        for person in people:
            person.end()
        with Registry.read(f"sqlite:///{run}/registry.sqlite") as registry:
            ratings = registry.ratings("default")
    stored = Counter(str(one.rating.request_key).removeprefix("chat ") for one in ratings)
    kept = {thumb for person in people for thumb in person.kept}
    assert stored == Counter(stored.keys())
    assert kept <= stored.keys() <= kept.union(*(person.unsure for person in people))
    assert all(one["fallback"] or one["version"] > 0 for person in people for one in person.answers)
    assert gateway.summary()["ledger"]["balanced"]


def _is_another(run: Path, name: str, pid: int) -> bool:
    """Whether the process of that name has another pid."""
    found = read_endpoints(run).get(name)
    return found is not None and found.pid != pid


def _hear_more(people: list[Talker]) -> None:
    """Until each has heard some more answers."""
    goals = [len(person.answers) + ANSWERS for person in people]

    def have_heard() -> bool:
        for person in people:
            assert person.failure is None, person.failure
        return all(len(person.answers) >= goal for person, goal in zip(people, goals, strict=True))

    eventually(have_heard, "more answers", PATIENCE_S)


def test_no_rating_is_lost_or_doubled(tmp_path: Path) -> None:
    first = ChatGateway(tmp_path)
    with first:
        talk = first.begin()
        _, _, data = talk.say("hello")
        talk.tell("thumb", data["turn"], up=True, id="the-only-thumb")
        first.kill()
    with ChatGateway(tmp_path) as second:
        second.me = first.me
        again = {"id": "the-only-thumb", "turn": data["turn"], "up": True, **talk.named}
        refused = second.session.post(f"{second.url}/api/chat/thumb", json=again, timeout=60)
        assert (refused.status_code, refused.json()["field"]) == (404, "conversation")
        talk = second.begin()
        talk.say("hello")
        seen = second.get("/api/chat/overview")["versions"]
        assert sum(one["conversations"] for one in seen) == 2
        assert sum(one["rated"] for one in seen) == 1
        with Registry.read(f"sqlite:///{second.state}/run/registry.sqlite") as registry:
            assert [kept.rating.key for kept in registry.ratings("default")] == ["thumb"]
    assert second.summary()["ledger"]["balanced"]
