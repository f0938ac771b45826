"""Small language models for built-in tasks, and the base of a chat, pretrained on conversations.

    conversations ─► by text: to train, to measure ─► token ids ─► AdamW, cosine ─► DIR

The loss of a base is the mean cross-entropy of the assistant's tokens. DIR is a folder in Hugging Face's
format with a chat template; `base.json` in it records the training.
"""

import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
from pydantic import Field
from tokenizers import Tokenizer as WordTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_scheduler,
)

from penstock.config.sections import Count, Positive, PositiveReal, Section
from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.feedback import BadRows
from penstock.workloads.language.pretraining.conversation_files import (
    PACKAGE,
    Conversation,
    as_typed,
    packaged_conversations,
    read_conversations,
)
from penstock.workloads.language.prompt import Message, Prompt
from penstock.workloads.language.settings import LOADING, assigned_settings, place_of, reading
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, load_tokenizer, pad

log = logging.getLogger(__name__)

SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
MAX_TOKENS: Final = 64
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %} {{ message.content }}"
    "{% if message.role == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
)
"""Template of a model without roles: a single message makes the prompt of its text."""
SPOKEN: Final = ("<pad>", "<bos>", "<eos>", "<ask>")
SPOKEN_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}<ask>{% endif %}{% endfor %}"
)
"""Template of `learn_tokenizer`: a question ends with `<ask>`, an answer with the end token."""
_IGNORED: Final = -100


def learn_tokenizer(texts: Iterable[str], *, size: int, max_tokens: int) -> Tokenizer:
    inner = WordTokenizer(models.BPE())
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPOKEN), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = _wrapped(inner, max_tokens, additional_special_tokens=["<ask>"])
    tokenizer.chat_template = SPOKEN_TEMPLATE
    return tokenizer


def build_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of these words, split at blanks; any other word is `<unk>`."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    inner = WordTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - no password
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(inner, MAX_TOKENS, unk_token="<unk>")  # noqa: S106


def _wrapped(inner: WordTokenizer, max_tokens: int, **named: Any) -> Tokenizer:
    bos = ("<bos>", inner.token_to_id("<bos>"))
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",  # noqa: S106 - no password
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        model_max_length=max_tokens,
        **named,
    )


def fitting(tokenizer: Tokenizer, texts: Sequence[tuple[Prompt, str]]) -> list[tuple[Prompt, str]]:
    """Return the (prompt, response) pairs that fit: with `<bos>` and `<eos>` at most MAX_TOKENS."""
    encoder = Encoder(tokenizer, MAX_TOKENS)
    return [
        (prompt, response)
        for prompt, response in texts
        if len(encoder.prompt_ids(prompt)) + len(encoder.response_ids(response)) <= MAX_TOKENS
    ]


def build_model(
    tokenizer: Tokenizer, *, seed: int, hidden: int = 64, layers: int = 2, spread: float = 0.02
) -> Any:
    """Return a LlamaForCausalLM in float32 with random weights.

    spread: their standard deviation. The largest logit is proportional to it: the output weights are those of
    the embedding, which adapters do not change, and their input has a fixed norm.
    """
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=True,
            initializer_range=spread,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, because a second thread would cost more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Row(NamedTuple):
    """Token ids, and a flag for each that is learned."""

    ids: Sequence[int]
    learned: Sequence[bool]


