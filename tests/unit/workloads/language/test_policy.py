from collections import Counter
from dataclasses import replace
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
from tests.support.language.tiny_models import move

LENGTHS = (9, 4, 6)
PROMPTS = ((1, 20, 21), (1, 25))
VOCABULARY = 36


def policy_of(base: Path, seed: int = 0, **kwargs: Any) -> LanguagePolicy:
    return LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0, **kwargs), seed=seed)


def gpt2(folder: Path) -> Path:
    config = GPT2Config(
        vocab_size=36, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    assert config.attn_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def moved(policy: LanguagePolicy) -> LanguagePolicy:
    move((*policy.trained().values(), *policy.critic.parameters()), 1)
    return policy


def with_critic(base: Path, **kwargs: Any) -> LanguagePolicy:
    return moved(policy_of(base, critic="adapter", **kwargs))


def rows_of(lengths: tuple[int, ...] = LENGTHS, more: int = 0) -> TokenRows:
    """Random tokens of these lengths in which every next token is an action.

    `more`: places of padding added.
    """
    generator = torch.Generator().manual_seed(0)
    length = max(lengths) + more
    full = torch.zeros(len(lengths), length + 1, dtype=torch.long)
    for row, own in enumerate(lengths):
        full[row, : own + 1] = torch.randint(VOCABULARY, (own + 1,), generator=generator)
    present = torch.arange(length) < torch.tensor(lengths)[:, None]
    place = present.flatten().nonzero().squeeze(1)
    return TokenRows(full[:, :-1], present, place, full[:, 1:].flatten()[place])


def chosen(model: Any, rows: TokenRows) -> Tensor:
    """Log-probabilities of the actions, by the model itself."""
    with torch.no_grad():
        logits = model(input_ids=rows.tokens, attention_mask=rows.present.long()).logits.flatten(0, 1)
    found: Tensor = logits[rows.place].log_softmax(-1).gather(1, rows.action[:, None])[:, 0]
    return found


def test_a_fresh_adapter_is_the_reference(base: Path) -> None:
    policy, rows = policy_of(base), rows_of()
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        outputs = policy.outputs(rows)
    assert torch.equal(chosen(policy.network, rows), chosen(bare, rows))
    assert torch.equal(outputs.log_prob, policy.reference_log_prob(rows))
    assert torch.allclose(outputs.log_prob, chosen(bare, rows), atol=1e-6)
    assert not outputs.value.any()


def test_gpt2_is_a_policy_like_any_other(tmp_path: Path) -> None:
    policy, rows = policy_of(gpt2(tmp_path), gradient_checkpointing=True), rows_of()
    assert (policy.vocabulary, policy.positions) == (36, 32)
    assert torch.equal(policy.outputs(rows).log_prob, policy.reference_log_prob(rows))
    # In one kernel, it is the function of the model's own configuration.
    plain = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.allclose(policy.outputs(rows).log_prob, chosen(plain, rows), atol=1e-5)
    assert plain.config.activation_function != policy.network.config.activation_function
    training = moved(policy).outputs(rows).log_prob
    with torch.no_grad():
        acting = policy.outputs(rows).log_prob
    assert torch.allclose(training, acting, atol=1e-6)
    assert not torch.allclose(acting, policy.reference_log_prob(rows), atol=1e-3)


@pytest.mark.parametrize("lora", [True, False])
def test_training_moves_the_policy_and_not_the_reference(base: Path, lora: bool) -> None:
    policy, rows = policy_of(base, lora=lora), rows_of()
    before = policy.reference_log_prob(rows)
    with torch.no_grad():
        assert not torch.allclose(moved(policy).outputs(rows).log_prob, before, atol=1e-3)
    assert torch.equal(policy.reference_log_prob(rows), before)


def test_the_published_weights_are_a_peft_adapter(base: Path) -> None:
    policy = moved(policy_of(base))
    own, peft = policy.state_dict(), get_peft_model_state_dict(policy.network, save_embedding_layers=False)
    assert own.keys() == peft.keys()
    assert own
    assert all(torch.equal(own[name], peft[name]) for name in own)


@pytest.mark.parametrize("lora", [True, False])
def test_published_weights_make_the_same_policy(base: Path, lora: bool) -> None:
    learner, actor = moved(policy_of(base, lora=lora)), policy_of(base, lora=lora)
    probe = np.random.default_rng(0).integers(VOCABULARY, size=(4, 9))
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


def test_padding_and_other_rows_do_not_change_a_row(base: Path) -> None:
    policy, rows, longer = moved(policy_of(base)), rows_of(), rows_of(more=5)
    garbage = longer.tokens.where(longer.present, torch.tensor(7))
    actions = torch.zeros(rows.tokens.numel(), dtype=torch.long)
    actions[rows.place] = rows.action
    place = rows.present.flip(0).flatten().nonzero().squeeze(1)
    action = actions.view(rows.tokens.shape).flip(0).flatten()[place]
    with torch.no_grad():
        right = policy.outputs(rows)
        padded = policy.outputs(TokenRows(garbage, longer.present, longer.place, longer.action))
        turned = policy.outputs(TokenRows(rows.tokens.flip(0), rows.present.flip(0), place, action))
    for name in ("log_prob", "entropy", "value"):
        expected = getattr(right, name)
        assert torch.allclose(getattr(padded, name), expected, atol=1e-5)
        assert torch.allclose(getattr(turned, name), torch.cat(expected.split(LENGTHS)[::-1]), atol=1e-5)


@pytest.mark.parametrize("shared_trunk", [True, False])
def test_with_a_shared_trunk_the_value_loss_reaches_the_adapter(base: Path, shared_trunk: bool) -> None:
    policy = moved(policy_of(base, shared_trunk=shared_trunk))
    assert reached(gradients(policy, "value")[0]) == shared_trunk


def test_only_named_layers_get_an_adapter(base: Path) -> None:
    names = policy_of(base, targets=("q_proj",)).trained()
    assert names
    assert all("q_proj" in name for name in names)
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.targets=\['nothing'\]"):
        policy_of(base, targets=("nothing",))
    with pytest.raises(ConfigurationError, match=r"has no layer 'v_porj'; use some of .*v_proj"):
        policy_of(base, targets=("q_proj", "v_porj"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"policy\.kwargs\.model=: Field required"),
        ({"model": "x", "rnak": 3}, r"policy\.kwargs\.rnak=3: Extra inputs"),
        ({"model": "x", "lora": False, "dtype": "bfloat16"}, r"policy\.kwargs\.dtype"),
        ({"model": "x", "lora": False, "critic": "adapter"}, r"policy\.kwargs\.critic='adapter': .*lora=f"),
    ],
)
def test_bad_settings_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        language_section(PolicySection(kwargs=kwargs))
    with pytest.raises(ConfigurationError, match=r"policy\.hidden_sizes=\(4,\)"):
        language_section(PolicySection(kwargs={"model": "x"}, hidden_sizes=(4,)))


