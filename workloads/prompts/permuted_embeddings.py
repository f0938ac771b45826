"""Embeddings that belong to other texts: the ablation that nothing can be learned from."""

import hashlib
from collections.abc import Sequence

import numpy as np

from workloads.prompts.embeddings import Embedder, Rows
from workloads.prompts.mutations import MUTATION_TYPES, mutate
from workloads.prompts.prompt_sources import PromptSource


class PermutedEmbedder:
    """Gives each text the embedding of another one, always the same, drawn by its hash.

    What comes out is distributed as before and says nothing of the text.
    """

    def __init__(self, embedder: Embedder, source: PromptSource) -> None:
        """embedder: of the other texts. source: draws them; they are mutated as episodes mutate theirs."""
        self._embedder, self._source = embedder, source

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return embeddings float32 [n, WIDTH] of n other texts."""
        return self._embedder.embed([self._other(text) for text in texts])

    def _other(self, text: str) -> str:
        random = np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))
        other, _ = self._source.draw(random)
        for action in range(len(MUTATION_TYPES)):
            if random.random() < 0.5:
                other = mutate(other, action)
        return other
