"""What a language policy answers, and what of it is published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy import weights
from penstock.policy.tokens import TokenRows
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection, build, language_section

LENGTHS = (9, 4, 6)


def policy_of(base: Path, **kwargs: Any) -> LanguagePolicy:
    """A policy on the tiny model."""
    return LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0, **kwargs), seed=0)


def disturb(policy: LanguagePolicy, seed: int = 1) -> LanguagePolicy:
    """With other weights than a new one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (*policy.trained().values(), *policy.critic.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def rows_of(policy: LanguagePolicy, lengths: tuple[int, ...] = LENGTHS, more: int = 0) -> TokenRows:
    """Random tokens of these lengths in which every next token is an action.

    `more`: places of padding added.
    """
    generator = torch.Generator().manual_seed(0)
    length = max(lengths) + more
    full = torch.zeros(len(lengths), length + 1, dtype=torch.long)
    for row, own in enumerate(lengths):
        full[row, : own + 1] = torch.randint(policy.vocabulary, (own + 1,), generator=generator)
    present = torch.arange(length) < torch.tensor(lengths)[:, None]
    place = present.flatten().nonzero().squeeze(1)
    return TokenRows(full[:, :-1], present, place, full[:, 1:].flatten()[place])


def test_a_fresh_adapter_is_the_reference(base: Path) -> None:
    policy = policy_of(base)
    rows = rows_of(policy)
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = bare(input_ids=rows.tokens, attention_mask=rows.present.long()).logits
        expected = logits.flatten(0, 1)[rows.place].log_softmax(-1).gather(1, rows.action[:, None])[:, 0]
        outputs = policy.outputs(rows)
        own = policy.network(input_ids=rows.tokens, attention_mask=rows.present.long()).logits
    assert torch.equal(own, logits)
    assert torch.equal(outputs.log_prob, policy.reference_log_prob(rows))
    assert torch.allclose(outputs.log_prob, expected, atol=1e-6)
    assert not outputs.value.any()


def test_gpt2_is_a_policy_like_any_other(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=36, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    assert config.attn_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = policy_of(tmp_path, gradient_checkpointing=True)
    assert (policy.vocabulary, policy.positions) == (36, 32)
    rows = rows_of(policy)
    assert torch.equal(policy.outputs(rows).log_prob, policy.reference_log_prob(rows))
    # In one kernel, it is the function of the model's own configuration.
    plain = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = plain(rows.tokens, attention_mask=rows.present.long()).logits.flatten(0, 1)[rows.place]
    expected = logits.log_softmax(-1).gather(1, rows.action[:, None])[:, 0]
    assert torch.allclose(policy.outputs(rows).log_prob, expected, atol=1e-5)
    assert plain.config.activation_function != policy.network.config.activation_function
    disturb(policy)
    training = policy.outputs(rows).log_prob
    with torch.no_grad():
        acting = policy.outputs(rows).log_prob
    assert torch.allclose(training, acting, atol=1e-6)
    assert not torch.allclose(acting, policy.reference_log_prob(rows), atol=1e-3)


@pytest.mark.parametrize("lora", [True, False])
def test_training_moves_the_policy_and_not_the_reference(base: Path, lora: bool) -> None:
    policy = policy_of(base, lora=lora)
    rows = rows_of(policy)
    before = policy.reference_log_prob(rows)
    disturb(policy)
    with torch.no_grad():
        assert not torch.allclose(policy.outputs(rows).log_prob, before, atol=1e-3)
    assert torch.equal(policy.reference_log_prob(rows), before)


def test_what_is_published_is_an_adapter_of_peft(base: Path) -> None:
    policy = disturb(policy_of(base))
    own, peft = policy.state_dict(), get_peft_model_state_dict(policy.network, save_embedding_layers=False)
    assert own.keys() == peft.keys()
    assert own
    assert all(torch.equal(own[name], peft[name]) for name in own)


@pytest.mark.parametrize("lora", [True, False])
def test_published_weights_make_the_same_policy(base: Path, lora: bool) -> None:
    learner, actor = disturb(policy_of(base, lora=lora)), policy_of(base, lora=lora)
    probe = np.random.default_rng(0).integers(learner.vocabulary, size=(4, 9))
    question = ({"observation": probe[:, :-1]}, {"action": probe[:, 1:]})
    right = learner.log_prob(*question)
    assert not np.allclose(actor.acting_log_prob(*question), right, atol=1e-3)
    weights.load_into(actor, weights.encode(learner))
    assert np.array_equal(actor.acting_log_prob(*question), right)
    again = policy_of(base, lora=lora)
    again.load_state_dict({name: torch.from_numpy(one) for name, one in weights.snapshot(learner).items()})
    assert np.array_equal(again.log_prob(*question), right)


def test_other_weights_are_refused(base: Path) -> None:
    policy = policy_of(base)
    state = dict(policy.state_dict())
    name = next(iter(state))
    with pytest.raises(ValueError, match=r"weights\." + name):
        policy.load_state_dict(state | {name: state[name][:1]})
    del state[name]
    with pytest.raises(ValueError, match="on one side only"):
        policy.load_state_dict(state)


def test_padding_and_the_other_rows_are_nothing_to_a_row(base: Path) -> None:
    policy = disturb(policy_of(base))
    rows = rows_of(policy)
    longer = rows_of(policy, more=5)
    garbage = longer.tokens.where(longer.present, torch.tensor(7))
    reversed_ = rows_of(policy)
    with torch.no_grad():
        right = policy.outputs(rows)
        padded = policy.outputs(TokenRows(garbage, longer.present, longer.place, longer.action))
        order = torch.arange(len(LENGTHS)).flip(0)
        place, action = _places(reversed_, order)
        turned = policy.outputs(TokenRows(reversed_.tokens[order], reversed_.present[order], place, action))
    for name in ("log_prob", "entropy", "value"):
        expected = getattr(right, name)
        assert torch.allclose(getattr(padded, name), expected, atol=1e-5)
        cut = list(expected.split(LENGTHS))[::-1]
        assert torch.allclose(getattr(turned, name), torch.cat(cut), atol=1e-5)


def _places(rows: TokenRows, order: Tensor) -> tuple[Tensor, Tensor]:
    actions = torch.zeros(rows.tokens.shape, dtype=torch.long).flatten()
    actions[rows.place] = rows.action
    place = rows.present[order].flatten().nonzero().squeeze(1)
    return place, actions.view(rows.tokens.shape)[order].flatten()[place]


def test_a_row_of_one_length_is_answered_as_in_a_batch_without_padding(base: Path) -> None:
    policy = disturb(policy_of(base))
    rows = rows_of(policy)
    with torch.no_grad():
        together = policy.outputs(rows).log_prob.split(LENGTHS)
        for row, length in enumerate(LENGTHS):
            alone = TokenRows(
                rows.tokens[row : row + 1, :length],
                rows.present[row : row + 1, :length],
                torch.arange(length),
                rows.action.split(LENGTHS)[row],
            )
            assert torch.allclose(policy.outputs(alone).log_prob, together[row], atol=1e-5)


@pytest.mark.parametrize("shared_trunk", [True, False])
def test_the_value_loss_reaches_the_adapter_where_the_trunk_is_shared(base: Path, shared_trunk: bool) -> None:
    policy = disturb(policy_of(base, shared_trunk=shared_trunk))
    value = policy.outputs(rows_of(policy)).value.sum()
    gradients = torch.autograd.grad(value, list(policy.trained().values()), materialize_grads=True)
    assert any(bool(one.any()) for one in gradients) == shared_trunk


def test_checkpointed_activations_change_no_gradient(base: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = disturb(policy_of(base, gradient_checkpointing=checkpointing))
        loss = policy.outputs(rows_of(policy)).log_prob.sum()
        gradients.append(torch.autograd.grad(loss, list(policy.trained().values())))
    for plain, again in zip(*gradients, strict=True):
        assert torch.allclose(plain, again, atol=1e-6)


def test_only_named_layers_get_an_adapter(base: Path) -> None:
    names = policy_of(base, targets=("q_proj",)).trained()
    assert names
    assert all("q_proj" in name for name in names)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (PolicySection(kwargs={}), r"policy\.kwargs\.model=: Field required"),
        (PolicySection(kwargs={"model": "x", "rnak": 3}), r"policy\.kwargs\.rnak=3: Extra inputs"),
        (PolicySection(kwargs={"model": "x", "rank": 0}), r"policy\.kwargs\.rank=0"),
        (PolicySection(kwargs={"model": "x", "lora": False, "dtype": "bfloat16"}), r"policy\.kwargs\.dtype"),
        (PolicySection(kwargs={"model": "x"}, hidden_sizes=(4,)), r"policy\.hidden_sizes=\(4,\)"),
    ],
)
def test_bad_settings_are_named(section: PolicySection, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        language_section(section)


def test_a_place_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.model=.*cannot be read"):
        policy_of(tmp_path)


def test_layers_that_are_not_there_are_named(base: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.targets=\['nothing'\]"):
        policy_of(base, targets=("nothing",))


def test_spaces_of_another_vocabulary_are_refused(base: Path) -> None:
    section = PolicySection(kwargs={"model": str(base)})
    vocabulary = policy_of(base).vocabulary
    build(Discrete(vocabulary), Discrete(vocabulary), section, 0)
    with pytest.raises(ConfigurationError, match=r"knows 36 tokens, and the action space"):
        build(Discrete(vocabulary), Discrete(vocabulary + 1), section, 0)