@one_thread()
def pretrain(
    model: Any,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[Prompt, str]],
    *,
    steps: int,
    seed: int,
    stop: threading.Event | None = None,
) -> float:
    """Train a model to continue prompts; returns the last loss, in nats per token."""
    encoder = Encoder(tokenizer, MAX_TOKENS)
    encoded = [encoder.encode(prompt, response) for prompt, response in texts]
    rows = [Row(ids, [True] * len(ids)) for ids in encoded]
    return teach(model, rows, tokenizer, steps=steps, warmup=steps // 20, seed=seed, stop=stop)


def teach(
    model: Any,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    steps: int,
    warmup: int,
    seed: int,
    batch: int = 64,
    learning_rate: float = 3e-3,
    max_norm: float = float("inf"),
    stop: threading.Event | None = None,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
) -> float:
    """Train a model on rows by cross-entropy; returns the last loss, in nats per token.

    warmup: steps in which the learning rate rises. max_norm: of a gradient. on_step: called with the number
    and the loss of each step. Raises Interrupted once `stop` is set; the model is then half trained.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = get_scheduler("cosine", optimiser, num_warmup_steps=warmup, num_training_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    last = float("nan")
    model.train()
    for step in range(steps):
        if stop is not None and stop.is_set():
            raise Interrupted
        chosen = torch.randint(len(rows), (batch,), generator=generator).tolist()
        total, count = cross_entropy(model, [rows[index] for index in chosen], tokenizer)
        optimiser.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimiser.step()
        schedule.step()
        last = float(total.detach()) / count
        on_step(step, last)
    model.eval()
    return last


def cross_entropy(model: Any, rows: Sequence[Row], tokenizer: Tokenizer) -> tuple[torch.Tensor, int]:
    """Return the loss summed over the learned tokens, in nats, and their number."""
    ids, mask = pad([one.ids for one in rows], tokenizer.pad_token_id)
    learned, _ = pad([list(map(int, one)) for one in (row.learned for row in rows)], 0)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    targets = ids.masked_fill(learned == 0, _IGNORED)[:, 1:]
    loss = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=_IGNORED, reduction="sum")
    return loss, int((targets != _IGNORED).sum())


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- Conversations as rows: the users' tokens are context, and the assistant's tokens are learned.


def supervised_rows(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, max_tokens: int, bad: BadRows
) -> list[Row]:
    """Return the conversations as rows of at most `max_tokens`, each cut after its last answer that fits.

    `bad` counts conversations whose first answer does not fit, and those that the tokenizer does not take.
    """
    encoder, rows = ChatEncoder(tokenizer), []
    for one in conversations:
        try:
            rows.append(_row(one, encoder, tokenizer, max_tokens))
        except ValueError as error:
            bad.add(one.where, str(error))
    return rows


def _row(one: Conversation, encoder: ChatEncoder, tokenizer: Tokenizer, max_tokens: int) -> Row:
    ids, learned, messages = list[int](), list[bool](), one.messages
    begun, answered = 0, list[Message]()
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        new = messages[begun:place]
        end = encoder.end_id
        context = encoder.follow(answered, end, new) if answered else encoder.begin(new)
        answer = [*tokenizer(message.content, add_special_tokens=False)["input_ids"], end]
        if len(ids) + len(context) + len(answer) > max_tokens:
            break
        ids += [*context, *answer]
        learned += [False] * len(context) + [place not in one.unlearned] * len(answer)
        answered = [*messages[:place]]
        begun = place + 1
    if not any(learned):
        raise ValueError(f"no answer that is learned fits in {max_tokens} tokens: raise max_tokens")
    return Row(tuple(ids), tuple(learned))


RESULT: Final = "base.json"


class Pretraining(Section):
    """Settings of a base's training. The defaults suit a small model."""

    epochs: PositiveReal = 10.0
    """Passes over the conversations."""
    batch: Positive = 32
    """Conversations of one step."""
    learning_rate: PositiveReal = 3e-3
    """Highest step size; an existing model wants about 2e-5."""
    warmup: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the steps in which the step size rises from 0."""
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 256
    """Longest conversation; a longer one is cut after its last answer that fits."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of the conversations that only validate."""
    pieces: Annotated[int, Field(ge=300, le=100_000)] = 4096
    """Most tokens in a small model's vocabulary."""
    as_typed: bool = False
    """Learn each conversation a second time, with the users' messages in lower case and without marks."""
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


def pretrain_base(
    files: Sequence[Path],
    out: Path,
    settings: Pretraining,
    *,
    model: str | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Train a base and write it; returns the content of `base.json`.

    files: of conversations; none: those of the package chatterbot-corpus. model: folder or hub name of a
    model that is trained further; None: a new small one. Raises ConfigurationError, Interrupted.
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
    with one_thread() if model is None else nullcontext():
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
    save(network, tokenizer, out)
    (out / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return result


def _split(
    conversations: Sequence[Conversation], settings: Pretraining
) -> tuple[list[Conversation], list[Conversation]]:
    """Return the training and the validation side; the side of a conversation depends on its text alone."""
    sides: tuple[list[Conversation], list[Conversation]] = [], []
    for one in conversations:
        text = json.dumps([(message.role, message.content) for message in one.messages])
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        sides[place < settings.held_out].append(one)
    return sides


def _small(conversations: Sequence[Conversation], settings: Pretraining) -> tuple[Tokenizer, Any]:
    """Return a small model; its tokens are the most frequent words and pieces of words."""
    texts = (message.content for one in conversations for message in one.messages)
    tokenizer = learn_tokenizer(texts, size=settings.pieces, max_tokens=settings.max_tokens)
    network = build_model(tokenizer, seed=settings.seed, hidden=settings.hidden, layers=settings.layers)
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
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    settings: Pretraining,
    stop: threading.Event | None,
) -> None:
    steps = max(1, round(settings.epochs * len(rows) / settings.batch))

    def say(step: int, loss: float) -> None:
        if step % max(1, steps // 20) == 0:
            log.info("training", extra={"step": f"{step}/{steps}", "loss": loss})

    teach(
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


def _loss(network: Any, rows: Sequence[Row], tokenizer: Tokenizer, settings: Pretraining) -> float | None:
    """Return the mean cross-entropy of the assistant's tokens, in nats; None without rows."""
    if not rows:
        return None
    network.eval()
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(rows), settings.batch):
            loss, count = cross_entropy(network, rows[start : start + settings.batch], tokenizer)
            total, tokens = total + float(loss), tokens + count
    return total / tokens
