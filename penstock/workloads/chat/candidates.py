"""Prompts with eight candidate responses each: the smallest form in which a policy can answer.

A policy chooses one of the eight from their attributes. What a candidate is worth is the chance that somebody
likes it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.chat.people import Taste, draw_prompt, draw_response, read_profile

Array = NDArray[np.float64]

CANDIDATES: Final = 8
PROMPTS: Final = 16
_SEED: Final = 28


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its candidates. features: their attributes, float64 [8, 6]."""

    prompt: str
    candidates: tuple[str, ...]
    features: Array


@cache
def questions() -> tuple[Question, ...]:
    """Return the prompts with their candidates: responses of the reference, the same in every process."""
    rng = np.random.default_rng(_SEED)
    return tuple(_question(rng) for _ in range(PROMPTS))


def liked(taste: Taste) -> Array:
    """Return the chance that somebody likes each candidate, [PROMPTS, CANDIDATES]."""
    return np.array([taste.thumb_chance(one.features) for one in questions()])


def _question(rng: np.random.Generator) -> Question:
    prompt = draw_prompt(rng)
    candidates: list[str] = []
    while len(candidates) < CANDIDATES:
        response = draw_response(rng, prompt)
        if response not in candidates:
            candidates.append(response)
    features = np.array([read_profile(prompt, one) for one in candidates], np.float64)
    return Question(prompt, tuple(candidates), features)
