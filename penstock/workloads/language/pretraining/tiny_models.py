"""A language model of some 0.1 million parameters, made and pre-trained on the spot."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tokenizers import Tokenizer as WordTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_scheduler

from penstock.runtime.retry import Interrupted
from penstock.workloads.language.prompt import Prompt
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, pad

SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
MAX_TOKENS: Final = 64
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %} {{ message.content }}"
    "{% if message.role == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
)
"""Of a model that knows no roles: a single message is the prompt that the text alone would be."""
SPOKEN: Final = ("<pad>", "<bos>", "<eos>", "<ask>")
SPOKEN_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}<ask>{% endif %}{% endfor %}"
)
"""Of `learn_tokenizer`: what somebody asks ends with `<ask>`, an answer with the end token."""
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
    """A tokenizer of these words, split at blanks; any other word is `<unk>`."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    inner = WordTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - no password
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(inner, MAX_TOKENS, unk_token="<unk>")  # noqa: S106


def _wrapped(inner: WordTokenizer, max_tokens: int, **named: Any) -> Tokenizer:
    """As transformers has it, with `<bos>` before each text."""
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
    """The (prompt, response) that such a model can read whole: with `<bos>` and `<eos>`, MAX_TOKENS."""
    encoder = Encoder(tokenizer, MAX_TOKENS)
    return [
        (prompt, response)
        for prompt, response in texts
        if len(encoder.prompt_ids(prompt)) + len(encoder.response_ids(response)) <= MAX_TOKENS
    ]


def build_model(
    tokenizer: Tokenizer, *, seed: int, hidden: int = 64, layers: int = 2, spread: float = 0.02
) -> Any:
    """A LlamaForCausalLM in float32 with random weights.

    spread: their standard deviation. Output weights are those of the embedding, which adapters leave alone,
    and what they multiply has a fixed norm: the most that a logit can become is proportional to it.
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
    """Have torch compute in one thread: its operations are shorter than the wait for a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Row(NamedTuple):
    """Token ids, and which of them are learned."""

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
    """Teach a model to continue prompts; returns the last loss, in nats per token."""
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
    """Teach a model rows by cross-entropy; returns the last loss, in nats per token.

    warmup: steps in which the rate rises. max_norm: of a gradient. on_step: called with each loss. Raises
    Interrupted once `stop` is set; the model is then of no use.
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
    """Return the sum over the learned tokens, in nats, and how many they are."""
    ids, mask = pad([one.ids for one in rows], tokenizer.pad_token_id)
    learned, _ = pad([list(map(int, one)) for one in (row.learned for row in rows)], 0)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    targets = ids.masked_fill(learned == 0, _IGNORED)[:, 1:]
    loss = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=_IGNORED, reduction="sum")
    return loss, int((targets != _IGNORED).sum())


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
