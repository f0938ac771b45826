"""The network of a reward model, in Hugging Face format: built, and its outputs for rows of token ids."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.loading import LOADING, place_of, unreadable
from penstock.workloads.language.settings import RewardTraining
from penstock.workloads.language.tokenizer import pad

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
    try:
        with LOADING:
            return AutoModelForSequenceClassification.from_pretrained(
                place, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **said
            )
    except (OSError, ValueError) as error:
        raise unreadable("model", base, "cannot be read as a model for classification", error) from error


def max_tokens_of(network: Network, wanted: int) -> int:
    """`wanted`, or what the network's positions allow."""
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
