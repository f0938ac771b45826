"""Mutations of prompts are learned from embeddings alone, on prompts that training never saw.

Scores lie between random mutations (0) and the exact optimum (1): `tests.support.prompts.judged_prompts`.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.support.prompts.judged_prompts import fixed, judge, train
from tests.support.run.harness import Training

SMALL: Final = (
    "policy.hidden_sizes=[64, 64]", "policy.hidden_norm=none", "policy.dropout=0", "policy.activation=tanh",
    "policy.initialisation=orthogonal", "algorithm.learning_rate=2e-3", "algorithm.minibatches=16",
)  # fmt: skip
"""A network that is trained in seconds."""
PATIENCE_S: Final = 280.0


def test_a_small_network_comes_above_the_best_fixed_sequence(tmp_path: Path) -> None:
    options = [word for setting in SMALL for word in ("--set", setting)]
    run = tmp_path / "run"
    training = Training(
        run, "penstock/recipes/prompts.toml", "--seed", "1", "--total-steps", "24576", *options
    )
    code, _, errors = training.end(PATIENCE_S)
    assert code == 0, errors
    found, beside = judge(run, "builtin"), fixed("builtin")
    assert found.score >= 0.75
    assert found.score - beside.score > 2 * (found.error + beside.error)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_recipe_comes_within_a_fifth_of_the_optimum(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("chatterbot_corpus", reason="needs the extra data")
    train(seed, tmp_path / "run")
    found, beside = judge(tmp_path / "run"), fixed()
    assert found.score >= 0.8
    assert found.score - beside.score > 2 * (found.error + beside.error)
