"""Behaviour cloning against PyTorch's own losses and optimiser, and against numbers worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.config.settings import CloneSection
from penstock.learner.algorithms.clone import METRICS, Clone
from penstock.learner.algorithms.rows import see
from penstock.learner.batch import Batch
from penstock.policy.networks import BatchNorm
from penstock.policy.policy import Policy
from penstock.policy.weights import encode
from penstock.protocol.spaces import Box
from tests.support.experience.experience import collect, small_policy
from tests.support.experience.remembering import Actor, batch_of, remembering

CONTINUOUS = Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))


def expert(action: Any = None) -> tuple[Policy, Batch]:
    """A policy in float64 that is to be trained, and 64 steps of another one; two steps are not valid."""
    batch = collect(small_policy(7))
    if action is CONTINUOUS:
        drawn = torch.from_numpy(np.random.default_rng(0).normal(size=(*batch.valid.shape, 2))).float()
        batch = replace(batch, action={"action": drawn})
    valid = batch.valid.clone()
    valid[3, 1] = valid[0, 0] = False
    return small_policy(3, action).double(), replace(batch, valid=valid)


def network(policy: Policy) -> tuple[nn.Sequential, nn.Parameter | None]:
    """The actor as plain layers with the same weights, and the logarithms of a Gaussian's deviations."""
    layers: list[nn.Module] = []
    for layer in [*(policy.actor_body.chain or ()), policy.actor_head]:
        copy = nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else nn.Tanh()
        copy.load_state_dict(layer.state_dict())
        layers.append(copy)
    spread = [p for name, p in policy.named_parameters() if "log_std" in name]
    return nn.Sequential(*layers).double(), nn.Parameter(spread[0].detach().clone()) if spread else None


def reference(
    action: Any, policy: Policy, batch: Batch, orders: list[torch.Tensor], rate: float
) -> list[Any]:
    """The weights after Adam on `cross_entropy` or `gaussian_nll_loss` over the same minibatches."""
    actor, spread = network(policy)
    parameters = [*actor.parameters(), *([spread] if spread is not None else [])]
    optimiser = torch.optim.Adam(parameters, lr=rate, eps=1e-8)
    observed = batch.observation["observation"][:-1][batch.valid].double()
    taken = batch.action["action"][batch.valid]
    for order in orders:
        for part in order.tensor_split(4):
            outputs = actor(observed[part])
            if spread is None:
                loss = functional.cross_entropy(outputs, taken[part])
            else:
                variance = (2 * spread).exp().expand_as(outputs)
                nll = functional.gaussian_nll_loss(
                    outputs, taken[part].double(), variance, full=True, reduction="none"
                )
                loss = nll.sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.promise("cloning-maximum-likelihood-pytorch")
@pytest.mark.parametrize("action", [None, CONTINUOUS], ids=["cross-entropy", "gaussian"])
def test_ten_updates_give_the_weights_of_plain_pytorch(action: Any) -> None:
    policy, batch = expert(action)
    copy, _ = expert(action)
    copy.load_state_dict(policy.state_dict())
    clone = Clone(policy, CloneSection(learning_rate=3e-3), seed=5)
    generator = torch.Generator().manual_seed(5)
    count = int(batch.valid.sum())
    assert count == batch.valid.numel() - 2
    orders = [torch.randperm(count, generator=generator) for _ in range(10)]
    expected = reference(action, copy, batch, orders, 3e-3)
    for _ in range(10):
        update = clone.update(batch, progress=0.0)
        assert (update.applied, update.steps, update.gradient_steps) == (True, count, 4)
    actor = [p for layer in [*(policy.actor_body.chain or ()), policy.actor_head] for p in layer.parameters()]
    spread = [p for name, p in policy.named_parameters() if "log_std" in name]
    for found, wanted in zip([*actor, *spread], expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-9, atol=1e-12)


def indifferent(**section: Any) -> tuple[Clone, Batch]:
    """A policy that gives both actions the same probability.

    The batch takes action 0 in three steps of four.
    """
    policy = small_policy(0)
    with torch.no_grad():
        policy.actor_head.weight.zero_()
        policy.actor_head.bias.zero_()
    batch = collect(policy)
    taken = (torch.arange(batch.valid.numel()) % 4 == 3).long().view_as(batch.valid)
    return Clone(policy, CloneSection(**section), seed=0), replace(batch, action={"action": taken})


def test_nll_and_accuracy_have_the_values_that_can_be_worked_out() -> None:
    clone, batch = indifferent(learning_rate=0.0)
    clone.validate_on(replace(batch, valid=batch.valid & (batch.action["action"] == 1)))
    metrics = clone.update(batch, progress=0.0).metrics
    assert metrics["nll"] == pytest.approx(math.log(2))
    assert metrics["accuracy"] == 0.75
    assert metrics["validation_nll"] == pytest.approx(math.log(2))
    assert metrics["validation_accuracy"] == 0.0
    assert set(metrics) == set(METRICS)


def test_actions_that_are_no_choices_have_no_accuracy() -> None:
    policy, batch = expert(CONTINUOUS)
    metrics = Clone(policy, CloneSection(), seed=0).update(batch, progress=0.0).metrics
    assert "accuracy" not in metrics
    assert "nll" in metrics


