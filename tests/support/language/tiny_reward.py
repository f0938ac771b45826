"""A tiny language model and a reward model on it, all of whose trained weights differ from new ones."""

from pathlib import Path
from typing import Final

import numpy as np
import torch

from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward import reward_model as networks
from penstock.workloads.language.reward.reward_model import Card, Network, Scores
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.settings import RewardTraining, quieten
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer
from penstock.workloads.rlhf.sentiment import WORDS, Sentiment

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
    tokenizer = tiny_models.build_tokenizer(WORDS)
    model = tiny_models.build_model(tokenizer, seed=0, spread=spread)
    told = [(task.prompt(rng), task.response(rng)) for _ in range(texts)]
    tiny_models.pretrain(model, tokenizer, told, steps=steps, seed=0)
    tiny_models.save(model, tokenizer, folder)
    return folder


def disturbed(base: Path, *, lora: bool = True) -> tuple[Network, Encoder]:
    """A network and what encodes for it; nothing was learned."""
    tokenizer = load_tokenizer(str(base))
    network = networks.build(str(base), RewardTraining(lora=lora, rank=4), tokenizer.pad_token_id)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
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
