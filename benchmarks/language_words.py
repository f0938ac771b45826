"""The task of sentiment words as a folder.

Prompts, and a tiny model that writes as the reference policy does.

`python -m benchmarks.language_words FOLDER` writes FOLDER/model and FOLDER/prompts.jsonl, in a minute.
"""

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
import torch

from workloads.language.quiet import quieten
from workloads.language.tiny_models import build_model, build_tokenizer, pretrain, save
from workloads.rlhf.sentiment import WORDS, Sentiment

TEXTS: Final = 4000
STEPS: Final = 400
SPREAD: Final = 0.125
PROMPTS: Final = 512


def make(folder: Path) -> None:
    """Write the base model as `penstock train recipes/rlhf-tiny.toml` makes it, and the prompts."""
    rng, task = np.random.default_rng(0), Sentiment()
    texts = [(task.prompt(rng), task.response(rng)) for _ in range(TEXTS)]
    tokenizer = build_tokenizer(WORDS)
    model = build_model(tokenizer, seed=0, spread=SPREAD)
    pretrain(model, tokenizer, texts, steps=STEPS, seed=0)
    save(model, tokenizer, folder / "model")
    rows = [{"prompt": task.prompt(rng)} for _ in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    quieten()
    torch.set_num_threads(1)
    make(Path(sys.argv[1]))
