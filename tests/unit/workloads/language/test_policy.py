from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.config.settings import ConfigurationError, PolicySection
from penstock.learner.algorithms.algorithm import AlgorithmState
from penstock.learner.algorithms.gradient import PLAIN, Hardware
from penstock.learner.algorithms.responses import read_responses
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.policy import weights
from penstock.policy.tokens import TokenRows
from penstock.protocol.fragment import Fragment
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.policy import (
    AdapterCritic,
    LanguagePolicy,
    LanguageSection,
    ValueHead,
    build,
    language_section,
)
from tests.support.experience.experience import same
from tests.support.experience.fragment_messages import from_proto, to_proto
from tests.support.experience.token_experience import Response, batch_of, fragment, sample

# ---- What a language policy answers, and what of it is published.


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


# ---- What must hold of a language model and its learner, exactly: real models, real fragments, small.


PROMPTS = ((1, 20, 21), (1, 25))


def invariants_policy_of(base: Path, **kwargs: Any) -> LanguagePolicy:
    """A new adapter on the tiny model."""
    return LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0, **kwargs), seed=0)


def moved(policy: LanguagePolicy) -> LanguagePolicy:
    """Away from its reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trained().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def algorithm_of(policy: LanguagePolicy, hardware: Hardware = PLAIN, **section: Any) -> TokenPPO:
    """One gradient step on everything, unless it is said otherwise."""
    usual: dict[str, Any] = {"epochs": 1, "minibatches": 1, "learning_rate": 1e-3}
    return TokenPPO(policy, TokenPPOSection(**(usual | section)), seed=0, hardware=hardware)


def written_by(policy: LanguagePolicy, round_: int = 0) -> list[Response]:
    """Four responses to each prompt, of up to five tokens; scored −1, 0, 1, … in turn."""
    made = [
        one
        for index, prompt in enumerate(PROMPTS)
        for one in sample(policy, prompt, 4, 5, 10 * round_ + index, vocabulary=policy.vocabulary)
    ]
    scores = (-1.0, 0.0, 1.0)
    return [
        Response(one.prompt, one.tokens, one.log_prob, scores[index % 3], one.finished)
        for index, one in enumerate(made)
    ]


def flat(policy: LanguagePolicy) -> Tensor:
    """All that is trained."""
    return torch.cat(
        [one.detach().flatten() for one in (*policy.trained().values(), *policy.critic.parameters())]
    )


def test_a_fresh_adapter_has_no_divergence_and_ratio_one(base: Path) -> None:
    policy, actor = invariants_policy_of(base), invariants_policy_of(base)
    algorithm = algorithm_of(policy)
    weights.load_into(actor, weights.encode(algorithm.published_modules()["default"]))
    told = algorithm.update(
        batch_of(fragment(written_by(actor), vocabulary=policy.vocabulary)), progress=0.0
    ).metrics
    assert told["kl_reference"] == 0.0
    assert told["max_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert told["clip_fraction"] == 0.0
    assert told["score"] == pytest.approx(np.mean([-1, 0, 1, -1, 0, 1, -1, 0]))


def test_actor_and_learner_agree_on_what_was_sampled(base: Path) -> None:
    policy, actor = invariants_policy_of(base), invariants_policy_of(base)
    algorithm = algorithm_of(policy)
    algorithm.update(batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary)), progress=0.0)
    weights.load_into(actor, weights.encode(algorithm.published_modules()["default"]))
    responses = read_responses(batch_of(fragment(written_by(actor), vocabulary=policy.vocabulary)))
    assert responses is not None
    with torch.no_grad():
        for part in responses.micro_batches(np.arange(len(responses)), 10_000):
            error = (policy.outputs(part.rows).log_prob - responses.behaviour[part.index]).abs()
            assert error.max() <= 1e-5
            assert error.exp().mean() < 1.001


def through_the_wire(sent: Fragment) -> Batch:
    """Bytes as an actor sends them, checked and put together as the learner does."""
    message = to_proto(sent).SerializeToString()
    return batch_of(from_proto(type(to_proto(sent)).FromString(message)))


@pytest.mark.parametrize("lag", [0, 1])
def test_an_actor_that_never_lags_is_the_synchronous_loop(base: Path, lag: int) -> None:
    policy, learner, actor = (invariants_policy_of(base) for _ in range(3))
    alone, apart = algorithm_of(policy, minibatches=2), algorithm_of(learner, minibatches=2)
    published = [weights.encode(apart.published_modules()["default"])] * (lag + 1)
    for update in range(3):
        alone.update(
            batch_of(fragment(written_by(policy, update), vocabulary=policy.vocabulary)), progress=0.0
        )
        weights.load_into(actor, published[-1 - lag])
        sent = fragment(written_by(actor, update), vocabulary=policy.vocabulary, update=update)
        apart.update(through_the_wire(sent), progress=0.0)
        published.append(weights.encode(apart.published_modules()["default"]))
    assert torch.equal(flat(policy), flat(learner)) is (lag == 0)


def test_every_reward_arrives_as_it_was_given(base: Path) -> None:
    policy = invariants_policy_of(base)
    given = written_by(policy)
    assert {one.score for one in given} == {-1.0, 0.0, 1.0}
    responses = read_responses(through_the_wire(fragment(given, vocabulary=policy.vocabulary)))
    assert responses is not None
    assert responses.left_out == 0
    assert responses.reward[responses.last].tolist() == [one.score for one in given]
    assert responses.counts.tolist() == [len(one.tokens) for one in given]


@pytest.mark.parametrize("kwargs", [{}, {"shared_trunk": False}, {"critic": "adapter"}])
def test_micro_batches_padding_and_order_are_nothing(base: Path, kwargs: dict[str, Any]) -> None:
    given = written_by(moved(invariants_policy_of(base)))
    vocabulary = invariants_policy_of(base).vocabulary
    whole = batch_of(fragment(given, vocabulary=vocabulary))
    variants: dict[str, tuple[dict[str, Any], Batch]] = {
        "micro-batches of one": ({"micro_batch_tokens": 1}, whole),
        "other padding": ({}, batch_of(fragment(given, vocabulary=vocabulary, pad=30, steps=20))),
        "other order": ({}, batch_of(fragment(given[::-1], vocabulary=vocabulary))),
    }
    plain = invariants_policy_of(base, **kwargs)
    before = flat(plain)
    # Not Adam's first step, in which rounding decides the sign of a gradient that is next to 0.
    wanted: dict[str, Any] = {"adam_epsilon": 1.0, "learning_rate": 1.0, "critic_learning_rate": 1.0}
    told = algorithm_of(plain, **wanted).update(whole, progress=0.0).metrics
    assert (flat(plain) - before).abs().max() > 1e-3
    for name, (section, batch) in variants.items():
        other = invariants_policy_of(base, **kwargs)
        again = algorithm_of(other, **wanted, **section).update(batch, progress=0.0).metrics
        assert again == pytest.approx(told, rel=1e-4, abs=1e-5), name
        assert (flat(plain) - flat(other)).abs().max() <= 1e-6, name


def test_all_weights_can_be_trained(base: Path) -> None:
    policy = invariants_policy_of(base, lora=False)
    algorithm = algorithm_of(policy, epochs=2)
    batch = batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary))
    first = algorithm.update(batch, progress=0.0).metrics
    second = algorithm.update(batch, progress=0.0).metrics
    assert first["kl_reference"] == 0.0
    assert second["kl_reference"] != 0.0
    assert policy.state_dict().keys() == policy.trained().keys()
    assert sum(one.numel() for one in policy.trained().values()) == policy.network.num_parameters()


@pytest.mark.parametrize("mixed", [True, False])
def test_bfloat16_trains_an_adapter_in_float32(base: Path, mixed: bool) -> None:
    policy = invariants_policy_of(base, dtype="float32" if mixed else "bfloat16")
    assert {one.dtype for one in policy.trained().values()} == {torch.float32}
    algorithm = algorithm_of(policy, Hardware(bfloat16=mixed))
    before = flat(policy)
    update = algorithm.update(
        batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary)), progress=0.0
    )
    assert update.applied
    assert not torch.equal(flat(policy), before)
    assert update.metrics["max_ratio"] == pytest.approx(1.0, abs=0.1)


def test_a_restored_learner_goes_on_bit_by_bit(base: Path) -> None:
    first, second = (
        invariants_policy_of(base),
        LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0), 9),
    )
    algorithms = [algorithm_of(one, epochs=2, minibatches=2) for one in (first, second)]
    batch = batch_of(fragment(written_by(invariants_policy_of(base)), vocabulary=first.vocabulary))
    algorithms[0].update(batch, progress=0.0)
    algorithms[1].load(algorithms[0].state())
    for algorithm in algorithms:
        algorithm.update(batch, progress=0.5)
    assert torch.equal(flat(first), flat(second))


# ---- A critic with an adapter of its own: what reaches which adapter, what is published, and what is
# stored.


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


def critic_algorithm_of(policy: LanguagePolicy, *, hardware: Hardware = PLAIN, **section: Any) -> TokenPPO:
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

    critic_moved(list(policy.critic.parameters()))
    log_prob, reference, value = told()
    assert value.any()
    critic_moved([one for name, one in policy.critic.named_parameters() if name.startswith("adapter.")])
    after = told()
    assert torch.equal(after[0], log_prob)
    assert torch.equal(after[1], reference)
    assert not torch.allclose(after[2], value, atol=1e-3)
    critic_moved(list(policy.trained().values()))
    last = told()
    assert torch.equal(last[2], after[2])
    assert torch.equal(last[1], reference)
    assert not torch.allclose(last[0], log_prob, atol=1e-3)


def critic_moved(parameters: list[torch.nn.Parameter]) -> None:
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
    algorithm = critic_algorithm_of(policy)
    given = batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary))
    assert algorithm.update(given, progress=0.0).applied
    state = algorithm.state()
    assert any(name.startswith("critic/adapter.") for name in state.tensors)
    assert any(name.startswith("optimiser/critic/first/adapter.") for name in state.tensors)
    store = CheckpointStore(tmp_path, keep=1)
    store.write("1-1", state.tensors, state.numbers)
    read = store.read("1-1")
    again = critic_algorithm_of(policy_of(base, critic="adapter"))
    again.load(AlgorithmState(tensors=dict(read.tensors), numbers=dict(read.state)))
    assert same(again.state(), state)
    for one in (algorithm, again):
        assert one.update(given, progress=0.0).applied
    assert same(again.state(), algorithm.state())
    assert not same(algorithm.state(), state)


def test_the_critics_adapter_counts_in_its_own_norm_and_learns_first(base: Path) -> None:
    policy = with_critic(base)
    algorithm = critic_algorithm_of(
        policy, critic_warmup_updates=1, max_gradient_norm=1e-12, adam_epsilon=1.0
    )
    before = [one.detach().clone() for one in policy.critic.parameters()]
    published = weights.encode(policy)
    given = batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary))
    told = algorithm.update(given, progress=0.0).metrics
    assert weights.encode(policy) == published
    assert told["critic_gradient_norm"] > 1e-6
    pairs = list(zip(before, policy.critic.parameters(), strict=True))
    assert max(float((one - own.detach()).abs().max()) for one, own in pairs) < 1e-9
    longer = with_critic(base)
    critic_algorithm_of(longer, critic_warmup_updates=1, adam_epsilon=1.0, critic_learning_rate=1.0).update(
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
    assert critic_algorithm_of(policy, hardware=Hardware(bfloat16=True)).update(given, progress=0.0).applied
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
