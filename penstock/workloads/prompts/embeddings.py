"""A text as 1,536 numbers.

An `Embedder` turns texts into rows of unit length. `HashingEmbedder` is the default: it needs no model and no
network, and prompts that share words lie near each other. No embedder loads torch: models run in processes
of their own (`penstock.workloads.prompts.commands.embedding_server`).
"""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

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
        """Return embeddings float32 [n, WIDTH] of n texts, each of length 1.

        Raises EmbeddingError where they cannot be had.
        """
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
