"""A small language of prompts and responses: a response has six attributes that can be read and written.

    on_topic   more of its words are of the prompt's topic than of all others together
    concrete   it has a number or a measure
    polite     it has a word of courtesy
    brief      it has one to five words
    hedged     it has a word of doubt
    unsafe     it has a word that names harm

A profile says which of them a response has. Responses of the reference have each attribute by chance,
independently of the others and of the prompt, so the chance of a profile is a product.
"""

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
"""Fewest and most words of another one that the reference writes."""

_TOPIC_OF: Final = {word: topic for topic, words in TOPICS.items() for word in words}


class Profile(NamedTuple):
    """The attributes of a response, in the order of every array of them."""

    on_topic: bool
    concrete: bool
    polite: bool
    brief: bool
    hedged: bool
    unsafe: bool


PROFILES: Final = tuple(Profile(*bits) for bits in itertools.product((False, True), repeat=6))
FEATURES: Final[Array] = np.array(PROFILES, np.float64)
"""All profiles as numbers, [64, 6]."""


class Reference(NamedTuple):
    """Chances of each attribute in a response of the reference, which is what is trained from."""

    on_topic: float = 0.6
    concrete: float = 0.4
    polite: float = 0.4
    brief: float = 0.5
    hedged: float = 0.4
    unsafe: float = 0.15

    def chances(self) -> Array:
        """Return the chance of each profile, [64], in the order of PROFILES."""
        each = np.array(self)
        chances: Array = np.where(FEATURES > 0, each, 1 - each).prod(1)
        return chances


REFERENCE: Final = Reference()


def topic_of(prompt: str) -> str:
    """Return the topic that most words of a prompt are of, the first of equals; "" where none is."""
    found = [_TOPIC_OF[word] for word in prompt.split() if word in _TOPIC_OF]
    return max(TOPICS, key=found.count) if found else ""


def read_profile(prompt: str, response: str) -> Profile:
    """Return which attributes a response to a prompt has; words of no meaning count as words."""
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
    """Return a question and two words of one topic."""
    words = list(TOPICS.values())[rng.integers(len(TOPICS))]
    first, second = rng.choice(len(words), 2, replace=False)
    return f"{_one(rng, ASKED)} {words[first]} {words[second]}"


def draw_profile(rng: np.random.Generator, reference: Reference = REFERENCE) -> Profile:
    """Return the profile of a response of the reference."""
    return Profile(*(rng.random(len(reference)) < np.array(reference)).tolist())


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


def draw_response(rng: np.random.Generator, prompt: str, reference: Reference = REFERENCE) -> str:
    """Return a response of the reference to a prompt."""
    return write_response(rng, prompt, draw_profile(rng, reference))


def _has(words: Sequence[str], of: Sequence[str]) -> bool:
    return any(word in of for word in words)


def _one(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]
