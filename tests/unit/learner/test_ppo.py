import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.config.algorithm_sections import SECTIONS
from penstock.config.settings import ImpalaSection, PolicySection, PPOSection, ReinforceSection
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.algorithms.gradient import MinibatchGradient
from penstock.learner.algorithms.losses import Objective
from penstock.learner.algorithms.ppo import CLIP, PPO, Impala, Reinforce, RewardScale
from penstock.learner.algorithms.registry import ALGORITHMS
from penstock.learner.algorithms.rows import RankGroup, Rows
from penstock.learner.batch import Batch
from penstock.policy import weights
from penstock.policy.networks import BatchNorm
from tests.support.experience.experience import (
    FRAGMENTS,
    SLOTS,
    STEPS,
    Acting,
    AnySpace,
    collect,
    same,
    small_policy,
)


def make(name: str, policy: dict[str, Any] | None = None, **section: Any) -> Algorithm:
    made = {"impala": ImpalaSection, "reinforce": ReinforceSection}[name](**section)
    return ALGORITHMS[name](small_policy(0, **(policy or {})), made, seed=0)


def experience() -> Batch:
    return collect(small_policy(7))


def test_every_section_has_its_algorithm() -> None:
    assert SECTIONS.keys() == ALGORITHMS.keys()
    assert all(section.model_fields["name"].default == name for name, section in SECTIONS.items())


@pytest.mark.parametrize("name", ["impala", "reinforce"])
def test_an_update_is_one_gradient_step_of_scheduled_rate_and_coefficients(name: str) -> None:
    algorithm = make(
        name, learning_rate=1e-3, learning_rate_schedule="linear", warmup_updates=2,
        entropy_coefficient=0.1, entropy_decay=0.5, entropy_floor=0.04,
    )  # fmt: skip
    updates = [algorithm.update(experience(), progress=p) for p in (0.0, 0.25, 0.5)]
    assert [update.gradient_steps for update in updates] == [1, 1, 1]
    told = [update.metrics for update in updates]
    assert [m["learning_rate"] for m in told] == pytest.approx([0.5e-3, 0.75e-3, 0.5e-3])
    assert [m["entropy_coefficient"] for m in told] == [0.1, 0.05, 0.04]


def test_impala_weighs_experience_by_its_ratio_and_reinforce_does_not() -> None:
    numbers: dict[str, Any] = {"normalise_advantages": False, "max_gradient_norm": 0.0}
    for batch, alike in ((collect(small_policy(0)), True), (experience(), False)):
        impala = Impala(small_policy(0), ImpalaSection(**numbers), seed=0)
        reinforce = Reinforce(small_policy(0), ReinforceSection(**numbers), seed=0)
        losses = [a.update(batch, progress=0.0).metrics["policy_loss"] for a in (impala, reinforce)]
        assert (losses[0] == pytest.approx(losses[1], rel=1e-4)) is alike


def test_truncated_ratios_bound_the_weight_of_a_step() -> None:
    impala = make("impala", rho_clip=0.0, value_coefficient=0.0)
    before = weights.encode(impala.published_modules()["default"])
    assert impala.update(experience(), progress=0.0).metrics["gradient_norm"] == 0.0
    assert weights.encode(impala.published_modules()["default"]) == before


def ppo_make(seed: int = 0, policy: dict[str, Any] | None = None, **section: Any) -> PPO:
    return PPO(small_policy(0, **(policy or {})), PPOSection(**section), seed=seed)


def poisoned(batch: Batch) -> Batch:
    reward = batch.reward.clone()
    reward[0, 0] = math.inf
    return replace(batch, reward=reward)


def test_a_batch_takes_the_fewest_fragments_that_reach_its_size() -> None:
    ppo: Algorithm = ppo_make(batch_steps=100)
    assert [ppo.makes_batch(count, 40 * count) for count in range(5)] == [False, False, False, True, True]


def test_the_budget_is_one_batch_more_than_the_staleness() -> None:
    assert ppo_make(batch_steps=100, staleness=2).budget(64) == 300
    with pytest.raises(ValueError, match=r"200 steps is below one fragment of 256"):
        ppo_make(batch_steps=100, staleness=1).budget(256)


