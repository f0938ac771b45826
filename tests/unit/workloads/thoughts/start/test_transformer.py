"""The small transformer."""

from pathlib import Path

import pytest
import torch

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts.start import build_transformer, load_transformer, save_transformer
from tests.support.thoughts.small_thoughts import LAYOUT


def test_it_is_the_same_for_the_same_seed_and_comes_back_from_its_folder(tmp_path: Path) -> None:
    one, same, other = (build_transformer(LAYOUT, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight is not one.get_input_embeddings().weight
    save_transformer(one, LAYOUT, tmp_path / "model")
    assert torch.equal(load_transformer(tmp_path / "model").lm_head.weight, one.lm_head.weight)


def test_one_whose_weights_are_cut_short_is_refused_by_its_folder(tmp_path: Path) -> None:
    save_transformer(build_transformer(LAYOUT, seed=0, hidden=8, layers=1), LAYOUT, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match=f"{tmp_path}.*cannot be read as a causal language model"):
        load_transformer(tmp_path)


@pytest.mark.parametrize(("hidden", "heads"), [(8, 1), (16, 1), (56, 2), (64, 4), (88, 4), (104, 4)])
def test_every_multiple_of_8_is_a_width(hidden: int, heads: int) -> None:
    network = build_transformer(LAYOUT, seed=0, hidden=hidden, layers=1)
    assert network.config.num_attention_heads == heads
    with torch.no_grad():
        assert network(input_ids=torch.tensor([[1, 5, 6]])).logits.isfinite().all()
