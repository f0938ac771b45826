"""A critic with an adapter of its own: what reaches which adapter, what is published, and what is stored."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.config.settings import ConfigurationError, PolicySection
from penstock.learner.algorithms.algorithm import AlgorithmState
from penstock.learner.algorithms.gradient import PLAIN, Hardware
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.policy import weights
from penstock.policy.tokens import TokenRows
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.policy import (
    AdapterCritic,
    LanguagePolicy,
    ValueHead,
    build,
    language_section,
)
from tests.support.experience.experience import same
from tests.support.experience.token_experience import batch_of, fragment
from tests.unit.workloads.language.policy.test_language_policy import disturb, policy_of, rows_of
from tests.unit.workloads.language.policy.test_language_policy_invariants import written_by


def with_critic(base: Path, **kwargs: Any) -> LanguagePolicy:
    """A policy whose critic has an adapter of its own; all that is trained is other than new."""
    return disturb(policy_of(base, critic="adapter", **kwargs))


def gradients(policy: LanguagePolicy, rows: TokenRows, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """∂ of an output, summed, by what the policy and by what the critic has trained."""
    total = getattr(policy.outputs(rows), name).sum()
    own, critic = list(policy.trained().values()), list(policy.critic.parameters())
    found = torch.autograd.grad(total, [*own, *critic], materialize_grads=True)
    return list(found[: len(own)]), list(found[len(own) :])


def reached(found: list[Tensor]) -> bool:
    """Whether any gradient is not 0."""
    return any(bool(one.any()) for one in found)


def algorithm_of(policy: LanguagePolicy, *, hardware: Hardware = PLAIN, **section: Any) -> TokenPPO:
    """Two gradient steps on everything."""
    usual: dict[str, Any] = {"epochs": 2, "minibatches": 1, "learning_rate": 1e-3}
    return TokenPPO(policy, TokenPPOSection(**(usual | section)), seed=0, hardware=hardware)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_each_loss_reaches_its_own_adapter_alone(base: Path, gradient_checkpointing: bool) -> None:
    policy = with_critic(base, gradient_checkpointing=gradient_checkpointing)
    rows = rows_of(policy)
    for name, is_policy in (("log_prob", True), ("entropy", True), ("value", False)):
        own, critic = gradients(policy, rows, name)
        assert (reached(own), reached(critic)) == (is_policy, not is_policy), name
    named = dict(zip([name for name, _ in policy.critic.named_parameters()], critic, strict=True))
    adapted = [one for name, one in named.items() if name.startswith("adapter.")]
    assert adapted
    assert all(bool(one.any()) for one in adapted)


def test_checkpointed_activations_change_no_gradient_of_either(base: Path) -> None:
    for name in ("log_prob", "value"):
        plain, again = (
            [*gradients(policy, rows_of(policy), name)[0], *gradients(policy, rows_of(policy), name)[1]]
            for policy in (with_critic(base), with_critic(base, gradient_checkpointing=True))
        )
        assert reached(plain)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize(("gradient_checkpointing", "times"), [(False, 1), (True, 2)])
def test_activations_of_the_critic_are_computed_again_where_that_is_asked_for(
    base: Path, gradient_checkpointing: bool, times: int
) -> None:
    policy = with_critic(base, gradient_checkpointing=gradient_checkpointing)
    critic = policy.critic
    assert isinstance(critic, AdapterCritic)
    passes = {"policy": 0, "critic": 0}
    for name, network in (("policy", policy.network), ("critic", critic.network)):

        def count(*_: Any, name: str = name) -> None:
            passes[name] += 1

        (layer, *_) = (one for part, one in network.named_modules() if part.endswith("q_proj"))
        layer.register_forward_hook(count)
    gradients(policy, rows_of(policy), "value")
    assert passes == {"policy": 1, "critic": times}


def test_the_critic_moves_neither_policy_nor_reference_nor_they_it(base: Path) -> None:
    policy = policy_of(base, critic="adapter")
    rows = rows_of(policy)

    def told() -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            outputs = policy.outputs(rows)
        return outputs.log_prob, policy.reference_log_prob(rows), outputs.value

    moved(list(policy.critic.parameters()))
    log_prob, reference, value = told()
    assert value.any()
    moved([one for name, one in policy.critic.named_parameters() if name.startswith("adapter.")])
    after = told()
    assert torch.equal(after[0], log_prob)
    assert torch.equal(after[1], reference)
    assert not torch.allclose(after[2], value, atol=1e-3)
    moved(list(policy.trained().values()))
    last = told()
    assert torch.equal(last[2], after[2])
    assert torch.equal(last[1], reference)
    assert not torch.allclose(last[0], log_prob, atol=1e-3)


def moved(parameters: list[torch.nn.Parameter]) -> None:
    """Each by other numbers."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_what_is_published_is_what_it_is_without(base: Path) -> None:
    policy, plain = policy_of(base, critic="adapter"), policy_of(base)
    assert weights.encode(policy) == weights.encode(plain)
    critic = policy.critic
    assert isinstance(critic, AdapterCritic)
    assert critic.state_dict().keys() == dict(critic.named_parameters()).keys()
    sizes = {name: one.numel() for name, one in policy.trained().items()}
    held = {name: one.numel() for name, one in critic.named_parameters()}
    assert {
        name.removeprefix("adapter."): n for name, n in held.items() if name.startswith("adapter.")
    } == sizes
    assert {name for name in held if not name.startswith("adapter.")} == {
        f"head.{name}" for name, _ in plain.critic.named_parameters()
    }
    frozen = {one.data_ptr() for one in policy.network.parameters() if not one.requires_grad}
    assert {one.data_ptr() for one in critic.network.parameters() if not one.requires_grad} == frozen
    own = {one.data_ptr() for one in policy.trained().values()}
    assert own.isdisjoint(one.data_ptr() for one in critic.parameters())


