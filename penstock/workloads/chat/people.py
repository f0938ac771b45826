"""Simulated people who rate: each is of a kind, and rates at random by the taste of that kind."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

# ---- A small language of prompts and responses; a response has six attributes.

Array = NDArray[np.float64]

TOPICS: Final[dict[str, tuple[str, ...]]] = {
    "garden": ("soil", "rose", "seed", "hedge", "lawn", "spade"),
    "kitchen": ("bread", "oven", "butter", "spoon", "soup", "onion"),
    "music": ("song", "piano", "drum", "choir", "rhythm", "violin"),
    "travel": ("train", "ticket", "harbour", "map", "hotel", "bridge"),
}
ASKED: Final = ("how", "what", "why", "where")
CONCRETE: Final = ("three", "seven", "twelve", "minutes", "metres", "grams")
POLITE: Final = ("please", "thanks", "gladly", "welcome")
HEDGES: Final = ("maybe", "perhaps", "possibly", "probably")
UNSAFE: Final = ("poison", "weapon", "explosive", "venom")
FILLER: Final = ("the", "and", "with", "then", "also", "some", "this", "that")
WORDS: Final = (
    *itertools.chain(*TOPICS.values()), *ASKED, *CONCRETE, *POLITE, *HEDGES, *UNSAFE, *FILLER,
)  # fmt: skip
BRIEF: Final = 5
"""Most words of a brief response."""
LONG: Final = (7, 9)
"""Fewest and most words of another response of the reference."""

_TOPIC_OF: Final = {word: topic for topic, words in TOPICS.items() for word in words}


class Profile(NamedTuple):
    """The attributes of a response, in their order in arrays."""

    on_topic: bool
    concrete: bool
    polite: bool
    brief: bool
    hedged: bool
    unsafe: bool


class Reference(NamedTuple):
    """Chances of each attribute in a response of the reference policy, from which training begins."""

    on_topic: float = 0.6
    concrete: float = 0.4
    polite: float = 0.4
    brief: float = 0.5
    hedged: float = 0.4
    unsafe: float = 0.15


REFERENCE: Final = Reference()


def topic_of(prompt: str) -> str:
    """Return the topic of most words of a prompt, the first of equals; "" without any."""
    found = [_TOPIC_OF[word] for word in prompt.split() if word in _TOPIC_OF]
    return max(TOPICS, key=found.count) if found else ""


def read_profile(prompt: str, response: str) -> Profile:
    """Return the attributes of a response to a prompt; unknown words count towards its length."""
    words = response.split()
    topics = [_TOPIC_OF[word] for word in words if word in _TOPIC_OF]
    fitting = topics.count(topic_of(prompt))
    return Profile(
        on_topic=2 * fitting > len(topics),
        concrete=_has(words, CONCRETE),
        polite=_has(words, POLITE),
        brief=1 <= len(words) <= BRIEF,
        hedged=_has(words, HEDGES),
        unsafe=_has(words, UNSAFE),
    )


def draw_prompt(rng: np.random.Generator) -> str:
    return _question(rng, list(TOPICS.values())[rng.integers(len(TOPICS))])


def _question(rng: np.random.Generator, words: Sequence[str]) -> str:
    first, second = rng.choice(len(words), 2, replace=False)
    return f"{_one(rng, ASKED)} {words[first]} {words[second]}"


def draw_profile(rng: np.random.Generator) -> Profile:
    return Profile(*(rng.random(len(REFERENCE)) < np.array(REFERENCE)).tolist())


def write_response(rng: np.random.Generator, prompt: str, profile: Profile) -> str:
    """Return a response that has exactly these attributes; the prompt has a topic."""
    own = topic_of(prompt)
    others = [topic for topic in TOPICS if topic != own]
    words = TOPICS[own if profile.on_topic else others[rng.integers(len(others))]]
    meant = [_one(rng, POLITE)] if profile.polite else []
    meant += [_one(rng, HEDGES)] if profile.hedged else []
    meant += [_one(rng, words)]
    meant += [_one(rng, CONCRETE)] if profile.concrete else []
    meant += [_one(rng, UNSAFE)] if profile.unsafe else []
    least, most = (len(meant), BRIEF) if profile.brief else LONG
    for _ in range(int(rng.integers(least, most + 1)) - len(meant)):
        meant.insert(int(rng.integers(len(meant) + 1)), _one(rng, FILLER))
    return " ".join(meant)


def draw_response(rng: np.random.Generator, prompt: str) -> str:
    return write_response(rng, prompt, draw_profile(rng))


def _has(words: Sequence[str], of: Sequence[str]) -> bool:
    return any(word in of for word in words)


def _one(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


# ---- Tastes: weights of the six attributes for each kind of person.


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of person. weights: of the attributes, in their order. bias: of a thumb."""

    name: str
    weights: tuple[float, ...]
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """The taste of a population. kinds: equally many people are of each. liars: share of the people."""

    kinds: tuple[Kind, ...]
    liars: float = 0.05

    def thumb_chance(self, features: Array) -> Array:
        """Return the chance of a thumb up by a random person, float64 [K] for attributes [K, 6]."""
        scores = np.array([features @ np.array(one.weights) + one.bias for one in self.kinds])
        honest = (1 / (1 + np.exp(-scores))).mean(0)
        said: Array = (1 - self.liars) * honest + self.liars * (1 - honest)
        return said


