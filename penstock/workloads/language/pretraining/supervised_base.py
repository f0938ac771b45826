"""Trains the base of a chat on conversations: a small model of their words, or a model that is there.

    conversations ─► by text: to train, to measure ─► token ids ─► AdamW, cosine ─► DIR

The loss is the mean cross-entropy of the assistant's tokens. DIR is a folder of Hugging Face's form with a
chat template; `base.json` in it says what was learned from what.
"""

import hashlib
import json
import logging
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM

from penstock.config.sections import Count, Positive, PositiveReal, Section
from penstock.config.settings import ConfigurationError
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.feedback import BadRows
from penstock.workloads.language.loading import LOADING, place_of, reading
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.pretraining.conversation_files import (
    PACKAGE,
    Conversation,
    as_typed,
    packaged_conversations,
    read_conversations,
)
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.settings import assigned_settings
from penstock.workloads.language.tokenizer import Tokenizer, load_tokenizer

# ---- A conversation as token ids: what people said is context, what the assistant said is learned.


def supervised_rows(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, max_tokens: int, bad: BadRows
) -> list[tiny_models.Row]:
    """Return the conversations as rows of at most `max_tokens`, each cut behind its last answer that fits.

    One whose first answer does not fit, or whose text the tokenizer does not take, is counted in `bad`.
    """
    encoder, rows = ChatEncoder(tokenizer), []
    for one in conversations:
        try:
            rows.append(_row(one.messages, encoder, tokenizer, max_tokens))
        except ValueError as error:
            bad.add(one.where, str(error))
    return rows


def _row(
    messages: Sequence[Message], encoder: ChatEncoder, tokenizer: Tokenizer, max_tokens: int
) -> tiny_models.Row:
    ids, learned = list[int](), list[bool]()
    begun, answered = 0, list[Message]()
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        new = messages[begun:place]
        end = tokenizer.eos_token_id
        context = encoder.follow(answered, end, new) if answered else encoder.begin(new)
        answer = [*tokenizer(message.content, add_special_tokens=False)["input_ids"], end]
        if len(ids) + len(context) + len(answer) > max_tokens:
            break
        ids += [*context, *answer]
        learned += [False] * len(context) + [True] * len(answer)
        answered = [*messages[:place]]
        begun = place + 1
    if not ids:
        raise ValueError(f"its first answer does not fit in {max_tokens} tokens: raise max_tokens")
    return tiny_models.Row(tuple(ids), tuple(learned))


log = logging.getLogger(__name__)

RESULT: Final = "base.json"


class Pretraining(Section):
    """Of a base. The defaults suit a small model."""

    epochs: PositiveReal = 10.0
    """Passes over the conversations."""
    batch: Positive = 32
    """Conversations of one step."""
    learning_rate: PositiveReal = 3e-3
    """Highest step size; a model that is there wants about 2e-5."""
    warmup: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the steps in which the step size rises from 0."""
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 256
    """Longest conversation; what is longer is cut behind its last answer that fits."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of the conversations that only measure."""
    pieces: Annotated[int, Field(ge=300, le=100_000)] = 4096
    """Most words, and pieces of words, that a small model has as one token each."""
    as_typed: bool = False
    """Conversations are learned a second time, with what people say in small letters and without marks."""
    hidden: Positive = 64
    """Width of a small model, a multiple of 4."""
    layers: Positive = 2
    """Layers of a small model."""
    seed: Count = 0
    """Of new weights and the order of the conversations."""


def pretraining_settings(assignments: Sequence[str] = ()) -> Pretraining:
    settings = assigned_settings(Pretraining, assignments)
    if settings.hidden % 4:
        raise ConfigurationError(f"hidden={settings.hidden}: must be a multiple of 4, its heads")
    return settings


