"""The learner of language models beside a bare loop: what is compared does the same work."""

from pathlib import Path

import pytest
import torch

from benchmarks import language
from benchmarks.language import Loop
from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.responses import read_responses
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection

SHAPE = language.Shape(layers=1, width=32, vocabulary=40, responses=6)


@pytest.mark.parametrize("lora", [True, False])
def test_both_make_the_same_update(tmp_path: Path, lora: bool) -> None:
    torch.manual_seed(0)
    SHAPE.model().save_pretrained(tmp_path)
    given = LanguageSection(model=str(tmp_path), lora=lora, rank=4)
    # Not Adam's first step, in which rounding decides the sign of a gradient that is next to 0.
    section = TokenPPOSection(
        epochs=1, minibatches=1, adam_epsilon=1.0, learning_rate=1.0, value_clip=None, max_gradient_norm=1e9
    )
    tokens = torch.randint(3, SHAPE.vocabulary, (SHAPE.responses, 48))
    policy = LanguagePolicy(given, seed=0)
    before = {name: one.detach().clone() for name, one in policy.trained().items()}
    loop = Loop(given, section, tokens, language.PROMPT)
    _alike(policy, loop)
    batch = language.batch_of(tokens, SHAPE.vocabulary)
    responses = read_responses(batch)
    assert responses is not None
    with torch.no_grad():
        batch.log_prob[-32:] = loop.read(loop.network, tokens)[0].t()
    loop.update(responses.reward[responses.last])
    assert TokenPPO(policy, section, seed=0).update(batch, progress=0.0).applied
    theirs = [one.detach() for one in loop.network.parameters() if one.requires_grad]
    for own, other in zip(policy.trained().values(), theirs, strict=True):
        assert torch.allclose(own, other, atol=1e-5)
    assert any((one - before[name]).abs().max() > 1e-3 for name, one in policy.trained().items())


def test_the_shape_of_gpt2_has_its_parameters() -> None:
    with torch.device("meta"):
        model = language.SHAPES["gpt2"].model()
    positions = language.PROMPT + language.RESPONSE
    assert model.num_parameters() == 124_439_808 - (1024 - positions) * 768
    assert model.config.n_head == 12


def _alike(policy: LanguagePolicy, loop: Loop) -> None:
    """One adapter and one value head for both."""
    theirs = [one for one in loop.network.parameters() if one.requires_grad]
    with torch.no_grad():
        for own, other in zip(policy.trained().values(), theirs, strict=True):
            other.copy_(own)
        for own, other in zip(policy.critic.parameters(), loop.head.parameters(), strict=True):
            other.copy_(own)