def test_spaces_of_another_vocabulary_are_refused(base: Path) -> None:
    tokens, section = Discrete(VOCABULARY), PolicySection(kwargs={"model": str(base)})
    build(tokens, tokens, section, 0)
    with pytest.raises(ConfigurationError, match=r"knows 36 tokens, and the action space"):
        build(tokens, Discrete(VOCABULARY + 1), section, 0)


def algorithm_of(policy: LanguagePolicy, hardware: Hardware = PLAIN, **section: Any) -> TokenPPO:
    """One gradient step on everything, unless it is said otherwise."""
    usual: dict[str, Any] = {"epochs": 1, "minibatches": 1, "learning_rate": 1e-3}
    return TokenPPO(policy, TokenPPOSection(**(usual | section)), seed=0, hardware=hardware)


def written_by(policy: LanguagePolicy, round_: int = 0) -> list[Response]:
    """Four responses to each prompt, of up to five tokens; scored −1, 0, 1, … in turn."""
    made = [
        one
        for index, prompt in enumerate(PROMPTS)
        for one in sample(policy, prompt, 4, 5, 10 * round_ + index, vocabulary=VOCABULARY)
    ]
    return [replace(one, score=(-1.0, 0.0, 1.0)[index % 3]) for index, one in enumerate(made)]


def batch_by(policy: LanguagePolicy, round_: int = 0) -> Batch:
    return batch_of(fragment(written_by(policy, round_), vocabulary=VOCABULARY))


def flat(policy: LanguagePolicy) -> Tensor:
    """All that is trained."""
    return torch.cat(
        [one.detach().flatten() for one in (*policy.trained().values(), *policy.critic.parameters())]
    )