def test_invalid_steps_do_not_matter() -> None:
    results = []
    for noise in (0.0, 1e3):
        ppo = ppo_make(policy={"normalise_observations": True})
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


def test_target_kl_stops_the_epochs() -> None:
    eager: dict[str, Any] = {"learning_rate": 0.05, "epochs": 10}
    algorithms = ppo_make(**eager), ppo_make(**eager, target_kl=0.001)
    free, held = (each.update(collect(small_policy()), progress=0.0).metrics["epochs"] for each in algorithms)
    assert held < free == 10


def test_schedules_follow_progress() -> None:
    ppo = ppo_make(
        learning_rate_schedule="linear", clip_schedule="linear", warmup_updates=2, learning_rate=1e-3
    )
    batch = collect(ppo.policy)
    first, second = (ppo.update(batch, progress=progress).metrics for progress in (0.0, 0.5))
    assert (first["learning_rate"], first["clip_range"]) == pytest.approx((0.5e-3, 0.2))
    assert (second["learning_rate"], second["clip_range"]) == pytest.approx((0.5e-3, 0.1))


def lagging(batch: Batch, *updates: int) -> Batch:
    """The batch, its columns as made by these updates."""
    return replace(batch, update=torch.tensor(updates))


def test_stale_steps_are_masked() -> None:
    ppo = ppo_make(mask_after=2)
    batch = collect(ppo.policy)
    masked = lagging(batch, 0, 3, 0, 2)
    update = ppo.update(masked, progress=0.0)
    assert update.metrics["masked_fraction"] == 0.25
    assert update.steps == 3 * len(batch.valid)
    other = ppo_make(mask_after=2)
    reward = batch.reward.clone()
    reward[:, 1] = 100.0
    assert other.update(replace(masked, reward=reward), progress=0.0).applied
    assert same(ppo.state(), other.state())
    assert ppo_make(mask_after=2).update(lagging(batch, 3, 3, 9, 4), progress=0.0).reason == "empty"
    assert ppo_make().update(lagging(batch, 30, 30, 30, 30), progress=0.0).metrics["masked_fraction"] == 0.0


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


def test_a_step_is_used_exactly_once_in_each_epoch() -> None:
    assert uses(ppo_make(epochs=3), collect(small_policy())) == [3, 3, 3, 3]
    ppo = ppo_make(epochs=3, lagging_epochs=1, staleness=1)
    assert uses(ppo, lagging(collect(ppo.policy), 0, 1, 2, 5)) == [3, 3, 1, 1]


def test_reuse_is_reported_and_ends_without_fresh_steps() -> None:
    ppo = ppo_make(epochs=4, lagging_epochs=2)
    metrics = ppo.update(lagging(collect(ppo.policy), 0, 9, 9, 9), progress=0.0).metrics
    assert (metrics["epochs"], metrics["sample_reuse"]) == (4.0, 2.5)
    ppo = ppo_make(epochs=4, lagging_epochs=2)
    metrics = ppo.update(lagging(collect(ppo.policy), 9, 9, 9, 9), progress=0.0).metrics
    assert (metrics["epochs"], metrics["sample_reuse"]) == (2.0, 2.0)


def test_stale_rows_are_found_also_where_steps_are_missing() -> None:
    ppo = ppo_make(epochs=2, lagging_epochs=1)
    batch = lagging(collect(ppo.policy), 9, 0, 9, 9)
    valid = batch.valid.clone()
    valid[3:, 0] = False
    update = ppo.update(replace(batch, valid=valid), progress=0.0)
    count = len(valid)
    assert update.metrics["sample_reuse"] == pytest.approx(1 + count / (3 * count + 3))


def test_the_entropy_coefficient_decays_with_updates() -> None:
    ppo = ppo_make(entropy_coefficient=0.1, entropy_decay=0.5, entropy_floor=0.03)
    batch = collect(ppo.policy)
    found = [ppo.update(batch, progress=0.0).metrics["entropy_coefficient"] for _ in range(2)]
    ppo.update(poisoned(batch), progress=0.0)
    found += [ppo.update(batch, progress=0.0).metrics["entropy_coefficient"] for _ in range(2)]
    assert found == [0.1, 0.05, 0.03, 0.03]


