"""A tiny language model that has read conversations of simulated people, answered as the reference does."""

from pathlib import Path

import numpy as np

from penstock.workloads.chat.chat_environment import people_tokenizer
from penstock.workloads.chat.people import draw_next_prompt, draw_prompt, draw_response
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.prompt import Message, Prompt
from penstock.workloads.language.settings import quieten


def make_people_base(
    folder: Path, *, steps: int = 300, texts: int = 4000, turns: int = 1, seed: int = 0
) -> Path:
    """Write a model that was taught so many conversations of so many turns; returns the folder.

    What people ask is taught with the answers, so that it soon knows which words go together.
    """
    quieten()
    rng = np.random.default_rng(seed)
    tokenizer = people_tokenizer()
    model = tiny_models.build_model(tokenizer, seed=seed)
    told = [_conversation(rng, turns) for _ in range(texts)]
    tiny_models.pretrain(model, tokenizer, told, steps=steps, seed=seed)
    tiny_models.save(model, tokenizer, folder)
    return folder


def _conversation(rng: np.random.Generator, turns: int) -> tuple[Prompt, str]:
    """Return the messages up to the last answer, and that."""
    messages, asked = list[Message](), draw_prompt(rng)
    for _ in range(turns - 1):
        messages += [Message("user", asked), Message("assistant", draw_response(rng, asked))]
        asked = draw_next_prompt(rng, asked)
    return (*messages, Message("user", asked)), draw_response(rng, asked)
