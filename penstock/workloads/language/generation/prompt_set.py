"""Prompts: read, tokenised, and divided into those that train and those that are held out.

Which side a prompt is on depends on the seed and its text alone, as for feedback. A row without a prompt, or
with one that leaves no room for a response, is named and counted.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.examples import BadRows
from penstock.workloads.language.feedback.feedback_places import rows_of
from penstock.workloads.language.feedback.split import place_of
from penstock.workloads.language.prompt import Prompt, identity, parse_prompt
from penstock.workloads.language.tokenizer import Encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt. index: its place among all distinct prompts, on whichever side."""

    index: int
    prompt: Prompt
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Distinct prompts in the order of the source."""

    train: tuple[Asked, ...]
    held_out: tuple[Asked, ...]
    bad: BadRows


def read_prompts(place: str, encoder: Encoder, *, held_out: float, seed: int) -> Prompts:
    """Return the prompts at a place.

    encoder: `max_tokens` is the most that a prompt may have. held_out: share of them.

    Raises ConfigurationError for a place that cannot be read, or where a side is left without a prompt.
    """
    bad, found = BadRows(), dict[str, Asked]()
    for where, row in rows_of(place):
        try:
            prompt = parse_prompt(_prompt_of(row))
            ids = tuple(encoder.prompt_ids(prompt))
            _check_length(ids, encoder.max_tokens)
            found.setdefault(identity(prompt), Asked(len(found), prompt, ids))
        except ValueError as error:
            bad.add(where, str(error))
    for line in bad.lines():
        log.warning("bad row: %s", line)
    order = sorted(found, key=lambda name: place_of(name, seed))
    held = set(order[: max(1, round(held_out * len(order)))] if held_out else ())
    train, asked_later = (
        tuple(one for name, one in found.items() if (name in held) is side) for side in (False, True)
    )
    if not train:
        lines = "\n".join(bad.lines())
        raise ConfigurationError(
            f"environment.kwargs.prompts={place}: {len(found)} prompts can be used and "
            f"{len(asked_later)} of them are held out: none is left to train on\n{lines}".rstrip()
        )
    return Prompts(train, asked_later, bad)


def _prompt_of(row: Any) -> Any:
    if isinstance(row, ValueError):
        raise row
    if row.get("prompt") is None:
        raise ValueError("no prompt")
    return row["prompt"]


def _check_length(ids: Sequence[int], most: int) -> None:
    if not 1 <= len(ids) <= most:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, 1 to {most} are allowed: actor.unroll_length + 1 holds the "
            "prompt and the response"
        )


def in_random_order(prompts: Sequence[Asked], seed: int) -> Iterator[Asked]:
    """Without end: all of them in one order, all again in another, and so on; equal for equal seeds."""
    random = np.random.default_rng(seed)
    while True:
        for index in random.permutation(len(prompts)):
            yield prompts[index]
