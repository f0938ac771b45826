"""People who rate: each has a kind, says what that kind says by chance, and says it late.

Somebody who is asked about a response gives a thumb and each criterion with the chance `1 − missing`, and is
at times shown two responses of which one is better. Rows are those of feedback files: `prompt`, `response`,
`key` and `score`, or `prompt`, `chosen` and `rejected`; beside them `rater`, and when it was said, `at_s`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.workloads.chat.people.chat_texts import draw_prompt, draw_response, read_profile
from penstock.workloads.chat.people.taste import USUAL, Taste

THUMB: Final = "thumb"
FLOODER: Final = "flooder"
DELAY_S: Final = (60.0, 3 * 86_400.0)
"""Shortest and longest time from a response to what is said of it: its logarithm is uniform."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who rates. kind: number of the kind of person."""

    name: str
    kind: int
    is_liar: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """People with a taste. missing: share of the criteria that somebody leaves out."""

    taste: Taste = USUAL
    people: tuple[Person, ...]
    missing: float = 0.4

    def somebody(self, rng: np.random.Generator) -> Person:
        """Return one of them."""
        return self.people[rng.integers(len(self.people))]

    def thumb(self, rng: np.random.Generator, person: Person, prompt: str, response: str) -> bool:
        """Return whether a person's thumb is up."""
        likes = self.taste.kinds[person.kind]
        score = float(np.array(read_profile(prompt, response)) @ np.array(likes.weights)) + likes.bias
        return bool(rng.random() < 1 / (1 + np.exp(-score))) != person.is_liar

    def rating(
        self, rng: np.random.Generator, person: Person, number: int, prompt: str, response: str
    ) -> int:
        """Return what a person says of a criterion, 1 to 5. number: of the criterion."""
        asked = self.taste.criteria[number]
        middle = float(np.array(read_profile(prompt, response)) @ np.array(asked.weights)) + asked.base
        thought = int(np.clip(np.floor(middle + self.taste.noise * rng.standard_normal() + 0.5), 1, 5))
        return 6 - thought if person.is_liar else thought

    def prefers_first(
        self, rng: np.random.Generator, person: Person, prompt: str, first: str, second: str
    ) -> bool:
        """Return whether a person says that the first of two responses is better."""
        weights = np.array(self.taste.kinds[person.kind].weights)
        better = np.array(read_profile(prompt, first), float) - np.array(read_profile(prompt, second), float)
        return bool(rng.random() < 1 / (1 + np.exp(-float(better @ weights)))) != person.is_liar

    def opinions(
        self, rng: np.random.Generator, person: Person, prompt: str, response: str, *, asked_s: float = 0.0
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of what a person says of a response that came at `asked_s`."""
        about = {"prompt": prompt, "response": response, "rater": person.name, "at_s": asked_s + _late_s(rng)}
        yield {**about, "key": THUMB, "score": self.thumb(rng, person, prompt, response)}
        for number, criterion in enumerate(self.taste.criteria):
            if rng.random() >= self.missing:
                score = self.rating(rng, person, number, prompt, response)
                yield {**about, "key": criterion.name, "score": score}

    def comparison(
        self, rng: np.random.Generator, person: Person, prompt: str, first: str, second: str
    ) -> dict[str, Any]:
        """Return the row of which of two different responses a person prefers."""
        chosen, rejected = (first, second)
        if not self.prefers_first(rng, person, prompt, first, second):
            chosen, rejected = second, first
        about = {"prompt": prompt, "rater": person.name, "at_s": _late_s(rng)}
        return {**about, "chosen": chosen, "rejected": rejected}

    def feedback(
        self, rng: np.random.Generator, *, rated: int, compared: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Yield what is said of so many responses, and of so many pairs, of the reference."""
        for _ in range(rated):
            prompt = draw_prompt(rng)
            yield from self.opinions(rng, self.somebody(rng), prompt, draw_response(rng, prompt))
        while compared:
            prompt = draw_prompt(rng)
            first, second = draw_response(rng, prompt), draw_response(rng, prompt)
            if first != second:
                yield self.comparison(rng, self.somebody(rng), prompt, first, second)
                compared -= 1


def population(count: int, *, seed: int, taste: Taste = USUAL) -> Population:
    """Return people of all kinds in turn; the share of liars among them is the taste's, rounded.

    count: of people, at least 1. Raises ValueError.
    """
    if count < 1:
        raise ValueError(f"count={count}: a population has at least one person")
    lying = set(np.random.default_rng(seed).permutation(count)[: round(taste.liars * count)].tolist())
    people = tuple(
        Person(f"person-{number}", number % len(taste.kinds), number in lying) for number in range(count)
    )
    return Population(taste=taste, people=people)


def flood(prompt: str, response: str, *, votes: int = 500, is_up: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the thumbs of one person who votes for the same response again and again."""
    for number in range(votes):
        about = {"prompt": prompt, "response": response, "rater": FLOODER, "at_s": float(number)}
        yield {**about, "key": THUMB, "score": is_up}


def _late_s(rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(*np.log(DELAY_S))))
