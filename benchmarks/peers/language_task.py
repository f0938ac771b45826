"""The task on which language models are compared: a GPT-2 of random weights and prompts.

The model has 0.13 million parameters. `python -m benchmarks.peers.language_task FOLDER` writes FOLDER/model,
with a tokenizer of one token per word, and FOLDER/prompts.jsonl. No dropout: a trainer that does not switch
it off would do more work.
"""

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from workloads.language.quiet import quieten
from workloads.language.tiny_models import SPECIAL, build_tokenizer, save

VOCABULARY: Final = 256
POSITIONS: Final = 256
PROMPT_WORDS: Final = 15
"""Words of a prompt behind `<bos>`."""
PROMPTS: Final = 1024


def make(folder: Path) -> None:
    """Write the folder; equal for equal versions of torch and numpy."""
    words = [f"w{number}" for number in range(VOCABULARY - len(SPECIAL))]
    tokenizer = build_tokenizer(words)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            n_embd=64,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    save(model, tokenizer, folder / "model")
    drawn = np.random.default_rng(0).integers(len(words), size=(PROMPTS, PROMPT_WORDS))
    rows = ({"prompt": " ".join(words[index] for index in row)} for row in drawn)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    quieten()
    make(Path(sys.argv[1]))