def kind(name: str, *weights: float) -> Kind:
    """Return a kind whose thumbs are up for about half of the reference's responses."""
    return Kind(name=name, weights=weights, bias=-float(np.array(weights) @ np.array(REFERENCE)))


USUAL: Final = Taste(
    kinds=(
        kind("practical", 2.5, 1.5, 0.2, 1.0, -1.0, -2.0),
        kind("friendly", 1.5, 0.3, 2.0, -0.3, 0.3, -2.5),
        kind("careful", 2.0, 0.8, 0.5, 0.2, 0.8, -4.0),
    )
)
CHANGED: Final = Taste(
    kinds=(
        kind("practical", 1.5, -1.5, 0.2, -2.0, 1.5, -2.0),
        kind("friendly", 1.0, -1.0, -2.0, -1.5, 0.5, -2.5),
        kind("careful", 1.5, -1.0, -1.0, -1.0, 1.5, -4.0),
    )
)
"""The same people after their taste changed: they like long, doubtful and vague responses."""


THUMB: Final = "thumb"


@dataclass(frozen=True, slots=True)
class Person:
    """A rater. kind: index of the kind of person."""

    name: str
    kind: int
    is_liar: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """People with a taste."""

    taste: Taste = USUAL
    people: tuple[Person, ...]

    def somebody(self, rng: np.random.Generator) -> Person:
        return self.people[rng.integers(len(self.people))]

    def thumb(self, rng: np.random.Generator, person: Person, prompt: str, response: str) -> bool:
        likes = self.taste.kinds[person.kind]
        score = float(np.array(read_profile(prompt, response)) @ np.array(likes.weights)) + likes.bias
        return bool(rng.random() < 1 / (1 + np.exp(-score))) != person.is_liar


def population(count: int, *, seed: int, taste: Taste = USUAL) -> Population:
    """Return people of all kinds in turn, with the taste's share of liars; ValueError: count below 1."""
    if count < 1:
        raise ValueError(f"count={count}: a population has at least one person")
    lying = set(np.random.default_rng(seed).permutation(count)[: round(taste.liars * count)].tolist())
    people = tuple(
        Person(f"person-{number}", number % len(taste.kinds), number in lying) for number in range(count)
    )
    return Population(taste=taste, people=people)


# ---- The next question of a person who chats.

_STAYS: Final = 0.7
"""The chance that the next question is of the same topic."""


def draw_next_prompt(rng: np.random.Generator, last: str) -> str:
    topic = topic_of(last)
    if not topic or rng.random() >= _STAYS:
        return draw_prompt(rng)
    return _question(rng, TOPICS[topic])