def test_a_checkpoint_holds_the_critic_and_brings_it_back(base: Path, tmp_path: Path) -> None:
    policy = with_critic(base)
    algorithm = algorithm_of(policy)
    given = batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary))
    assert algorithm.update(given, progress=0.0).applied
    state = algorithm.state()
    assert any(name.startswith("critic/adapter.") for name in state.tensors)
    assert any(name.startswith("optimiser/critic/first/adapter.") for name in state.tensors)
    store = CheckpointStore(tmp_path, keep=1)
    store.write("1-1", state.tensors, state.numbers)
    read = store.read("1-1")
    again = algorithm_of(policy_of(base, critic="adapter"))
    again.load(AlgorithmState(tensors=dict(read.tensors), numbers=dict(read.state)))
    assert same(again.state(), state)
    for one in (algorithm, again):
        assert one.update(given, progress=0.0).applied
    assert same(again.state(), algorithm.state())
    assert not same(algorithm.state(), state)


def test_the_critics_adapter_counts_in_its_own_norm_and_learns_first(base: Path) -> None:
    policy = with_critic(base)
    algorithm = algorithm_of(policy, critic_warmup_updates=1, max_gradient_norm=1e-12, adam_epsilon=1.0)
    before = [one.detach().clone() for one in policy.critic.parameters()]
    published = weights.encode(policy)
    given = batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary))
    told = algorithm.update(given, progress=0.0).metrics
    assert weights.encode(policy) == published
    assert told["critic_gradient_norm"] > 1e-6
    pairs = list(zip(before, policy.critic.parameters(), strict=True))
    assert max(float((one - own.detach()).abs().max()) for one, own in pairs) < 1e-9
    longer = with_critic(base)
    algorithm_of(longer, critic_warmup_updates=1, adam_epsilon=1.0, critic_learning_rate=1.0).update(
        given, progress=0.0
    )
    adapters = [one for name, one in longer.critic.named_parameters() if name.startswith("adapter.")]
    assert any(
        not torch.equal(one, other) for one, other in zip(adapters, before[: len(adapters)], strict=True)
    )
    assert weights.encode(longer) == published


def test_mixed_precision_and_gpt2_do(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=36, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = with_critic(tmp_path, gradient_checkpointing=True)
    given = batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary))
    before = [one.detach().clone() for one in policy.critic.parameters()]
    assert algorithm_of(policy, hardware=Hardware(bfloat16=True)).update(given, progress=0.0).applied
    pairs = zip(before, policy.critic.parameters(), strict=True)
    assert any(not torch.equal(one, own) for one, own in pairs)


def test_only_a_learner_has_the_adapter(base: Path) -> None:
    section = PolicySection(kwargs={"model": str(base), "rank": 4, "critic": "adapter"})
    tokens = Discrete(policy_of(base).vocabulary)
    assert isinstance(build(tokens, tokens, section, 0).critic, ValueHead)
    assert isinstance(build(tokens, tokens, section, 0, learns=True).critic, AdapterCritic)


def test_without_frozen_weights_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.critic='adapter': .*lora=false"):
        language_section(PolicySection(kwargs={"model": "x", "lora": False, "critic": "adapter"}))
