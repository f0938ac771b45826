"""PPO as an algorithm: batches and budgets, updates, what is undone, what a checkpoint holds."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.config.settings import PPOSection
from penstock.learner.algorithms import ppo as module
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.algorithms.gradient import MinibatchGradient
from penstock.learner.algorithms.losses import Objective
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.rows import Rows
from penstock.learner.batch import Batch
from penstock.policy import weights
from tests.support.experience.experience import collect, same, small_policy


def make(seed: int = 0, policy: dict[str, Any] | None = None, **section: Any) -> PPO:
    """A small PPO."""
    return PPO(small_policy(0, **(policy or {})), PPOSection(**section), seed=seed)


def poisoned(batch: Batch) -> Batch:
    """A batch with one reward that overflows the loss."""
    reward = batch.reward.clone()
    reward[0, 0] = math.inf
    return replace(batch, reward=reward)


def test_a_batch_is_the_fewest_fragments_that_reach_b() -> None:
    ppo: Algorithm = make(batch_steps=100)
    assert [ppo.makes_batch(count, 40 * count) for count in range(5)] == [False, False, False, True, True]


def test_the_budget_is_one_batch_more_than_the_staleness() -> None:
    assert make(batch_steps=100, staleness=2).budget(64) == 300
    with pytest.raises(ValueError, match=r"200 steps is below one fragment of 256"):
        make(batch_steps=100, staleness=1).budget(256)


def test_staleness_settings() -> None:
    assert make(staleness=2).stale_after == 12
    assert make(stale_after=7).stale_after == 7
    assert make(staleness=0).lock_step
    assert not make(staleness=1).lock_step


def test_on_policy_the_first_epoch_starts_without_divergence() -> None:
    ppo = make(epochs=1, minibatches=1, policy={"normalise_observations": True})
    batch = collect(ppo.policy)
    update = ppo.update(batch, progress=0.0)
    assert update.applied
    assert update.steps == int(batch.valid.sum())
    assert update.metrics["kl_behaviour"] == pytest.approx(0.0, abs=1e-6)
    assert update.metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert ppo.updates == 1


def test_a_batch_without_a_valid_step_is_skipped() -> None:
    ppo = make()
    batch = collect(ppo.policy)
    before = ppo.state()
    update = ppo.update(replace(batch, valid=torch.zeros_like(batch.valid)), progress=0.0)
    assert (update.applied, update.reason, update.steps) == (False, "empty", 0)
    assert same(before, ppo.state())


def test_steps_that_are_not_experience_do_not_matter() -> None:
    results = []
    for noise in (0.0, 1e3):
        ppo = make(policy={"normalise_observations": True})
        batch = collect(ppo.policy)
        valid = batch.valid.clone()
        valid[5:8, 1] = False
        observation = batch.observation["observation"].clone()
        # Row 5 is what follows the last valid step before the gap: it is read, rows 6 and 7 are not.
        observation[6:8, 1] += noise
        changed = replace(batch, valid=valid, observation={"observation": observation})
        assert ppo.update(changed, progress=0.0).applied
        results.append(ppo.state())
    assert same(*results)


def test_the_normaliser_is_frozen_during_an_update_and_merged_after() -> None:
    ppo = make(policy={"normalise_observations": True}, epochs=1, minibatches=1)
    batch = collect(ppo.policy)
    assert ppo.update(batch, progress=0.0).metrics["kl_proximal"] == pytest.approx(0.0, abs=1e-7)
    normaliser = ppo.policy.normaliser
    assert normaliser is not None
    rows = batch.observation["observation"][:-1].flatten(0, 1).double()
    torch.testing.assert_close(normaliser.mean, rows.mean(0))
    torch.testing.assert_close(normaliser.variance, rows.var(0, correction=0))
    assert normaliser.count.item() == len(rows)


def test_target_kl_stops_the_epochs() -> None:
    eager: dict[str, Any] = {"learning_rate": 0.05, "epochs": 10}
    assert make(**eager).update(collect(small_policy()), progress=0.0).metrics["epochs"] == 10
    assert make(**eager, target_kl=0.001).update(collect(small_policy()), progress=0.0).metrics["epochs"] < 10


def test_schedules_follow_progress() -> None:
    ppo = make(learning_rate_schedule="linear", clip_schedule="linear", warmup_updates=2, learning_rate=1e-3)
    batch = collect(ppo.policy)
    first, second = (ppo.update(batch, progress=progress).metrics for progress in (0.0, 0.5))
    assert (first["learning_rate"], first["clip_range"]) == pytest.approx((0.5e-3, 0.2))
    assert (second["learning_rate"], second["clip_range"]) == pytest.approx((0.5e-3, 0.1))


def lagging(batch: Batch, *updates: int) -> Batch:
    """The batch, its columns as made by these updates."""
    return replace(batch, update=torch.tensor(updates))


def test_steps_that_are_too_old_are_masked() -> None:
    ppo = make(mask_after=2)
    batch = collect(ppo.policy)
    masked = lagging(batch, 0, 3, 0, 2)
    update = ppo.update(masked, progress=0.0)
    assert update.metrics["masked_fraction"] == 0.25
    assert update.steps == 3 * len(batch.valid)
    other = make(mask_after=2)
    reward = batch.reward.clone()
    reward[:, 1] = 100.0
    assert other.update(replace(masked, reward=reward), progress=0.0).applied
    assert same(ppo.state(), other.state())


def test_a_batch_that_is_masked_as_a_whole_is_empty() -> None:
    ppo = make(mask_after=2)
    update = ppo.update(lagging(collect(ppo.policy), 3, 3, 9, 4), progress=0.0)
    assert (update.applied, update.reason) == (False, "empty")


def test_no_mask_leaves_every_valid_step_in() -> None:
    ppo = make()
    update = ppo.update(lagging(collect(ppo.policy), 30, 30, 30, 30), progress=0.0)
    assert update.metrics["masked_fraction"] == 0.0


def uses(ppo: PPO, batch: Batch) -> list[int]:
    """How many gradient steps each column's first step entered in an update."""
    seen: list[Any] = []
    gradient_of = ppo.gradient_of

    def note(rows: Rows, objective: Objective) -> MinibatchGradient:
        seen.append(rows.inputs.vector.clone())
        return gradient_of(rows, objective)

    ppo.gradient_of = note  # type: ignore[method-assign]
    # Environments of two collectors begin alike: told apart by their column.
    apart = batch.observation["observation"] + torch.arange(4.0)[:, None]
    assert ppo.update(replace(batch, observation={"observation": apart}), progress=0.0).applied
    rows = torch.cat(seen)
    first = apart[0]
    return [int((rows == one).all(1).sum()) for one in first]


