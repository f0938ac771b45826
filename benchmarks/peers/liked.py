"""The reward of both trainers: cheap, in plain Python, and imported by each from this very file."""

from collections.abc import Sequence
from typing import Any


def liked(prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """Return the share of words that end with an even digit; 0 for a response without words."""
    del prompts
    return [_share(response.split()) for response in responses]


def _share(words: Sequence[str]) -> float:
    return sum(word[-1] in "02468" for word in words) / len(words) if words else 0.0
