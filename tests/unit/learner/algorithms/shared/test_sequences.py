"""PPO over whole columns of a recurrent policy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import PPOSection
from penstock.learner.algorithms.gradient import DenseNetwork, FlatAdam, Network, network_of
from penstock.learner.algorithms.ppo import PPO, Prepared
from penstock.learner.algorithms.rows import RankGroup, Sequences
from penstock.learner.batch import Batch
from penstock.policy import weights
from penstock.policy.policy import Policy
from tests.support.experience.remembering import Actor, batch_of, remembering

FRESH = PPOSection(epochs=1, minibatches=3, learning_rate=0.0)


def collected(policy: Policy, *lengths: int, **options: Any) -> Batch:
    """A batch of fragments of those lengths."""
    actor = Actor(policy, **options)
    return batch_of([actor.fragment(steps) for steps in lengths])


def prepared(policy: Policy, batch: Batch, section: PPOSection = FRESH) -> Prepared:
    """Before the first gradient step."""
    with torch.no_grad():
        return PPO(policy, section, seed=0).prepare(batch, batch.reward, RankGroup().rows_of(batch.valid))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("burn_in", [0, 3])
def test_the_ratio_is_one_on_fresh_data(kind: str, burn_in: int) -> None:
    policy = remembering(recurrent=kind, burn_in=burn_in)
    batch = collected(policy, 8, 5, 8, masked=True)
    update = PPO(policy, FRESH, seed=0).update(batch, progress=0.0)
    assert update.applied
    assert update.metrics["max_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert update.metrics["kl_behaviour"] == pytest.approx(0.0, abs=1e-7)
    assert update.metrics["kl_proximal"] == pytest.approx(0.0, abs=1e-7)
    assert update.metrics["clip_fraction"] == 0
    assert update.metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert update.gradient_steps == 3


def test_state_that_is_not_carried_would_be_seen() -> None:
    policy = remembering(recurrent="lstm")
    batch = collected(policy, 8, 8, longest=40)
    forgotten = replace(batch, state={name: torch.zeros_like(one) for name, one in batch.state.items()})
    assert PPO(policy, FRESH, seed=0).update(forgotten, progress=0.0).metrics["max_ratio"] > 1.02


def test_steps_of_the_burn_in_carry_no_loss() -> None:
    policy = remembering(recurrent="gru", burn_in=4)
    batch = collected(policy, 8, 4, 6)
    kept = batch.valid.clone()
    kept[:4] = False
    rows = prepared(policy, batch).rows
    assert isinstance(rows, Sequences)
    assert rows.steps == int(kept.sum()) == 18
    assert len(rows) == int(kept.any(0).sum()) == 6
    assert [part.steps for part in rows.cut([(2, 2)] * 3)] == [8, 6, 4]


def test_a_batch_that_is_all_burn_in_is_skipped() -> None:
    policy = remembering(recurrent="gru", burn_in=4)
    ppo = PPO(policy, FRESH, seed=0)
    before = weights.encode(policy)
    update = ppo.update(collected(policy, 4, 3), progress=0.0)
    assert (update.applied, update.reason, update.steps) == (False, "empty", 0)
    assert weights.encode(policy) == before


def test_minibatches_are_whole_columns_in_the_order_of_the_permutation() -> None:
    policy = remembering(recurrent="lstm")
    batch = collected(policy, 8, 5, slots=2)
    rows = prepared(policy, batch).rows
    order = torch.tensor([2, 0, 3, 1])
    first, second = rows.select(order).cut([(2, 2)] * 2)
    expected = [batch.log_prob[:steps, column] for column, steps in ((2, 5), (0, 8), (3, 5), (1, 8))]
    torch.testing.assert_close(first.behaviour, torch.cat(expected[:2]))
    torch.testing.assert_close(second.behaviour, torch.cat(expected[2:]))
    chosen = [batch.action["action"][:steps, column] for column, steps in ((2, 5), (0, 8))]
    torch.testing.assert_close(first.action["action"], torch.cat(chosen))


def test_steps_that_are_not_experience_do_not_matter_to_a_recurrent_policy() -> None:
    blobs = []
    for noise in (0.0, 1e3):
        policy = remembering(recurrent="lstm")
        batch = collected(policy, 8, 5)
        observation = batch.observation["observation"].clone()
        observation[6:, 3:] += noise
        changed = replace(batch, observation={"observation": observation})
        assert PPO(policy, PPOSection(minibatches=2), seed=0).update(changed, progress=0.0).applied
        blobs.append(weights.encode(policy))
    assert blobs[0] == blobs[1]


def test_gradients_reach_through_time() -> None:
    policy = remembering(recurrent="gru", shared_trunk=True)
    batch = collected(policy, 8, longest=40)
    core = policy.memory.actor_core
    assert core is not None
    rows = prepared(policy, batch).rows
    part = next(iter(rows.cut([(len(rows), len(rows))])))
    adam = FlatAdam(policy, 1e-5)
    network = network_of(policy, adam)
    outputs = network.outputs(part.inputs)
    gradient = network.gradient(outputs.value.sum())
    assert type(network) is Network
    recurrent = adam.gradient_views[[id(own) for own in adam.own].index(id(core.rnn.weight_hh_l0))]
    assert torch.isfinite(gradient).all()
    assert recurrent.abs().max() > 0


def test_frame_stacks_are_rows_like_any_others() -> None:
    policy = remembering(frame_stack=3, normalise_observations=True, activation="tanh")
    batch = collected(policy, 8, 8, masked=True)
    ppo = PPO(policy, PPOSection(epochs=1, minibatches=1, learning_rate=0.0), seed=0)
    assert isinstance(ppo._network, DenseNetwork)
    with torch.no_grad():
        assert len(ppo.prepare(batch, batch.reward, RankGroup().rows_of(batch.valid)).rows) == int(
            batch.valid.sum()
        )
    assert ppo.update(batch, progress=0.0).metrics["max_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert policy.normaliser is not None
    newest = batch.observation["observation"][:-1].flatten(0, 1).double()
    torch.testing.assert_close(policy.normaliser.mean[-3:], newest.mean(0))
    assert not np.allclose(policy.normaliser.mean[:3], policy.normaliser.mean[-3:])


@pytest.mark.parametrize("section", [{}, {"recurrent": "lstm"}])
def test_a_forbidden_action_stays_without_probability_while_others_learn(section: dict[str, Any]) -> None:
    policy = remembering(**section)
    batch = collected(policy, 8, 8, masked=True)
    mask = batch.observation["mask/action"].clone()
    mask[..., 2] = False
    mask[..., :2] |= ~mask.any(-1, keepdim=True)
    never = replace(batch, observation=batch.observation | {"mask/action": mask})
    action = batch.action["action"].clone()
    action[action == 2] = mask[:-1].float().argmax(-1)[action == 2]
    taken = torch.where(mask[:-1].gather(-1, action[..., None])[..., 0], action, mask[:-1].float().argmax(-1))
    before = policy.actor_head.weight.detach().clone()
    ppo = PPO(policy, PPOSection(epochs=2, minibatches=2, entropy_coefficient=0.01), seed=0)
    assert ppo.update(replace(never, action={"action": taken}), progress=0.0).applied
    assert torch.equal(policy.actor_head.weight[2], before[2])
    assert not torch.equal(policy.actor_head.weight[:2], before[:2])