def pretrain(
    files: Sequence[Path],
    out: Path,
    settings: Pretraining,
    *,
    model: str | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Train a base and write it; returns what `base.json` says.

    files: of conversations; none: those of the package chatterbot-corpus. model: folder or hub name of one
    that is trained further; None: a small one of the conversations' words.
    """
    if (out / "config.json").exists():
        raise ConfigurationError(f"--out {out}: holds a model already: choose another folder")
    conversations, bad = read_conversations(files) if files else (packaged_conversations(), BadRows())
    train, held = _split(conversations, settings)
    if settings.as_typed:
        train += [as_typed(one) for one in train]
    tokenizer, network = _small(train, settings) if model is None else _given(model, settings)
    rows, held_rows = (supervised_rows(side, tokenizer, settings.max_tokens, bad) for side in (train, held))
    if not rows or (settings.held_out and not held_rows):
        lines = "\n".join(["no conversation is left to train on, or to hold out; give more", *bad.lines()])
        raise ConfigurationError(f"{', '.join(map(str, files)) or PACKAGE}: {lines}")
    with tiny_models.one_thread() if model is None else nullcontext():
        before = _loss(network, held_rows, tokenizer, settings)
        _fit(network, rows, tokenizer, settings, stop)
        after = _loss(network, held_rows, tokenizer, settings)
    result = {
        "conversations": len(rows),
        "held_out": len(held_rows),
        "bad": bad.count,
        "bad_shown": bad.lines(),
        "loss_before": before,
        "loss": after,
        "perplexity": None if after is None else math.exp(min(after, 700.0)),
        "model": model,
        "settings": settings.model_dump(mode="json"),
    }
    tiny_models.save(network, tokenizer, out)
    (out / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return result


def _split(
    conversations: Sequence[Conversation], settings: Pretraining
) -> tuple[list[Conversation], list[Conversation]]:
    """Return both sides; which one a conversation is on, its text alone decides."""
    sides: tuple[list[Conversation], list[Conversation]] = [], []
    for one in conversations:
        text = json.dumps([(said.role, said.content) for said in one.messages])
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        sides[place < settings.held_out].append(one)
    return sides


def _small(conversations: Sequence[Conversation], settings: Pretraining) -> tuple[Tokenizer, Any]:
    """Return a small model, whose tokens are the commonest words and pieces of the others."""
    texts = (message.content for one in conversations for message in one.messages)
    tokenizer = tiny_models.learn_tokenizer(texts, size=settings.pieces, max_tokens=settings.max_tokens)
    network = tiny_models.build_model(
        tokenizer, seed=settings.seed, hidden=settings.hidden, layers=settings.layers
    )
    network.config.max_position_embeddings = settings.max_tokens
    return tokenizer, network


def _given(model: str, settings: Pretraining) -> tuple[Tokenizer, Any]:
    tokenizer = load_tokenizer(model)
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            f"--model {model}: its tokenizer has no chat template: set tokenizer.chat_template and save it"
        )
    with reading("--model", model, "cannot be read"), LOADING:
        network = AutoModelForCausalLM.from_pretrained(
            place_of("model", model), dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    known = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    if known and known < settings.max_tokens:
        raise ConfigurationError(f"max_tokens={settings.max_tokens}: {model} reads {known} tokens")
    return tokenizer, network


def _fit(
    network: Any,
    rows: Sequence[tiny_models.Row],
    tokenizer: Tokenizer,
    settings: Pretraining,
    stop: threading.Event | None,
) -> None:
    steps = max(1, round(settings.epochs * len(rows) / settings.batch))

    def say(step: int, loss: float) -> None:
        if step % max(1, steps // 20) == 0:
            log.info("training", extra={"step": f"{step}/{steps}", "loss": loss})

    tiny_models.teach(
        network,
        rows,
        tokenizer,
        steps=steps,
        warmup=round(settings.warmup * steps),
        seed=settings.seed,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        max_norm=1.0,
        stop=stop,
        on_step=say,
    )


def _loss(
    network: Any, rows: Sequence[tiny_models.Row], tokenizer: Tokenizer, settings: Pretraining
) -> float | None:
    """Return the mean cross-entropy of the assistant's tokens, in nats; None of no rows."""
    if not rows:
        return None
    network.eval()
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(rows), settings.batch):
            loss, count = tiny_models.cross_entropy(network, rows[start : start + settings.batch], tokenizer)
            total, tokens = total + float(loss), tokens + count
    return total / tokens
