"""On fresh experience every ratio is 1: actor, π_prox and the gradient step compute the same policy.

Between π_prox and the first gradient step exactly: the ratios are 1 to the bit. Between actor and learner to
rounding: for a network that is a plain chain the actor computes with numpy what the learner computes with
torch.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.batch import Batch
from penstock.policy import weights
from penstock.policy.networks import BatchNorm
from tests.support.experience.any_spaces import Acting, AnySpace

ROUNDING = 2e-5
"""Largest difference of two log-probabilities of a few nats in float32."""
IMAGE = spaces.Box(0, 255, (10, 10, 3), np.uint8)
LARGE = spaces.Box(0, 255, (40, 40), np.uint8)
VECTOR = spaces.Box(-1, 1, (6,), np.float32)
NESTED = spaces.Dict(camera=IMAGE, arm=VECTOR, rest=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))))

NETWORKS: dict[str, tuple[AnySpace, dict[str, Any]]] = {
    "plain": (VECTOR, {}),
    "plain, shared": (VECTOR, {"shared_trunk": True}),
    "normalised observations": (VECTOR, {"normalise_observations": True}),
    "layer norm": (VECTOR, {"hidden_norm": "layer"}),
    "batch norm": (VECTOR, {"hidden_norm": "batch"}),
    "batch norm, shared": (VECTOR, {"hidden_norm": "batch", "shared_trunk": True}),
    "dropout": (VECTOR, {"dropout": 0.3}),
    "batch norm and dropout": (VECTOR, {"hidden_norm": "batch", "dropout": 0.3}),
    "all of them": (NESTED, {"hidden_norm": "batch", "dropout": 0.3, "normalise_observations": True}),
    "layer norm and dropout, shared": (
        NESTED,
        {"hidden_norm": "layer", "dropout": 0.3, "shared_trunk": True, "activation": "silu"},
    ),
    "small trunk": (IMAGE, {"image_trunk": "small"}),
    "nature": (LARGE, {"shared_trunk": True}),
    "impala": (IMAGE, {"image_trunk": "impala", "shared_trunk": True}),
    "impala and dropout": (IMAGE, {"image_trunk": "impala", "dropout": 0.5}),
    "one's own": (VECTOR, {"network": "tests.unit.penstock.policy.own_networks:Good"}),
}


def trained(name: str, **algorithm: Any) -> tuple[Acting, PPO]:
    """A policy that has learned from two batches.

    Its statistics and biases are thus no longer the initial ones.
    """
    space, section = NETWORKS[name]
    acting = Acting(space, spaces.Discrete(3), PolicySection(**({"hidden_sizes": (16, 16)} | section)))
    ppo = PPO(acting.policy, PPOSection(**({"minibatches": 3} | algorithm)), seed=3)
    for _ in range(2):
        assert ppo.update(acting.batch(), progress=0.0).applied
    return acting, ppo


def first_epoch(ppo: PPO, batch: Batch) -> torch.Tensor:
    """π_θ / π_prox [n] of an epoch's gradient steps of length 0, as the surrogate computes it."""
    with torch.no_grad():
        prepared = ppo.prepare(batch, batch.reward, RankGroup().rows_of(batch.valid))
    record = ppo._train(batch, prepared, replace(ppo._schedule(0.0), learning_rate=0.0))
    assert record.rows is not None
    ratio: torch.Tensor = (torch.cat(record.log_prob) - record.rows.proximal).exp()
    return ratio


@pytest.mark.parametrize("name", NETWORKS)
def test_the_ratio_on_fresh_experience_is_one(name: str) -> None:
    acting, ppo = trained(name, epochs=1)
    batch = acting.batch()
    assert (first_epoch(ppo, batch) == 1.0).all()
    policy, seen = acting.policy, {k: v[:-1] for k, v in batch.observation.items()}
    parameters = policy.outputs(policy.read(seen)).parameters.reshape(*batch.log_prob.shape, -1)
    again = policy.joint_log_prob(parameters, batch.action)
    torch.testing.assert_close(again[batch.valid], batch.log_prob[batch.valid], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("name", ["dropout", "one's own"])
def test_the_slope_goes_through_a_thinned_network(name: str) -> None:
    parameters = []
    for is_thinned in (True, False):
        acting, ppo = trained(name)
        if not is_thinned:
            acting.policy.dropouts = ()
        assert ppo.update(acting.batch(), progress=0.0).applied
        parameters.append(torch.cat([p.detach().flatten() for p in acting.policy.parameters()]))
    assert not torch.equal(*parameters)


@pytest.mark.parametrize("name", ["batch norm, shared", "batch norm and dropout", "one's own"])
def test_the_statistics_stand_still_in_an_update_and_are_merged_after_it(name: str) -> None:
    acting, ppo = trained(name)
    layers = [layer for layer in acting.policy.modules() if isinstance(layer, BatchNorm)]
    seen: list[list[torch.Tensor]] = []
    hook = layers[0].register_forward_hook(
        lambda layer, *_: seen.append([layer.mean.clone()] if layer.measuring is None else [])
    )
    batch = acting.batch()
    assert ppo.update(batch, progress=0.0).applied
    hook.remove()
    during = [means[0] for means in seen if means]
    assert all(torch.equal(mean, during[0]) for mean in during)
    assert not torch.equal(layers[0].mean, during[0])
    assert {layer.merges.item() for layer in layers} == {3.0}
    assert {name for name in weights.snapshot(acting.policy) if name.endswith("merges")}


def test_an_update_that_is_not_finite_leaves_the_statistics_alone() -> None:
    acting, ppo = trained("batch norm")
    before = weights.encode(acting.policy)
    batch = acting.batch()
    batch.reward[:] = torch.inf
    assert ppo.update(batch, progress=0.0).reason == "nan"
    assert weights.encode(acting.policy) == before


def test_another_rank_drops_other_features_and_each_time_the_same() -> None:
    gradients = []
    for rank in (0, 1, 1):
        acting, ppo = trained("dropout")
        ppo._group = RankGroup()
        ppo._group.rank = rank
        inputs = acting.policy.read(acting.batch().observation)
        with ppo._thinned(inputs):
            gradients.append(ppo._network.outputs(inputs).parameters)
    assert not torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[1], gradients[2])


def test_a_resumed_update_drops_the_same_features() -> None:
    acting, ppo = trained("batch norm and dropout")
    state, batch = ppo.state(), acting.batch()
    assert ppo.update(batch, progress=0.0).applied
    expected = weights.encode(acting.policy)
    resumed = trained("batch norm and dropout")[1]
    resumed.load(state)
    assert resumed.update(batch, progress=0.0).applied
    assert weights.encode(resumed.policy) == expected
