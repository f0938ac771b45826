"""Simulated people at a gateway's chat, as a process of their own: they talk over HTTP and rate each answer.

    python -m tests.support.chat.chat_people ADDRESS --conversations 1000 --at-once 8 --seed 0

Each person has a browser of their own, asks three times, says of each answer whether they like it, and ends
the conversation. It writes the chance that somebody likes an answer, a line for each.
"""

import argparse
import http.client
import json
import secrets
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.workloads.chat.people import Population, draw_next_prompt, draw_prompt, population, read_profile

TURNS: Final = 3
PEOPLE: Final = 60
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What people do."""

    conversations: int
    at_once: int
    seed: int


class Talker:
    """A connection to a gateway, for one thread."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._line = http.client.HTTPConnection(host, int(port), timeout=_PATIENCE_S)

    def post(self, name: str, **body: Any) -> Any:
        """Return the JSON of a call that succeeds; raises RuntimeError for another."""
        reply = self._send(name, body)
        return json.loads(reply.read())

    def say(self, **body: Any) -> dict[str, Any]:
        """Return an answer; raises RuntimeError where none comes."""
        reply = self._send("say", body)
        kind, data = "", dict[str, Any]()
        while line := reply.readline():
            head, _, text = line.decode().strip().partition(": ")
            if head == "event":
                kind = text
            elif head == "data":
                data = json.loads(text)
        if kind != "answer":
            raise RuntimeError(f"{kind}: {data}")
        return data

    def close(self) -> None:
        self._line.close()

    def _send(self, name: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        self._line.request(
            "POST", f"/api/chat/{name}", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = self._line.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{name}: {reply.status} {reply.read()!r}")
        return reply


def converse(talker: Talker, rng: np.random.Generator, people: Population) -> Iterator[float]:
    """Yield the chance of each answer, in a conversation of somebody new, that somebody likes it."""
    me, person = secrets.token_hex(16), people.somebody(rng)
    named = {"me": me, "conversation": talker.post("begin", me=me)["conversation"]}
    message = draw_prompt(rng)
    for _ in range(TURNS):
        answer = talker.say(text=message, **named)
        up = people.thumb(rng, person, message, answer["text"])
        talker.post("thumb", id=secrets.token_hex(16), turn=answer["turn"], up=up, **named)
        features = np.array([read_profile(message, answer["text"])], np.float64)
        yield float(people.taste.thumb_chance(features)[0])
        message = draw_next_prompt(rng, message)
    talker.post("end", **named)


def talk(address: str, plan: Plan) -> None:
    """Let people talk, so many at once, until all conversations are over; raises what one of them does."""
    left, turn, people = iter(range(plan.conversations)), threading.Lock(), population(PEOPLE, seed=plan.seed)
    failed: list[BaseException] = []

    def go(place: int) -> None:
        talker, rng = Talker(address), np.random.default_rng([plan.seed, place])
        try:
            while not failed:
                with turn:
                    if next(left, None) is None:
                        break
                for chance in converse(talker, rng, people):
                    with turn:
                        sys.stdout.write(f"{chance}\n")
        except Exception as error:  # noqa: BLE001 - of a thread; it is raised below
            failed.append(error)
        finally:
            talker.close()

    threads = [threading.Thread(target=go, args=(place,)) for place in range(plan.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated people at a chat.")
    parser.add_argument("address")
    parser.add_argument("--conversations", type=int, required=True)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    talk(said.address, Plan(conversations=said.conversations, at_once=said.at_once, seed=said.seed))


if __name__ == "__main__":
    main()