def test_what_is_held_out_is_predicted_better_and_better() -> None:
    batch = collect(small_policy(7), steps=64)
    taken = (batch.observation["observation"][:-1, :, 2] > 0).long()
    batch = replace(batch, action={"action": taken})
    half = torch.zeros_like(batch.valid)
    half[:, :2] = True
    clone = Clone(small_policy(3), CloneSection(learning_rate=1e-2), seed=0)
    clone.validate_on(replace(batch, valid=batch.valid & ~half))
    metrics = [
        clone.update(replace(batch, valid=batch.valid & half), progress=0.0).metrics for _ in range(60)
    ]
    assert metrics[0]["validation_accuracy"] < 0.9
    assert metrics[-1]["validation_accuracy"] > 0.9
    assert metrics[-1]["validation_nll"] < 0.5 * metrics[0]["validation_nll"]


def test_the_critic_is_fitted_to_discounted_returns_where_that_is_asked_for() -> None:
    policy = small_policy(0)
    batch = collect(policy, steps=3)
    ends = torch.zeros_like(batch.valid)
    ends[2] = True
    rewards = torch.tensor([1.0, 2.0, 4.0])[:, None].expand_as(batch.reward)
    batch = replace(
        batch, reward=rewards, terminated=ends, truncated=torch.zeros_like(ends),
        final_slot=torch.empty(0, dtype=torch.int64), final_step=torch.empty(0, dtype=torch.int64),
    )  # fmt: skip
    clone = Clone(policy, CloneSection(value_coefficient=0.5, discount=0.5), seed=0)
    with torch.no_grad():
        steps = clone._steps(batch, see(policy, batch))
    assert steps.target.view_as(rewards)[:, 0].tolist() == pytest.approx([3.0, 4.0, 4.0], rel=1e-6)
    before = clone.update(batch, progress=0.0).metrics["value_loss"]
    for _ in range(200):
        after = clone.update(batch, progress=0.0).metrics["value_loss"]
    assert after < 0.1 * before


def test_a_critic_that_is_not_asked_for_stays_as_it_is() -> None:
    policy, batch = expert()
    critic = {name: p.clone() for name, p in policy.state_dict().items() if "critic" in name}
    Clone(policy, CloneSection(), seed=0).update(batch, progress=0.0)
    assert critic
    assert all(torch.equal(policy.state_dict()[name], tensor) for name, tensor in critic.items())


def test_what_is_not_finite_takes_everything_back() -> None:
    policy, batch = expert()
    clone = Clone(policy, CloneSection(), seed=0)
    clone.update(batch, progress=0.0)
    before = clone.state()
    observation = batch.observation["observation"].clone()
    observation[:] = float("nan")
    update = clone.update(replace(batch, observation={"observation": observation}), progress=0.0)
    assert (update.applied, update.reason, clone.updates) == (False, "nan", 1)
    after = clone.state()
    kept = [name for name in before.tensors if not name.startswith("generator/")]
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in kept)


def test_a_batch_without_a_valid_step_is_empty() -> None:
    policy, batch = expert()
    empty = replace(batch, valid=torch.zeros_like(batch.valid))
    assert Clone(policy, CloneSection(), seed=0).update(empty, progress=0.0).reason == "empty"


def test_dropout_thins_every_step_and_batch_normalisation_is_merged_after_each_pass() -> None:
    batch = collect(small_policy(7))
    section: dict[str, Any] = {"hidden_norm": "batch", "dropout": 0.3}
    one, other = (Clone(small_policy(3, **section), CloneSection(), seed=1) for _ in range(2))
    for _ in range(3):
        assert one.update(batch, progress=0.0).applied
    layers = [layer for layer in one.policy.modules() if isinstance(layer, BatchNorm)]
    assert {layer.merges.item() for layer in layers} == {3.0}
    assert one._measure(batch) == one._measure(batch)
    other.load(one.state())
    whole = Clone(small_policy(3, **section), CloneSection(), seed=1)
    whole.policy.dropouts = ()
    whole.load(one.state())
    for clone in (one, other, whole):
        assert clone.update(batch, progress=0.0).applied
    weights = [encode(clone.policy) for clone in (one, other, whole)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    "section",
    [
        {"recurrent": "lstm"},
        pytest.param({"recurrent": "gru"}, marks=pytest.mark.slow),
        pytest.param({"recurrent": "lstm", "recurrent_size": 8}, marks=pytest.mark.slow),
        {"frame_stack": 2},
    ],
    ids=["lstm", "gru", "lstm as wide as the body", "frames"],
)
def test_a_policy_that_remembers_is_cloned_with_its_memory(section: dict[str, Any]) -> None:
    policy = remembering(**section)
    batch = batch_of([Actor(policy, slots=16, longest=40, unroll=32).fragment(32)])
    assert batch.begins is not None
    before = batch.observation["observation"][:-2, :, 0] > 0
    taken = torch.zeros_like(batch.action["action"])
    taken[1:] = before.long()
    known = ~batch.begins[:-1]
    known[0] = False
    batch = replace(batch, action={"action": taken}, valid=batch.valid & known)
    clone = Clone(policy, CloneSection(learning_rate=1e-2, minibatches=4), seed=0)
    core = {name: p.clone() for name, p in policy.named_parameters() if "actor_core" in name}
    for _ in range(50):
        update = clone.update(batch, progress=0.0)
    assert update.metrics["accuracy"] > 0.9
    assert all(not torch.equal(p, core[name]) for name, p in policy.named_parameters() if name in core)


def test_rows_of_a_recurrent_policy_are_not_taken_one_by_one() -> None:
    policy = remembering(recurrent="lstm")
    inputs = see(policy, batch_of([Actor(policy).fragment(4)])).inputs
    with pytest.raises(ValueError, match="by whole sequences"):
        inputs.select(torch.tensor([0]))