def test_the_learning_rate_is_steered_by_the_divergence_of_each_update() -> None:
    ppo = ppo_make(adaptive_kl=0.01, learning_rate=1e-9, learning_rate_range=(1e-9, 1e-8), warmup_updates=2)
    batch = collect(ppo.policy)
    rates = [ppo.update(batch, progress=0.5).metrics["learning_rate"] for _ in range(4)]
    resumed = ppo_make(
        adaptive_kl=0.01, learning_rate=1e-9, learning_rate_range=(1e-9, 1e-8), warmup_updates=2
    )
    resumed.load(ppo.state())
    rates.append(resumed.update(batch, progress=0.5).metrics["learning_rate"])
    assert rates == pytest.approx([0.5e-9, 1e-9, 1e-9, 1.5e-9, 2.25e-9])
    eager = ppo_make(adaptive_kl=1e-9, learning_rate=1e-2)
    rates = [eager.update(batch, progress=0.0).metrics["learning_rate"] for _ in range(2)]
    assert rates == pytest.approx([1e-2, 1e-2 / 1.5])


OBSERVATIONS: dict[str, AnySpace] = {
    "vector": spaces.Box(-2, 2, (3,), np.float32),
    "float64 matrix": spaces.Box(-2, 2, (2, 3), np.float64),
    "bytes": spaces.Box(0, 255, (5,), np.uint8),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "choice": spaces.Discrete(4, start=-1),
    "choices": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        camera=spaces.Box(0, 255, (9, 8), np.uint8),
        behind=spaces.Box(0, 255, (3, 8, 8), np.uint8),
        arm=spaces.Box(-5, 5, (2,), np.float32),
        gear=spaces.Discrete(3),
        lamps=spaces.MultiBinary(2),
    ),
    "tuple": spaces.Tuple((spaces.Box(-1, 1, (), np.float32), spaces.MultiDiscrete([2, 2]))),
    "nested": spaces.Dict(
        inner=spaces.Tuple((spaces.Discrete(2), spaces.Dict(deep=spaces.Box(-1, 1, (2,), np.float32))))
    ),
}
ACTIONS: dict[str, AnySpace] = {
    "discrete": spaces.Discrete(3),
    "discrete from 2": spaces.Discrete(3, start=2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-0.5, 2.0, (2,), np.float32),
    "float64 box": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "hybrid tuple": spaces.Tuple(
        (spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2))
    ),
    "dict": spaces.Dict(
        turn=spaces.Box(-1, 1, (1,), np.float32),
        press=spaces.Tuple((spaces.MultiDiscrete([2, 4]), spaces.Discrete(2, start=1))),
    ),
}
SMALL = {"hidden_sizes": (16,)}


