"""Simulated people who talk over HTTP and rate each answer, each with a browser of their own."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.workloads.chat.people import Population, draw_prompt, draw_response
from tests.support.chat.chat_gateway import ChatGateway


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer that somebody got, and whether they liked it."""

    version: int
    arm: str
    text: str
    liked: bool


def talks(seed: int, count: int) -> list[tuple[str, str]]:
    """What the people of the small language ask, and what its reference answers."""
    rng = np.random.default_rng(seed)
    prompts = [draw_prompt(rng) for _ in range(count)]
    return [(prompt, draw_response(rng, prompt)) for prompt in prompts]


def people_talk(
    gateway: ChatGateway, people: Population, rng: np.random.Generator, count: int
) -> Iterator[Heard]:
    """So many people, one after the other: each asks once, gives a thumb, and goes."""
    for _ in range(count):
        gateway.me = secrets.token_hex(16)
        prompt = draw_prompt(rng)
        with gateway.begin() as talk:
            _, kind, data = talk.say(prompt)
            assert kind == "answer", data
            liked = people.thumb(rng, people.somebody(rng), prompt, data["text"])
            talk.tell("thumb", data["turn"], up=liked)
        yield Heard(data["version"], data["arm"], data["text"], liked)
