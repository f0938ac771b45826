"""Embeddings by hashing, and the best text that a policy's mutations lead to. Loads no model."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.prompts.categories import PromptReward
from penstock.workloads.prompts.features import (
    MUTATION_TYPES,
    PromptError,
    check_action,
    mutate,
    offered,
    read_prompt,
)

# ---- A text as 1,536 numbers.

WIDTH: Final = 1536
"""Numbers of an embedding."""
_WORD: Final = re.compile(r"\w{1,32}|[^\w\s]")
_GRAMS: Final = (3, 4, 5)
_CACHED_WORDS: Final = 16_384

Rows = NDArray[np.float32]
"""Embeddings, float32 [n, WIDTH]."""
_Places = tuple[NDArray[np.intp], NDArray[np.float32]]


class Embedder(Protocol):
    """Turns texts into numbers; used by any number of threads."""

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return float32 [n, WIDTH], each of length 1; raises EmbeddingError where they cannot be had."""
        ...


class EmbeddingError(Exception):
    """Embeddings that could not be had. The message names the source, the cause and what to do."""


class HashingEmbedder:
    """Signed hashing of words and of their 3- to 5-grams (Weinberger et al. 2009).

    A word counts once, however often it is there; its grams weigh as much as the word itself, so that words
    of one stem lie near each other. Equal texts have equal embeddings on every machine.
    """

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return embeddings float32 [n, WIDTH]; a text without any word or mark is all 0."""
        rows = np.zeros((len(texts), WIDTH), np.float32)
        for index, text in enumerate(texts):
            words = dict.fromkeys(_WORD.findall(text.lower()))
            if words:
                places, signs = zip(*(_places(word) for word in words), strict=True)
                counted = np.bincount(np.concatenate(places), np.concatenate(signs), WIDTH)
                rows[index] = counted / max(float(np.linalg.norm(counted)), 1e-12)
        return rows


@lru_cache(_CACHED_WORDS)
def _places(word: str) -> _Places:
    """Return at which numbers a word and its grams are counted, and as how much."""
    edged = f"<{word}>"
    grams = [edged[at : at + size] for size in _GRAMS for at in range(len(edged) - size + 1)]
    hashes = [_hash(part) for part in (edged, *grams)]
    weights = [1.0, *[len(grams) ** -0.5] * len(grams)]
    signs = [weight if number >> 63 else -weight for number, weight in zip(hashes, weights, strict=True)]
    return np.array([number % WIDTH for number in hashes], np.intp), np.array(signs, np.float32)


def _hash(part: str) -> int:
    return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")


MAX_STEPS: Final = 8
"""Most steps of one search."""

Choose = Callable[[Sequence[float], Sequence[bool]], int]
"""(embedding, 1,536 numbers; mask of the mutations that are offered) → number of the mutation to make."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of the way: what was done, what it earned, and the text after it."""

    action: int
    mutation_type: str
    reward: float
    prompt: str


@dataclass(frozen=True, slots=True)
class Optimised:
    """The best text that was seen.

    prompt: that text. reward: the sum of the rewards on the way to it, 0 where nothing better was seen. path:
    the steps to it, in order; steps that changed nothing are left out. seen: steps that were tried in all.
    """

    prompt: str
    reward: float
    path: tuple[PathStep, ...]
    seen: int


def optimise(
    prompt: str, *, steps: int, choose: Choose, embedder: Embedder, reward: PromptReward
) -> Optimised:
    """Follow a policy for 1 to MAX_STEPS mutations, until one changes nothing; return the best text."""
    start = text = read_prompt(prompt)
    if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
        raise PromptError(f"steps={steps!r}: must be a number from 1 to {MAX_STEPS}")
    way: list[PathStep] = []
    total = best = 0.0
    kept = seen = 0
    for _ in range(steps):
        action = int(choose(embedder.embed([text])[0].tolist(), offered(text)))
        check_action(action, "the policy's action")
        after = mutate(text, action)
        seen += 1
        if after == text:
            break
        earned = reward.of(start, text, after)
        way.append(PathStep(action, MUTATION_TYPES[action], earned, after))
        text, total = after, total + earned
        if total > best:
            best, kept = total, len(way)
    path = tuple(way[:kept])
    return Optimised(path[-1].prompt if path else start, best, path, seen)
