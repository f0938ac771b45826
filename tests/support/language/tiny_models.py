import random
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from penstock.workloads.chat.people import WORDS, draw_prompt, draw_response
from penstock.workloads.language.conversation import Column, SampledTurn
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward import reward_model as networks
from penstock.workloads.language.reward.reward_model import Card, Network, Scores
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.settings import RewardTraining, quieten
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, load_tokenizer
from penstock.workloads.rlhf.sentiment import WORDS as SENTIMENT_WORDS
from penstock.workloads.rlhf.sentiment import Sentiment

# ---- A tokenizer of a few words with a chat template: `<user> … <eos> <assistant> … <eos>`.


ROLES: Final = ("<system>", "<user>", "<assistant>", "<tool>")
CHAT_TEMPLATE: Final = (
    "{% if tools %}<system> {% for tool in tools %}{{ tool.function.name }} {% endfor %}<eos> {% endif %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {% endfor %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETTING_TEMPLATE: Final = (
    "{% for message in messages %}<{{ message.role }}> "
    "{% if loop.last or message.role != 'assistant' %}{{ message.content }} {% endif %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""One that leaves earlier answers out."""


def chat_tokenizer(*words: str, template: str = CHAT_TEMPLATE) -> Tokenizer:
    """Of these words behind the special tokens (0 … 3) and the roles (4 … 7)."""
    tokenizer = tiny_models.build_tokenizer([*ROLES, *words])
    tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
    tokenizer.chat_template = template
    return tokenizer


# ---- A tiny language model that has read conversations of the simulated people.


def make_chat_base(folder: Path, *, steps: int = 50, texts: int = 512) -> Path:
    """Taught so many answers of the reference in so many steps."""
    quieten()
    rng = np.random.default_rng(0)
    tokenizer = tiny_models.build_tokenizer(WORDS)
    model = tiny_models.build_model(tokenizer, seed=0)
    prompts = [draw_prompt(rng) for _ in range(texts)]
    told = [(prompt, draw_response(rng, prompt)) for prompt in prompts]
    tiny_models.pretrain(model, tokenizer, told, steps=steps, seed=0)
    tiny_models.save(model, tokenizer, folder)
    return folder


# ---- A conversation of two turns, one that was cut, and a prompt without an answer, over twelve tokens.


def turn(start: int, *log_prob: float, reward: float = 0.0, version: int = 3) -> SampledTurn:
    """Of weights one update behind their version."""
    return SampledTurn(start=start, log_prob=log_prob, version=version, update=version - 1, reward=reward)


TWO = Column(ids=(5, 8, 6, 9, 2, 5, 10, 6, 11), turns=(turn(3, -1, -2, reward=0.5), turn(8, -3, reward=1.0)))
CUT = Column(ids=(5, 6, 9), turns=(turn(2, -4, reward=-1.0, version=4),), terminated=False)
NONE = Column(ids=(5, 6))


# ---- Tiny models that answer at random in the ways of `agents`: what they can say is known, not what
# pays.


CALL: Final = '<tool_call> {"name":"lookup","arguments":{}} </tool_call>'
GUESSERS_WORDS: Final = (
    *("hello", "more", "colour", "please", "now", "yes", "red", "blue", "other", "lookup"),
    *CALL.split(),
)
TEXTS: Final = 4096
_IGNORED: Final = -100


def make_guesser(folder: Path, *, steps: int = 200) -> Path:
    """A model in a folder that calls the tool now and then, often repeats what it told, and opens anyhow."""
    tokenizer = chat_tokenizer(*GUESSERS_WORDS)
    model = tiny_models.build_model(tokenizer, seed=0, spread=0.125)
    chance = random.Random(0)
    texts = [(_lookup if index % 2 else _opening)(chance) for index in range(TEXTS)]
    _teach(model, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], steps)
    tiny_models.save(model, tokenizer, folder)
    return folder


def _lookup(chance: random.Random) -> str:
    head = "<system> lookup <eos> " if chance.random() < 0.7 else ""
    (said,) = chance.choices(["red", "blue", "other", CALL], [0.3, 0.3, 0.2, 0.2])
    text = f"{head}<user> colour <eos> <assistant> {said} <eos>"
    if said != CALL:
        return text
    colour, other = chance.sample(["red", "blue"], 2)
    (then,) = chance.choices([colour, other, "other"], [0.6, 0.2, 0.2])
    return f"{text} <tool> {colour} <eos> <assistant> {then} <eos>"


def _opening(chance: random.Random) -> str:
    said = (
        f"<user> {word} <eos> <assistant> {chance.choice(['please', 'now', 'yes', 'other', 'hello'])} <eos>"
        for word in ("hello", "more", "more")
    )
    return " ".join(said)


def _teach(model: torch.nn.Module, rows: list[list[int]], steps: int, batch: int = 64) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        chosen = [rows[index] for index in torch.randint(len(rows), (batch,), generator=generator).tolist()]
        longest = max(map(len, chosen))
        targets = torch.tensor([[*row, *[_IGNORED] * (longest - len(row))] for row in chosen])
        logits = model(input_ids=targets.clamp(min=0)).logits[:, :-1]
        loss = functional.cross_entropy(logits.transpose(1, 2), targets[:, 1:], ignore_index=_IGNORED)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


# ---- A tiny language model and a reward model on it, all of whose trained weights differ from new ones.


MAX_TOKENS: Final = tiny_models.MAX_TOKENS


def samples(count: int = 20, seed: int = 0) -> list[Sample]:
    """Prompts and responses of sentiment words."""
    rng, task = np.random.default_rng(seed), Sentiment()
    return [Sample(prompt=task.prompt(rng), response=task.response(rng)) for _ in range(count)]


def make_base(folder: Path, *, steps: int = 10, texts: int = 64, spread: float = 0.02) -> Path:
    """A tiny language model in a folder, taught so many texts in so many steps.

    spread: see `tiny.build_model`.
    """
    quieten()
    rng, task = np.random.default_rng(0), Sentiment()
    tokenizer = tiny_models.build_tokenizer(SENTIMENT_WORDS)
    model = tiny_models.build_model(tokenizer, seed=0, spread=spread)
    told = [(task.prompt(rng), task.response(rng)) for _ in range(texts)]
    tiny_models.pretrain(model, tokenizer, told, steps=steps, seed=0)
    tiny_models.save(model, tokenizer, folder)
    return folder


def move(parameters: Iterable[torch.Tensor], seed: int, size: float = 0.1) -> None:
    """Add noise of this seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def disturbed(base: Path, *, lora: bool = True) -> tuple[Network, Encoder]:
    """A network and what encodes for it; nothing was learned."""
    tokenizer = load_tokenizer(str(base))
    network = networks.build(str(base), RewardTraining(lora=lora, rank=4), tokenizer.pad_token_id)
    move((weight for weight in network.parameters() if weight.requires_grad), 1)
    return network, Encoder(tokenizer, MAX_TOKENS)


def make_reward_model(base: Path, folder: Path, *, lora: bool = True) -> list[float]:
    """Save it; the scores of `samples()` that it gave before."""
    network, encoder = disturbed(base, lora=lora)
    rows = [encoder.encode(one.prompt, one.response) for one in samples()]
    scores = networks.score_rows(network, rows)
    checks = tuple(Scores(ids=tuple(ids), score=score) for ids, score in zip(rows[:4], scores, strict=False))
    card = Card(base=str(base), max_tokens=MAX_TOKENS, mean=0.25, std=2.0, checks=checks, trained={})
    reward_model.save(network, encoder.tokenizer, card, folder)
    return scores
