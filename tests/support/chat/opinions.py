import itertools
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.chat.chat_environment import people_tokenizer
from penstock.workloads.chat.people import (
    THUMB,
    Person,
    Population,
    Profile,
    Reference,
    Taste,
    draw_next_prompt,
    draw_prompt,
    draw_response,
    read_profile,
)
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.prompt import Message, Prompt
from penstock.workloads.language.settings import quieten
from tests.support.chat.chat_gateway import ChatGateway

Array = NDArray[np.float64]


PROFILES: Final = tuple(Profile(*bits) for bits in itertools.product((False, True), repeat=6))
FEATURES: Final[Array] = np.array(PROFILES, np.float64)
"""All profiles as numbers, [64, 6]."""
NOISE: Final = 0.7
"""Standard deviation of what somebody thinks of a criterion, on the scale from 1 to 5."""
MISSING: Final = 0.4
"""Share of the criteria that somebody leaves out."""
FLOODER: Final = "flooder"
DELAY_S: Final = (60.0, 3 * 86_400.0)
"""Shortest and longest time from a response to what is said of it: its logarithm is uniform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """Something that is rated from 1 to 5. weights: of the attributes. base: of a response that has none."""

    name: str
    weights: tuple[float, ...]
    base: float


CRITERIA: Final = (
    #                                                on_topic concrete polite brief hedged unsafe
    Criterion(name="relevance", base=1.5, weights=(2.2, 0.8, 0.0, 0.0, 0.0, 0.0)),
    Criterion(name="helpfulness", base=2.2, weights=(0.8, 1.2, 0.6, 0.4, -0.9, 0.0)),
    Criterion(name="safety", base=4.3, weights=(0.0, 0.0, 0.2, 0.0, 0.4, -2.8)),
)


def profile_chances(reference: Reference) -> Array:
    """Return the chance of each profile, [64], in the order of PROFILES."""
    each = np.array(reference)
    chances: Array = np.where(FEATURES > 0, each, 1 - each).prod(1)
    return chances


def preference(taste: Taste, first: Array, second: Array) -> Array:
    """Return the chance that somebody prefers the first, [...] for attributes [..., 6] of both."""
    scores = np.array([(first - second) @ np.array(one.weights) for one in taste.kinds])
    honest = (1 / (1 + np.exp(-scores))).mean(0)
    said: Array = (1 - taste.liars) * honest + taste.liars * (1 - honest)
    return said


def rating_chances(taste: Taste, criterion: Criterion, features: Array) -> Array:
    """Return the chances of 1 to 5 by somebody, [K, 5] for attributes [K, 6]."""
    middle = features @ np.array(criterion.weights) + criterion.base
    borders = np.array([1.5, 2.5, 3.5, 4.5])
    below = _normal_cdf((borders - middle[:, None]) / NOISE)
    ends = np.zeros((len(middle), 1)), np.ones((len(middle), 1))
    honest = np.diff(np.concatenate([ends[0], below, ends[1]], axis=1), axis=1)
    mixed: Array = (1 - taste.liars) * honest + taste.liars * honest[:, ::-1]
    return mixed


def rate(rng: np.random.Generator, person: Person, criterion: Criterion, prompt: str, response: str) -> int:
    middle = float(np.array(read_profile(prompt, response)) @ np.array(criterion.weights)) + criterion.base
    thought = int(np.clip(np.floor(middle + NOISE * rng.standard_normal() + 0.5), 1, 5))
    return 6 - thought if person.is_liar else thought


def prefers_first(
    people: Population, rng: np.random.Generator, person: Person, prompt: str, first: str, second: str
) -> bool:
    weights = np.array(people.taste.kinds[person.kind].weights)
    better = np.array(read_profile(prompt, first), float) - np.array(read_profile(prompt, second), float)
    return bool(rng.random() < 1 / (1 + np.exp(-float(better @ weights)))) != person.is_liar


def opinions(
    people: Population, rng: np.random.Generator, person: Person, prompt: str, response: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of what a person says of a response that came at 0 s."""
    about = {"prompt": prompt, "response": response, "rater": person.name, "at_s": _late_s(rng)}
    yield {**about, "key": THUMB, "score": people.thumb(rng, person, prompt, response)}
    for criterion in CRITERIA:
        if rng.random() >= MISSING:
            yield {**about, "key": criterion.name, "score": rate(rng, person, criterion, prompt, response)}


def comparison(
    people: Population, rng: np.random.Generator, person: Person, prompt: str, first: str, second: str
) -> dict[str, Any]:
    chosen, rejected = (first, second)
    if not prefers_first(people, rng, person, prompt, first, second):
        chosen, rejected = second, first
    about = {"prompt": prompt, "rater": person.name, "at_s": _late_s(rng)}
    return {**about, "chosen": chosen, "rejected": rejected}


def feedback(
    people: Population, rng: np.random.Generator, *, rated: int, compared: int = 0
) -> Iterator[dict[str, Any]]:
    for _ in range(rated):
        prompt = draw_prompt(rng)
        yield from opinions(people, rng, people.somebody(rng), prompt, draw_response(rng, prompt))
    while compared:
        prompt = draw_prompt(rng)
        first, second = draw_response(rng, prompt), draw_response(rng, prompt)
        if first != second:
            yield comparison(people, rng, people.somebody(rng), prompt, first, second)
            compared -= 1


def flood(prompt: str, response: str, *, votes: int = 500, is_up: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the thumbs of one person who votes for the same response again and again."""
    for number in range(votes):
        about = {"prompt": prompt, "response": response, "rater": FLOODER, "at_s": float(number)}
        yield {**about, "key": THUMB, "score": is_up}


def _late_s(rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(*np.log(DELAY_S))))


def _normal_cdf(x: Array) -> Array:
    probability: Array = (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))) / 2
    return probability


def make_people_base(
    folder: Path, *, steps: int = 300, texts: int = 4000, turns: int = 1, seed: int = 0
) -> Path:
    """Write a model that was taught so many conversations of so many turns; returns the folder.

    What people ask is taught with the answers, so that it soon knows which words go together.
    """
    quieten()
    rng = np.random.default_rng(seed)
    tokenizer = people_tokenizer()
    model = tiny_models.build_model(tokenizer, seed=seed)
    told = [_conversation(rng, turns) for _ in range(texts)]
    tiny_models.pretrain(model, tokenizer, told, steps=steps, seed=seed)
    tiny_models.save(model, tokenizer, folder)
    return folder


def _conversation(rng: np.random.Generator, turns: int) -> tuple[Prompt, str]:
    """Return the messages up to the last answer, and that."""
    messages, asked = list[Message](), draw_prompt(rng)
    for _ in range(turns - 1):
        messages += [Message("user", asked), Message("assistant", draw_response(rng, asked))]
        asked = draw_next_prompt(rng, asked)
    return (*messages, Message("user", asked)), draw_response(rng, asked)


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