def test_actor_and_learner_agree_on_what_was_sampled_and_a_fresh_adapter_has_no_divergence(
    base: Path,
) -> None:
    policy, actor = policy_of(base), policy_of(base)
    algorithm, told = algorithm_of(policy), []
    for round_ in range(2):
        weights.load_into(actor, weights.encode(algorithm.published_modules()["default"]))
        told.append(algorithm.update(batch_by(actor, round_), progress=0.0).metrics)
        assert told[-1]["max_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert told[-1]["clip_fraction"] == 0.0
    assert told[0]["kl_reference"] == 0.0 != told[1]["kl_reference"]
    assert told[0]["score"] == pytest.approx(np.mean([-1, 0, 1, -1, 0, 1, -1, 0]))


def through_the_wire(sent: Fragment) -> Batch:
    """Bytes as an actor sends them, checked and put together as the learner does."""
    message = to_proto(sent).SerializeToString()
    return batch_of(from_proto(type(to_proto(sent)).FromString(message)))


@pytest.mark.parametrize("lag", [0, 1])
def test_without_lag_the_updates_equal_a_synchronous_loop(base: Path, lag: int) -> None:
    policy, learner, actor = (policy_of(base) for _ in range(3))
    alone, apart = algorithm_of(policy, minibatches=2), algorithm_of(learner, minibatches=2)
    published = [weights.encode(apart.published_modules()["default"])] * (lag + 1)
    for update in range(3):
        alone.update(batch_by(policy, update), progress=0.0)
        weights.load_into(actor, published[-1 - lag])
        sent = fragment(written_by(actor, update), vocabulary=VOCABULARY, update=update)
        apart.update(through_the_wire(sent), progress=0.0)
        published.append(weights.encode(apart.published_modules()["default"]))
    assert torch.equal(flat(policy), flat(learner)) is (lag == 0)


def test_every_reward_arrives_unchanged(base: Path) -> None:
    given = written_by(policy_of(base))
    assert {one.score for one in given} == {-1.0, 0.0, 1.0}
    responses = read_responses(through_the_wire(fragment(given, vocabulary=VOCABULARY)))
    assert responses is not None
    assert responses.left_out == 0
    assert responses.reward[responses.last].tolist() == [one.score for one in given]
    assert responses.counts.tolist() == [len(one.tokens) for one in given]


@pytest.mark.parametrize("kwargs", [{}, {"shared_trunk": False}, {"critic": "adapter"}])
def test_micro_batches_padding_and_order_change_nothing(base: Path, kwargs: dict[str, Any]) -> None:
    given = written_by(moved(policy_of(base)))
    whole = batch_of(fragment(given, vocabulary=VOCABULARY))
    variants: dict[str, tuple[dict[str, Any], Batch]] = {
        "micro-batches of one": ({"micro_batch_tokens": 1}, whole),
        "other padding": ({}, batch_of(fragment(given, vocabulary=VOCABULARY, pad=30, steps=20))),
        "other order": ({}, batch_of(fragment(given[::-1], vocabulary=VOCABULARY))),
    }
    plain = policy_of(base, **kwargs)
    before = flat(plain)
    # Not Adam's first step, in which rounding decides the sign of a gradient that is next to 0.
    wanted: dict[str, Any] = {"adam_epsilon": 1.0, "learning_rate": 1.0, "critic_learning_rate": 1.0}
    told = algorithm_of(plain, **wanted).update(whole, progress=0.0).metrics
    assert (flat(plain) - before).abs().max() > 1e-3
    for name, (section, batch) in variants.items():
        other = policy_of(base, **kwargs)
        again = algorithm_of(other, **wanted, **section).update(batch, progress=0.0).metrics
        assert again == pytest.approx(told, rel=1e-4, abs=1e-5), name
        assert (flat(plain) - flat(other)).abs().max() <= 1e-6, name


def test_all_weights_can_be_trained(base: Path) -> None:
    policy = policy_of(base, lora=False)
    algorithm, batch = algorithm_of(policy, epochs=2), batch_by(policy)
    first, second = (algorithm.update(batch, progress=0.0).metrics for _ in range(2))
    assert first["kl_reference"] == 0.0 != second["kl_reference"]
    assert policy.state_dict().keys() == policy.trained().keys()
    assert sum(one.numel() for one in policy.trained().values()) == policy.network.num_parameters()


@pytest.mark.parametrize("how", ["mixed", "whole", "gpt2"])
def test_bfloat16_trains_adapters_in_float32(base: Path, tmp_path: Path, how: str) -> None:
    policy = {
        "mixed": lambda: policy_of(base),
        "whole": lambda: policy_of(base, dtype="bfloat16"),
        "gpt2": lambda: with_critic(gpt2(tmp_path), gradient_checkpointing=True),
    }[how]()
    assert {one.dtype for one in policy.trained().values()} == {torch.float32}
    algorithm = algorithm_of(policy, Hardware(bfloat16=how != "whole"))
    before = [one.detach().clone() for one in (*policy.trained().values(), *policy.critic.parameters())]
    update = algorithm.update(batch_by(policy), progress=0.0)
    assert update.applied
    assert update.metrics["max_ratio"] == pytest.approx(1.0, abs=0.1)
    after = (*policy.trained().values(), *policy.critic.parameters())
    has_moved = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert any(has_moved[: len(policy.trained())])
    assert any(has_moved[len(policy.trained()) :])


def test_a_restored_learner_continues_bit_by_bit(base: Path) -> None:
    first, second = policy_of(base), policy_of(base, seed=9)
    algorithms = [algorithm_of(one, epochs=2, minibatches=2) for one in (first, second)]
    batch = batch_by(policy_of(base))
    algorithms[0].update(batch, progress=0.0)
    algorithms[1].load(algorithms[0].state())
    for algorithm in algorithms:
        algorithm.update(batch, progress=0.5)
    assert torch.equal(flat(first), flat(second))


def gradients(policy: LanguagePolicy, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """∂ of an output, summed, by what the policy and by what the critic has trained."""
    total = getattr(policy.outputs(rows_of()), name).sum()
    own, critic = list(policy.trained().values()), list(policy.critic.parameters())
    found = torch.autograd.grad(total, [*own, *critic], materialize_grads=True)
    return list(found[: len(own)]), list(found[len(own) :])


def reached(found: list[Tensor]) -> bool:
    return any(bool(one.any()) for one in found)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_each_loss_reaches_only_its_own_adapter(base: Path, gradient_checkpointing: bool) -> None:
    policy = with_critic(base, gradient_checkpointing=gradient_checkpointing)
    for name, is_policy in (("log_prob", True), ("entropy", True), ("value", False)):
        own, critic = gradients(policy, name)
        assert (reached(own), reached(critic)) == (is_policy, not is_policy), name
    named = dict(zip([name for name, _ in policy.critic.named_parameters()], critic, strict=True))
    adapted = [one for name, one in named.items() if name.startswith("adapter.")]
    assert adapted
    assert all(bool(one.any()) for one in adapted)


@pytest.mark.parametrize("critic", ["head", "adapter"])
def test_checkpointed_activations_change_no_gradient(base: Path, critic: str) -> None:
    policies = [
        moved(policy_of(base, critic=critic, gradient_checkpointing=again)) for again in (False, True)
    ]
    for name in ("log_prob", "value"):
        (plain, plain_critic), (again, again_critic) = (gradients(policy, name) for policy in policies)
        assert reached([*plain, *plain_critic])
        for one, other in zip([*plain, *plain_critic], [*again, *again_critic], strict=True):
            assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("gradient_checkpointing", "times"), [(False, 1), (True, 2)])
def test_activations_of_the_critic_are_computed_again_on_request(
    base: Path, gradient_checkpointing: bool, times: int
) -> None:
    policy = with_critic(base, gradient_checkpointing=gradient_checkpointing)
    assert isinstance(policy.critic, AdapterCritic)
    passes = Counter[str]()
    for name, network in (("policy", policy.network), ("critic", policy.critic.network)):
        (layer, *_) = (one for part, one in network.named_modules() if part.endswith("q_proj"))
        layer.register_forward_hook(lambda *_, name=name: passes.update([name]))
    gradients(policy, "value")
    assert passes == {"policy": 1, "critic": times}


def test_critic_policy_and_reference_do_not_change_one_another(base: Path) -> None:
    policy, rows = policy_of(base, critic="adapter"), rows_of()

    def told() -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            outputs = policy.outputs(rows)
        return outputs.log_prob, policy.reference_log_prob(rows), outputs.value

    move(policy.critic.parameters(), 1)
    log_prob, reference, value = told()
    assert value.any()
    move((one for name, one in policy.critic.named_parameters() if name.startswith("adapter.")), 1)
    after = told()
    assert torch.equal(after[0], log_prob)
    assert torch.equal(after[1], reference)
    assert not torch.allclose(after[2], value, atol=1e-3)
    move(policy.trained().values(), 1)
    last = told()
    assert torch.equal(last[2], after[2])
    assert torch.equal(last[1], reference)
    assert not torch.allclose(last[0], log_prob, atol=1e-3)


def test_what_is_published_is_what_it_is_without_a_critics_adapter(base: Path) -> None:
    policy, plain = policy_of(base, critic="adapter"), policy_of(base)
    assert weights.encode(policy) == weights.encode(plain)
    critic = policy.critic
    assert isinstance(critic, AdapterCritic)
    held = {name: one.numel() for name, one in critic.named_parameters()}
    assert critic.state_dict().keys() == held.keys()
    own = {f"adapter.{name}": one.numel() for name, one in policy.trained().items()}
    assert held == own | {f"head.{name}": one.numel() for name, one in plain.critic.named_parameters()}
    frozen = {one.data_ptr() for one in policy.network.parameters() if not one.requires_grad}
    assert {one.data_ptr() for one in critic.network.parameters() if not one.requires_grad} == frozen
    places = {one.data_ptr() for one in policy.trained().values()}
    assert places.isdisjoint(one.data_ptr() for one in critic.parameters())


def test_a_checkpoint_saves_and_restores_the_critic(base: Path, tmp_path: Path) -> None:
    policy = with_critic(base)
    algorithm, given = algorithm_of(policy, epochs=2), batch_by(policy)
    assert algorithm.update(given, progress=0.0).applied
    state = algorithm.state()
    assert any(name.startswith("critic/adapter.") for name in state.tensors)
    assert any(name.startswith("optimiser/critic/first/adapter.") for name in state.tensors)
    store = CheckpointStore(tmp_path, keep=1)
    store.write("1-1", state.tensors, state.numbers)
    read = store.read("1-1")
    again = algorithm_of(policy_of(base, critic="adapter"), epochs=2)
    again.load(AlgorithmState(tensors=dict(read.tensors), numbers=dict(read.state)))
    assert same(again.state(), state)
    for one in (algorithm, again):
        assert one.update(given, progress=0.0).applied
    assert same(again.state(), algorithm.state())
    assert not same(algorithm.state(), state)


@pytest.mark.parametrize(
    ("section", "is_moved"),
    [({"max_gradient_norm": 1e-12}, False), ({"critic_learning_rate": 1.0}, True)],
    ids=["own-norm", "learns-first"],
)
def test_the_critics_adapter_has_its_own_gradient_norm_and_learns_first(
    base: Path, section: dict[str, Any], is_moved: bool
) -> None:
    policy = with_critic(base)
    before = [one.detach().clone() for one in policy.critic.parameters()]
    published = weights.encode(policy)
    algorithm = algorithm_of(policy, epochs=2, critic_warmup_updates=1, adam_epsilon=1.0, **section)
    told = algorithm.update(batch_by(policy), progress=0.0).metrics
    assert weights.encode(policy) == published
    assert told["critic_gradient_norm"] > 1e-6
    adapted = [name.startswith("adapter.") for name, _ in policy.critic.named_parameters()]
    apart = [
        float((one - own.detach()).abs().max())
        for one, own in zip(before, policy.critic.parameters(), strict=True)
    ]
    if is_moved:
        assert any(far > 0 for far, is_adapter in zip(apart, adapted, strict=True) if is_adapter)
    else:
        assert max(apart) < 1e-9


def test_only_a_learner_has_the_critics_adapter(base: Path) -> None:
    section = PolicySection(kwargs={"model": str(base), "rank": 4, "critic": "adapter"})
    tokens = Discrete(VOCABULARY)
    assert isinstance(build(tokens, tokens, section, 0).critic, ValueHead)
    assert isinstance(build(tokens, tokens, section, 0, learns=True).critic, AdapterCritic)
