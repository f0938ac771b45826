"""The network of a reward model, in Hugging Face format: built, and its outputs for rows of token ids."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, tensor
from transformers import AutoModelForSequenceClassification

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback import BadRows, Example, Judged, Preference, Scored
from penstock.workloads.language.loading import LOADING, place_of, reading
from penstock.workloads.language.reward.heads import Head
from penstock.workloads.language.settings import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, pad

BATCH_TOKENS: Final = 16_384
"""Most token places, padding too, of one forward pass: bounds its memory."""

HEADS: Final = ("score", "classifier")
"""What transformers calls the head of a model for classification."""

Network = Any
"""A transformers.PreTrainedModel or peft.PeftModel, which come without types."""


def build(base: str, settings: RewardTraining, pad_id: int, *, outputs: int = 1) -> Network:
    """A network with a new head in float32, with a new adapter for LoRA. outputs: numbers of the head."""
    torch.manual_seed(settings.seed)
    network = classifier(base, num_labels=outputs, pad_token_id=pad_id, problem_type="regression")
    if not settings.lora:
        return network
    heads = [name for name in HEADS if hasattr(network, name)]
    if not heads:
        raise ConfigurationError(
            f"model={base}: {type(network).__name__} has none of the heads {', '.join(HEADS)}"
        )
    return get_peft_model(
        network,
        LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules="all-linear",
            modules_to_save=heads,
        ),
    )


def classifier(base: str, **said: Any) -> Network:
    place = place_of("model", base)
    with reading("model", base, "cannot be read as a model for classification"), LOADING:
        return AutoModelForSequenceClassification.from_pretrained(
            place, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **said
        )


def max_tokens_of(network: Network, wanted: int) -> int:
    known = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    return wanted if not known else min(wanted, known)


def score_rows(
    network: Network, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> list[float]:
    """Scores of rows of token ids in their order: the first number of the head."""
    return [given[0] for given in output_rows(network, rows, batch_tokens)]


def output_rows(
    network: Network, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> list[list[float]]:
    """All numbers of the head for rows of token ids in their order, in batches of rows of similar length."""
    training = network.training
    network.eval()
    outputs: list[list[float]] = [[] for _ in rows]
    by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    try:
        with torch.inference_mode():
            for batch in _batches(by_length, rows, batch_tokens):
                ids, mask = pad(
                    [rows[index] for index in batch], network.config.get_text_config().pad_token_id
                )
                logits = network(
                    input_ids=ids.to(network.device), attention_mask=mask.to(network.device)
                ).logits
                for index, given in zip(batch, logits.float().cpu().tolist(), strict=True):
                    outputs[index] = given
    finally:
        network.train(training)
    return outputs


def _batches(order: Sequence[int], rows: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Consecutive parts of `order` whose padded size stays below the limit; a longer row is a batch alone."""
    batches: list[list[int]] = []
    for index in order:
        # Sorted by length: the newest row is the longest of its batch.
        if batches and (len(batches[-1]) + 1) * len(rows[index]) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


# ---- Examples as token ids, and batches of them: scored rows, then chosen ones, then rejected ones.


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
