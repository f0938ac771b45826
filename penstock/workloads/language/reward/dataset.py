"""Examples as token ids, and batches of them.

scored rows …, chosen rows …, rejected rows …      one forward pass for all rows of a batch
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, tensor

from penstock.workloads.language.feedback.examples import BadRows, Example, Preference, Scored
from penstock.workloads.language.tokenizer import Encoder, pad


@dataclass(frozen=True, slots=True)
class Item:
    """An example to learn from.

    rows: its one row of token ids, or (chosen, rejected). target: the score of one row.
    """

    example: Example
    rows: tuple[list[int], ...]
    target: float | None


@dataclass(frozen=True, slots=True)
class Data:
    """Encoded examples. cut: prompts that lost their beginning."""

    train: list[Item]
    validation: list[Item]
    bad: BadRows
    cut: int


def encode(examples: Sequence[Example], encoder: Encoder, bad: BadRows) -> list[Item]:
    """Items of the examples that fit, in order; the others are counted in `bad`."""
    items = []
    for example in examples:
        try:
            items.append(_item(example, encoder))
        except ValueError as error:
            bad.add(example.where, str(error))
    return items


def _item(example: Example, encoder: Encoder) -> Item:
    prompt = encoder.prompt_ids(example.prompt)
    if isinstance(example, Scored):
        return Item(example, (encoder.join(prompt, encoder.response_ids(example.response)),), example.score)
    both = (example.chosen, example.rejected)
    return Item(example, tuple(encoder.join(prompt, encoder.response_ids(one)) for one in both), None)


@dataclass(frozen=True, slots=True)
class Collate:
    """Makes a batch: `input_ids`, `attention_mask` int64 [S + 2P, T], `targets` float32 [S]."""

    pad_id: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Of S scored examples and P pairs."""
        scored = [item for item in items if item.target is not None]
        pairs = [item for item in items if isinstance(item.example, Preference)]
        rows = [item.rows[0] for item in (*scored, *pairs)] + [item.rows[1] for item in pairs]
        ids, mask = pad(rows, self.pad_id)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "targets": tensor([item.target for item in scored]).float(),
        }
