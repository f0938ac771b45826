"""Examples as token ids, and batches of them: scored rows, then chosen ones, then rejected ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, tensor

from penstock.workloads.language.feedback.examples import BadRows, Example, Judged, Preference, Scored
from penstock.workloads.language.reward.heads import Head
from penstock.workloads.language.tokenizer import Encoder, pad


@dataclass(frozen=True, slots=True)
class Item:
    """An example to learn from.

    rows: its one row of token ids, or (chosen, rejected). target: the score of one row, or the shares of K
    heads, NaN where unrated.
    """

    example: Example
    rows: tuple[list[int], ...]
    target: float | tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Data:
    """Encoded examples. cut: prompts that lost their beginning. other_key: rows that rate something else."""

    train: list[Item]
    validation: list[Item]
    bad: BadRows
    cut: int
    other_key: int


def encode(
    examples: Sequence[Example], encoder: Encoder, bad: BadRows, heads: Sequence[Head] = ()
) -> list[Item]:
    """Items of the examples that fit, in order; the others are counted in `bad`."""
    items = []
    for example in examples:
        try:
            items.append(_item(example, encoder, heads))
        except ValueError as error:
            bad.add(example.where, str(error))
    return items


def _item(example: Example, encoder: Encoder, heads: Sequence[Head]) -> Item:
    prompt = encoder.prompt_ids(example.prompt)
    texts = (example.chosen, example.rejected) if isinstance(example, Preference) else (example.response,)
    rows = tuple(encoder.join(prompt, encoder.response_ids(one)) for one in texts)
    match example:
        case Scored():
            return Item(example, rows, example.score)
        case Judged():
            return Item(example, rows, tuple(example.shares.get(head.name, math.nan) for head in heads))
        case Preference():
            return Item(example, rows, None)


@dataclass(frozen=True, slots=True)
class Collate:
    """Makes a batch: `input_ids`, `attention_mask` int64 [S + 2P, T], `targets` float32 [S], or [S, K]."""

    pad_id: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        scored, pairs = sides_of(items)
        rows = [item.rows[0] for item in (*scored, *pairs)] + [item.rows[1] for item in pairs]
        ids, mask = pad(rows, self.pad_id)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "targets": tensor([item.target for item in scored]).float(),
        }


def sides_of(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    return (
        [item for item in items if item.target is not None],
        [item for item in items if item.target is None],
    )