def test_a_step_is_used_once_in_each_epoch_and_no_more() -> None:
    assert uses(make(epochs=3), collect(small_policy())) == [3, 3, 3, 3]
    ppo = make(epochs=3, lagging_epochs=1, staleness=1)
    assert uses(ppo, lagging(collect(ppo.policy), 0, 1, 2, 5)) == [3, 3, 1, 1]


def test_reuse_is_told_and_ends_where_nothing_is_fresh() -> None:
    ppo = make(epochs=4, lagging_epochs=2)
    metrics = ppo.update(lagging(collect(ppo.policy), 0, 9, 9, 9), progress=0.0).metrics
    assert (metrics["epochs"], metrics["sample_reuse"]) == (4.0, 2.5)
    ppo = make(epochs=4, lagging_epochs=2)
    metrics = ppo.update(lagging(collect(ppo.policy), 9, 9, 9, 9), progress=0.0).metrics
    assert (metrics["epochs"], metrics["sample_reuse"]) == (2.0, 2.0)


def test_stale_rows_are_found_where_steps_are_missing() -> None:
    ppo = make(epochs=2, lagging_epochs=1)
    batch = lagging(collect(ppo.policy), 9, 0, 9, 9)
    valid = batch.valid.clone()
    valid[3:, 0] = False
    update = ppo.update(replace(batch, valid=valid), progress=0.0)
    count = len(valid)
    assert update.metrics["sample_reuse"] == pytest.approx(1 + count / (3 * count + 3))


