"""A tiny language model that has read conversations of the simulated people."""

from pathlib import Path

import numpy as np

from penstock.workloads.chat.people import WORDS, draw_prompt, draw_response
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.settings import quieten


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
