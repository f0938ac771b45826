"""Training and validation examples that share no prompt.

Prompts are put in an order that a seed and their text alone decide, whatever the order of the file; the first
of them, until the wanted share of the examples is reached, are for validation.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.examples import Example
from penstock.workloads.language.prompt import identity


class Split(NamedTuple):
    """Both in the order of the source."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]


def split(examples: Sequence[Example], *, share: float, seed: int) -> Split:
    """`share` of the examples, to within those of one prompt, for validation; 0: none.

    Raises ConfigurationError where one prompt has all examples.
    """
    if share == 0:
        return Split(tuple(examples), ())
    of_prompt: dict[str, int] = defaultdict(int)
    for example in examples:
        of_prompt[identity(example.prompt)] += 1
    if len(of_prompt) < 2:
        raise ConfigurationError(
            "all examples are of one prompt, which cannot be on both sides: give more prompts, or "
            "validation_share=0"
        )
    held: set[str] = set()
    count = 0
    for prompt in sorted(of_prompt, key=lambda prompt: place_of(prompt, seed))[:-1]:
        if count >= share * len(examples):
            break
        held.add(prompt)
        count += of_prompt[prompt]
    sides: tuple[list[Example], list[Example]] = [], []
    for example in examples:
        sides[identity(example.prompt) in held].append(example)
    return Split(tuple(sides[0]), tuple(sides[1]))


def place_of(prompt: str, seed: int) -> bytes:
    """Return what the order of prompts goes by, of a prompt's `identity`."""
    return hashlib.sha256(f"{seed}\n{prompt}".encode()).digest()
