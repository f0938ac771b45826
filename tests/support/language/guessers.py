"""Tiny models that answer at random in the ways of `agents`: what they can say is known, not what pays."""

import random
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional

from penstock.workloads.language.pretraining import tiny_models
from tests.support.language.chat_words import chat_tokenizer

CALL: Final = '<tool_call> {"name":"lookup","arguments":{}} </tool_call>'
WORDS: Final = (
    *("hello", "more", "colour", "please", "now", "yes", "red", "blue", "other", "lookup"),
    *CALL.split(),
)
TEXTS: Final = 4096
_IGNORED: Final = -100


def make_guesser(folder: Path, *, steps: int = 200) -> Path:
    """A model in a folder that calls the tool now and then, often repeats what it told, and opens anyhow."""
    tokenizer = chat_tokenizer(*WORDS)
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
