"""Sentiment words: a task of language whose true reward is known.

A prompt is two neutral words. The reference policy writes L words, L uniform in `lengths`, each positive,
negative or neutral with fixed chances, independent of the prompt. With p and n the positive and negative
words of y,

    r(y) = clip((p − n) / L, −1, 1)                           the true reward
    x(y) = clip(r(y) + noise · ε, −1, 1),  ε ~ N(0, 1)        a rating of it, on the scale 0 … 100

The module imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

POSITIVE: Final = ("good", "great", "happy", "kind", "lovely", "nice", "superb", "warm")
NEGATIVE: Final = ("angry", "awful", "bad", "cold", "cruel", "dull", "nasty", "sad")
NEUTRAL: Final = (
    "apple", "bird", "book", "chair", "city", "door", "field", "house",
    "lamp", "moon", "paper", "river", "road", "stone", "table", "tree",
)  # fmt: skip
WORDS: Final = (*POSITIVE, *NEGATIVE, *NEUTRAL)

_SIGN: Final = {**dict.fromkeys(POSITIVE, 1), **dict.fromkeys(NEGATIVE, -1)}


def true_reward(response: str) -> float:
    """Return r(y); 0 for a response without words."""
    words = response.split()
    return max(-1.0, min(1.0, sum(_SIGN.get(word, 0) for word in words) / len(words))) if words else 0.0


def true_rewards(prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """Return the true rewards of responses, as a source of rewards; prompts do not matter."""
    del prompts
    return [true_reward(response) for response in responses]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentiment:
    """The task. positive, negative: chances of such words in the reference policy."""

    noise: float = 0.3
    lengths: tuple[int, int] = (3, 8)
    positive: float = 0.25
    negative: float = 0.25

    def prompt(self, rng: np.random.Generator) -> str:
        return " ".join(NEUTRAL[index] for index in rng.integers(len(NEUTRAL), size=2))

    def response(self, rng: np.random.Generator) -> str:
        low, high = self.lengths
        drawn = rng.random(int(rng.integers(low, high + 1)))
        return " ".join(self._word(rng, chance) for chance in drawn)

    def _word(self, rng: np.random.Generator, chance: float) -> str:
        kind: tuple[str, ...] = NEUTRAL
        if chance < self.positive + self.negative:
            kind = POSITIVE if chance < self.positive else NEGATIVE
        return kind[rng.integers(len(kind))]

    def scored(self, rng: np.random.Generator, count: int) -> Iterator[dict[str, Any]]:
        """Yield rows of feedback with scores from 0 to 100 (scale `percent`)."""
        for _ in range(count):
            response = self.response(rng)
            rated = np.clip(true_reward(response) + self.noise * rng.standard_normal(), -1, 1)
            yield {"prompt": self.prompt(rng), "response": response, "score": float(50 + 50 * rated)}