def check_update(acting: Acting) -> Batch:
    """One update: log-probabilities agree before it, every parameter has a gradient and moves by it."""
    batch, policy = acting.batch(), acting.policy
    count = STEPS * SLOTS * FRAGMENTS
    assert int(batch.valid.sum()) == count
    observed = {path: rows[:-1].flatten(0, 1).numpy() for path, rows in batch.observation.items()}
    action = {path: rows.flatten(0, 1).numpy() for path, rows in batch.action.items()}
    np.testing.assert_allclose(policy.log_prob(observed, action), batch.log_prob.flatten(), atol=5e-5)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    ppo = PPO(policy, PPOSection(epochs=1, minibatches=2, entropy_coefficient=0.01), seed=0)
    update = ppo.update(batch, progress=0.0)
    assert (update.applied, update.steps) == (True, count)
    assert update.metrics["kl_behaviour"] < 0.1
    still = [name for name, parameter in policy.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []
    return batch


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_is_learned_from(name: str) -> None:
    section = PolicySection.model_validate({"normalise_observations": True} | SMALL)
    acting = Acting(OBSERVATIONS[name], spaces.Discrete(2), section)
    batch, normaliser = check_update(acting), acting.policy.normaliser
    rows = acting.policy.reader.reals
    assert (normaliser is None) == (not rows)
    if normaliser is not None:
        steps = batch.valid.numel()
        observed = {path: values[:-1] for path, values in batch.observation.items()}
        reals = np.concatenate(
            [
                observed[path].double().numpy().reshape(steps, -1) / (255 if leaf.dtype == "uint8" else 1)
                for path, leaf in rows
            ],
            1,
        )
        np.testing.assert_allclose(normaliser.mean, reals.mean(0), rtol=1e-6)
        np.testing.assert_allclose(normaliser.variance, reals.var(0), rtol=1e-6)
        # The next batch is acted, and learned from, with these statistics.
        check_update(acting)


@pytest.mark.parametrize(
    ("continuous", "name"),
    [
        *(("clipped", name) for name in ACTIONS),
        *(("squashed", name) for name in ("box", "float64 box", "hybrid tuple", "dict")),
    ],
)
def test_every_action_is_learned(continuous: str, name: str) -> None:
    section = PolicySection.model_validate(SMALL | {"continuous": continuous})
    check_update(Acting(OBSERVATIONS["vector"], ACTIONS[name], section))


@pytest.mark.parametrize(
    "section",
    [
        {"image_trunk": "small", "hidden_norm": "layer"},
        {"image_trunk": "small", "shared_trunk": True, "dropout": 0.2},
        {"image_trunk": "impala", "hidden_norm": "batch", "dropout": 0.2},
        {"image_trunk": "impala", "hidden_norm": "batch", "shared_trunk": True},
    ],
)
def test_spaces_with_parts_of_every_kind_are_trained(section: dict[str, object]) -> None:
    told = PolicySection.model_validate(SMALL | {"normalise_observations": True} | section)
    check_update(Acting(OBSERVATIONS["dict"], ACTIONS["hybrid tuple"], told))


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
    "impala and dropout": (IMAGE, {"image_trunk": "impala", "dropout": 0.5, "shared_trunk": True}),
    "one's own": (VECTOR, {"network": "tests.support.experience.own_networks:Good"}),
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
def test_gradient_steps_run_with_dropout(name: str) -> None:
    parameters = []
    for is_thinned in (True, False):
        acting, ppo = trained(name)
        if not is_thinned:
            acting.policy.dropouts = ()
        assert ppo.update(acting.batch(), progress=0.0).applied
        parameters.append(torch.cat([p.detach().flatten() for p in acting.policy.parameters()]))
    assert not torch.equal(*parameters)


@pytest.mark.parametrize("name", ["batch norm, shared", "batch norm and dropout", "one's own"])
def test_normalisation_statistics_change_only_after_an_update(name: str) -> None:
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


DISCOUNT = 0.9


def batch(rewards: np.ndarray, ends: np.ndarray, slots: tuple[tuple[int, int], ...]) -> Batch:
    """Rewards [T, B], and where an episode ends."""
    whole = collect(small_policy(), steps=len(rewards))
    return replace(
        whole,
        reward=torch.from_numpy(rewards.astype(np.float32)),
        terminated=torch.from_numpy(ends),
        truncated=torch.zeros(ends.shape, dtype=torch.bool),
        valid=torch.ones(ends.shape, dtype=torch.bool),
        slots=slots,
    )


def returns_of(rewards: np.ndarray, ends: np.ndarray) -> list[float]:
    """The discounted return after each step of one environment."""
    result, current = [], 0.0
    for reward, end in zip(rewards, ends, strict=True):
        current = DISCOUNT * current + reward
        result.append(current)
        current = 0.0 if end else current
    return result


def test_returns_continue_across_columns_and_batches_of_an_environment() -> None:
    random = np.random.default_rng(0)
    rewards, ends = random.standard_normal((2, 6, 3)), random.random((2, 6, 3)) < 0.2
    scale, slots = RewardScale(DISCOUNT, RankGroup()), ((1, 0), (1, 0), (2, 0))
    for part in range(2):
        scaled = scale.scale(batch(rewards[part], ends[part], slots))
        scale.commit(scaled)
    first = [
        returns_of(
            np.concatenate([rewards[p, :, c] for p in range(2) for c in (0, 1)]),
            np.concatenate([ends[p, :, c] for p in range(2) for c in (0, 1)]),
        )
    ]
    second = returns_of(rewards[:, :, 2].flatten(), ends[:, :, 2].flatten())
    deviation = np.std(np.concatenate([*first, second]))
    expected = np.clip(rewards[1] / deviation, -CLIP, CLIP)
    np.testing.assert_allclose(scaled.rewards.numpy(), expected, rtol=1e-5)