def test_the_entropy_coefficient_decays_with_updates() -> None:
    ppo = make(entropy_coefficient=0.1, entropy_decay=0.5, entropy_floor=0.03)
    batch = collect(ppo.policy)
    found = [ppo.update(batch, progress=0.0).metrics["entropy_coefficient"] for _ in range(2)]
    ppo.update(poisoned(batch), progress=0.0)
    found += [ppo.update(batch, progress=0.0).metrics["entropy_coefficient"] for _ in range(2)]
    assert found == [0.1, 0.05, 0.03, 0.03]


def test_the_learning_rate_is_steered_by_the_divergence_of_each_update() -> None:
    ppo = make(adaptive_kl=0.01, learning_rate=1e-9, learning_rate_range=(1e-9, 1e-8), warmup_updates=2)
    batch = collect(ppo.policy)
    rates = [ppo.update(batch, progress=0.5).metrics["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.5e-9, 1e-9, 1e-9, 1.5e-9, 2.25e-9])
    eager = make(adaptive_kl=1e-9, learning_rate=1e-2)
    rates = [eager.update(batch, progress=0.0).metrics["learning_rate"] for _ in range(2)]
    assert rates == pytest.approx([1e-2, 1e-2 / 1.5])


def test_a_steered_rate_survives_a_resume() -> None:
    first = make(adaptive_kl=0.01, learning_rate=1e-9, learning_rate_range=(1e-9, 1e-8))
    batch = collect(first.policy)
    first.update(batch, progress=0.0)
    second = make(adaptive_kl=0.01, learning_rate=1e-9, learning_rate_range=(1e-9, 1e-8))
    second.load(first.state())
    assert second.update(batch, progress=0.0).metrics["learning_rate"] == pytest.approx(1.5e-9)


def test_the_clip_range_follows_its_schedule() -> None:
    for schedule, expected in (("constant", 0.2), ("linear", 0.1), ("cosine", 0.1)):
        ppo = make(clip_schedule=schedule)
        assert ppo.update(collect(ppo.policy), progress=0.5).metrics["clip_range"] == pytest.approx(expected)


def test_a_state_does_not_follow_later_updates() -> None:
    ppo = make()
    state = ppo.state()
    copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
    ppo.update(collect(ppo.policy), progress=0.0)
    assert all(torch.equal(copies[name], tensor) for name, tensor in state.tensors.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("policy/actor_head.bias", "policy/actor_head.bias"),
        ("optimiser/second/actor_head.bias", "second/actor_head.bias"),
        ("generator/permutations", "generator/permutations"),
    ],
)
def test_a_state_with_a_part_missing_is_refused(name: str, message: str) -> None:
    state = make().state()
    del state.tensors[name]
    with pytest.raises(ValueError, match=message):
        make().load(state)


def test_the_same_seed_gives_the_same_weights_bit_by_bit() -> None:
    blobs = []
    for seed in (1, 1, 2):
        ppo = make(seed)
        batch = collect(small_policy())
        for _ in range(3):
            ppo.update(batch, progress=0.0)
        blobs.append(weights.encode(ppo.policy))
    assert blobs[0] == blobs[1] != blobs[2]


def test_it_is_an_algorithm() -> None:
    algorithm: Algorithm = make()
    assert isinstance(algorithm, module.PPO)
    assert algorithm.published_modules() == {"default": algorithm.policy}
    assert algorithm.requires() == ()
    assert algorithm.retain_from() is None
    assert algorithm.scalars(0.5) == {}
