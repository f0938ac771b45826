"""A Llama of some 0.1 million parameters that reads one task."""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.workloads.language import tiny_models
from penstock.workloads.language.policy.adapter_network import make_network
from penstock.workloads.language.policy.policy_section import LanguageSection
from penstock.workloads.thoughts.thought_layout import Layout

_SPREAD: Final = 0.2
"""Of the first weights: with the usual 0.02 hops are learned in twice the updates, or not at all."""
_HEAD_WIDTH: Final = 16
_POSITIONS: Final = 128


def build_transformer(layout: Layout, *, seed: int, hidden: int = 64, layers: int = 2) -> Any:
    """Return a LlamaForCausalLM in float32 with random weights and an output layer of its own.

    hidden: its width, a multiple of 8; heads are 16 wide, or as little wider as divides it.
    """
    torch.manual_seed(seed)
    # RoPE turns pairs of numbers: a head has an even number of them.
    widths = range(_HEAD_WIDTH, hidden, 2)
    heads = hidden // next((width for width in widths if hidden % width == 0), hidden)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=layout.vocabulary,
            hidden_size=hidden,
            intermediate_size=(hidden * 8 // 3 + 3) // 4 * 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=_POSITIONS,
            tie_word_embeddings=False,
            initializer_range=_SPREAD,
            pad_token_id=layout.pad,
            bos_token_id=layout.bos,
            eos_token_id=layout.end,
        )
    )


def load_transformer(folder: Path) -> Any:
    """Return the model of a folder, in float32 and ready to answer; raises ConfigurationError."""
    return make_network(LanguageSection(model=str(folder), lora=False), seed=0)


def save_transformer(model: Any, layout: Layout, folder: Path) -> None:
    """Write model and tokenizer in Hugging Face's format."""
    tiny_models.save(model, tiny_models.build_tokenizer(layout.words), folder)
