"""The small transformer."""

from pathlib import Path

import torch

from tests.support.thoughts.small_thoughts import LAYOUT
from workloads.thoughts.start.transformer import build_transformer, load_transformer, save_transformer


def test_it_is_the_same_for_the_same_seed_and_comes_back_from_its_folder(tmp_path: Path) -> None:
    """With an output layer of its own."""
    one, same, other = (build_transformer(LAYOUT, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight is not one.get_input_embeddings().weight
    save_transformer(one, LAYOUT, tmp_path / "model")
    assert torch.equal(load_transformer(tmp_path / "model").lm_head.weight, one.lm_head.weight)
