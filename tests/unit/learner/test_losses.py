import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms import gradient as algorithms_gradient
from penstock.learner.algorithms import losses as loss
from penstock.learner.algorithms.gradient import (
    DenseNetwork,
    FlatAdam,
    Network,
    _value_slope,
    has_slopes,
    network_of,
)
from penstock.learner.algorithms.losses import (
    Objective,
    adapted,
    carries,
    decayed,
    factor,
    gae,
    next_values,
    steered,
    vtrace,
    warmup,
)
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.rows import Rows
from penstock.policy.actor_critic import Outputs
from penstock.policy.networks import Inputs
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Dict, Discrete, MultiDiscrete, Space
from tests.support.experience.experience import box, collect, image, small_policy

DISCOUNT, GAE_LAMBDA, RHO, C = 0.97, 0.9, 1.0, 0.8


def case(seed: int, steps: int = 23, columns: int = 7) -> Any:
    """Random unrolls: some steps terminate, some truncate, and one after an end may be no experience."""
    random = np.random.default_rng(seed)
    ends = random.random((steps, columns)) < 0.15
    terminated = ends & (random.random(ends.shape) < 0.5)
    valid = np.ones_like(ends)
    valid[1:] = ~(ends[:-1] & (random.random((steps - 1, columns)) < 0.5))
    valid[steps - 4 :, 0] = False
    terminated, truncated = terminated & valid, ends & ~terminated & valid
    step, slot = (terminated | truncated).nonzero()
    arrays: dict[str, Any] = {"terminated": terminated, "truncated": truncated, "valid": valid}
    arrays |= {"final_slot": slot, "final_step": step, "finals": random.standard_normal(len(step))}
    for name, shape in (("rewards", ends.shape), ("observed", (steps + 1, columns)), ("ratios", ends.shape)):
        arrays[name] = random.standard_normal(shape)
    return SimpleNamespace(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def tensors(case: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What both estimators take."""
    following = next_values(case.observed, case.terminated, case.final_slot, case.final_step, case.finals)
    carried = carries(case.terminated, case.truncated, case.valid)
    return case.rewards, case.observed[:-1], following, carried, case.valid


def follows(case: Any, t: int, b: int) -> float:
    """V of what follows a step, looked up one by one."""
    if case.terminated[t, b]:
        return 0.0
    for slot, step, value in zip(case.final_slot, case.final_step, case.finals, strict=True):
        if (int(slot), int(step)) == (b, t):
            return float(value)
    return float(case.observed[t + 1, b])


def runs_on(case: Any, t: int, b: int) -> bool:
    """Whether step t + 1 continues the episode of step t in this batch."""
    if t + 1 >= len(case.rewards) or case.terminated[t, b] or case.truncated[t, b]:
        return False
    return bool(case.valid[t + 1, b])


def summed(case: Any, *, vtrace: bool) -> tuple[Any, Any]:
    """Advantage and target of every step as a sum over all later steps of its episode: O(T²)."""
    steps, columns = case.rewards.shape
    advantage, target = np.zeros((steps, columns)), np.zeros((steps, columns))
    correction = np.zeros((steps + 1, columns))
    ratio = np.exp(0.5 * case.ratios.numpy()) if vtrace else np.ones((steps, columns))
    for b in range(columns):
        for t in range(steps):
            if not case.valid[t, b]:
                continue
            weight, k = 1.0, t
            while True:
                value = float(case.observed[k, b])
                delta = float(case.rewards[k, b]) + DISCOUNT * follows(case, k, b) - value
                correction[t, b] += weight * min(RHO, ratio[k, b]) * delta if vtrace else weight * delta
                if not runs_on(case, k, b):
                    break
                weight *= DISCOUNT * GAE_LAMBDA * (min(C, ratio[k, b]) if vtrace else 1.0)
                k += 1
            target[t, b] = float(case.observed[t, b]) + correction[t, b]
    for b in range(columns):
        for t in range(steps):
            if case.valid[t, b]:
                later = follows(case, t, b) + (correction[t + 1, b] if runs_on(case, t, b) else 0.0)
                one_step = float(case.rewards[t, b]) + DISCOUNT * later - float(case.observed[t, b])
                advantage[t, b] = one_step if vtrace else correction[t, b]
    return advantage, target


@pytest.mark.parametrize("vtrace_", [False, True], ids=["gae", "vtrace"])
@pytest.mark.parametrize("seed", range(5))
def test_estimates_equal_the_sum_over_later_steps(seed: int, *, vtrace_: bool) -> None:
    unrolls = case(seed)
    expected_advantage, expected_target = summed(unrolls, vtrace=vtrace_)
    numbers: dict[str, Any] = {"discount": DISCOUNT, "gae_lambda": GAE_LAMBDA}
    if vtrace_:
        result = vtrace(*tensors(unrolls), 0.5 * unrolls.ratios, **numbers, rho_clip=RHO, c_clip=C)
    else:
        result = gae(*tensors(unrolls), **numbers)
    np.testing.assert_allclose(result.advantage.numpy(), expected_advantage, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.target.numpy(), expected_target, rtol=1e-9, atol=1e-12)


def test_on_policy_vtrace_has_the_targets_of_gae_and_at_lambda_one_its_advantages() -> None:
    given = tensors(case(3))
    for gae_lambda in (GAE_LAMBDA, 1.0):
        numbers: dict[str, Any] = {"discount": DISCOUNT, "gae_lambda": gae_lambda}
        estimated = gae(*given, **numbers)
        traced = vtrace(*given, torch.zeros_like(given[0]), **numbers, rho_clip=1.0, c_clip=1.0)
        torch.testing.assert_close(traced.target, estimated.target, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(traced.advantage, estimated.advantage, rtol=1e-12, atol=1e-12)


def test_three_steps_equal_a_calculation_by_hand() -> None:
    no = torch.tensor([[False], [False], [False]])
    ended = torch.tensor([[False], [True], [False]])
    rewards = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    observed = torch.tensor([[10.0], [20.0], [30.0], [40.0]], dtype=torch.float64)
    slot, step = torch.tensor([0]), torch.tensor([1])
    final = torch.tensor([50.0], dtype=torch.float64)
    for terminated, truncated, worth in ((ended, no, 0.0), (no, ended, 50.0)):
        following = next_values(observed, terminated, slot, step, final)
        carried = carries(terminated, truncated, ~no)
        result = gae(rewards, observed[:-1], following, carried, ~no, discount=0.5, gae_lambda=0.5)
        second = 2.0 + 0.5 * worth - 20.0
        expected = [[1.0 + 0.5 * 20.0 - 10.0 + 0.25 * second], [second], [3.0 + 0.5 * 40.0 - 30.0]]
        assert result.advantage.tolist() == expected


CLIP, CAP, COUNT = 0.2, 1.5, 400


def log_probs(seed: int, spread: float, base: Tensor | None = None) -> Tensor:
    """Log-probabilities [n] around `base`."""
    noise = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (torch.full((COUNT,), -1.0, dtype=torch.float64) if base is None else base) + spread * noise


def advantages() -> Tensor:
    return log_probs(9, 1.0) + 1.0


def slope(of: Callable[[Tensor], Tensor], where: Tensor) -> Tensor:
    leaf = where.clone().requires_grad_()
    return torch.autograd.grad(of(leaf), leaf)[0]


def gradient(current: Tensor, fixed: loss.Surrogate) -> Tensor:
    return slope(lambda leaf: loss.policy_loss(leaf, fixed.anchor, fixed.weighted_advantage, CLIP), current)


def brute_force(behaviour: Tensor, proximal: Tensor, current: Tensor, advantage: Tensor) -> Tensor:
    """−(π_prox/μ) ∂min(rA, clip(r)A)/∂log π_θ / n, step by step in probabilities."""
    result = []
    for mu, prox, now, a in zip(
        behaviour.tolist(), proximal.tolist(), current.tolist(), advantage.tolist(), strict=True
    ):
        weight = min(math.exp(prox) / math.exp(mu), CAP)
        ratio = math.exp(now) / math.exp(prox)
        outward = (a > 0 and ratio > 1 + CLIP) or (a < 0 and ratio < 1 - CLIP)
        result.append(0.0 if outward else -weight * ratio * a / COUNT)
    return torch.tensor(result, dtype=torch.float64)


def test_decoupled_gradient_at_a_fixed_lag_is_its_brute_force_formula() -> None:
    behaviour = log_probs(1, 0.0)
    proximal = log_probs(2, 0.4, behaviour)
    current = log_probs(3, 0.15, proximal)
    fixed = loss.decoupled(behaviour, proximal, advantages(), CAP)
    result = gradient(current, fixed)
    torch.testing.assert_close(
        result, brute_force(behaviour, proximal, current, advantages()), rtol=1e-9, atol=0
    )
    assert 0 < ((proximal - behaviour).exp() > CAP).sum() < COUNT
    other = gradient(current, loss.coupled(behaviour, advantages()))
    assert (result - other).abs().max() > 0.1 * result.abs().max()


def test_decoupled_is_coupled_when_the_proximal_policy_acted() -> None:
    behaviour = log_probs(1, 0.3)
    current = log_probs(3, 0.2, behaviour)
    first = loss.decoupled(behaviour, behaviour, advantages(), CAP)
    second = loss.coupled(behaviour, advantages())
    assert torch.equal(gradient(current, first), gradient(current, second))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 2.5, 3.5, 20.0])
def test_dual_clip_is_the_formula_of_its_paper(sign: float, ratio: float) -> None:
    anchor = torch.tensor([-1.0], dtype=torch.float64)
    advantage = torch.tensor([sign], dtype=torch.float64)
    current, step = anchor + math.log(ratio), 1e-6

    def of(log_prob: Tensor) -> Tensor:
        return loss.policy_loss(log_prob, anchor, advantage, CLIP, dual_clip=3.0)

    expected = min(ratio * sign, min(max(ratio, 1 - CLIP), 1 + CLIP) * sign)
    expected = max(expected, 3.0 * sign) if sign < 0 else expected
    assert of(current).item() == pytest.approx(-expected)
    found = (of(current + step) - of(current - step)) / (2 * step)
    torch.testing.assert_close(slope(of, current), found.reshape(1), rtol=1e-6, atol=1e-9)


def test_losses_have_the_values_of_their_formulas() -> None:
    current, weights = log_probs(1, 0.5), advantages()
    found = loss.policy_gradient(current, weights)
    torch.testing.assert_close(found, -(weights * current).mean(), rtol=1e-12, atol=0)
    value, target, old = torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([1.0])
    assert loss.value_loss(value, target, old, None).item() == pytest.approx(0.5)
    assert loss.value_loss(value, target, old, 0.5).item() == pytest.approx(0.5 * 2.5**2)


def test_standardised_advantages_have_mean_zero_and_deviation_one() -> None:
    result = loss.standardise(3.0 + 5.0 * advantages())
    assert result.mean().abs() < 1e-9
    assert result.std().item() == pytest.approx(1.0)
    assert loss.standardise(torch.tensor([7.0])).tolist() == [0.0]


def test_on_policy_diagnostics_have_their_known_values() -> None:
    same = log_probs(1, 0.5)
    assert loss.divergence(same, same).item() == 0.0
    assert loss.clip_fraction(same, same, CLIP).item() == 0.0
    assert loss.effective_sample_size(same, same).item() == pytest.approx(1.0)


def test_divergence_estimates_the_kl_of_a_known_pair() -> None:
    p, q = 0.6, 0.45
    heads = torch.from_numpy(np.random.default_rng(0).random(200_000) < p)
    before = torch.where(heads, math.log(p), math.log(1 - p))
    after = torch.where(heads, math.log(q), math.log(1 - q))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert loss.divergence(before, after).item() == pytest.approx(expected, rel=0.03)


def test_explained_variance_has_its_known_values() -> None:
    target = torch.tensor([1.0, 2.0, 3.0])
    assert loss.explained_variance(target, target).item() == 1.0
    assert loss.explained_variance(torch.zeros(3), target).item() == pytest.approx(0.0)
    assert loss.explained_variance(torch.zeros(3), torch.ones(3)).item() == 0.0


def test_rounding_does_not_stop_the_critics_learning() -> None:
    generator = torch.Generator().manual_seed(0)
    value, old = (torch.randn(4096, generator=generator) * 0.01 for _ in range(2))
    target = torch.randn(4096, generator=generator)
    clipped = slope(lambda leaf: loss.value_loss(leaf, target, old, 1.0), value)
    plain = slope(lambda leaf: loss.value_loss(leaf, target, old, None), value)
    assert bool((((old + (value - old)) - target).square() > (value - target).square()).any())
    torch.testing.assert_close(clipped, plain, rtol=1e-5, atol=1e-9)


def test_the_shares_of_ranks_add_up_to_the_minibatch() -> None:
    value, target, old = (log_probs(seed, 1.0) for seed in (1, 2, 3))
    parts = [slice(0, 3), slice(3, 3), slice(3, None)]
    whole = (loss.policy_loss(value, old, target, CLIP), loss.value_loss(value, target, old, CLIP))
    policy = [
        loss.policy_loss(value[part], old[part], target[part], CLIP, total=len(value)) for part in parts
    ]
    critic = [loss.value_loss(value[part], target[part], old[part], CLIP, len(value)) for part in parts]
    torch.testing.assert_close((sum(policy), sum(critic)), whole)


@pytest.mark.parametrize("progress", [-0.5, 0.0, 0.25, 0.7, 1.0, 1.7])
def test_schedules_have_their_closed_forms_and_are_clamped_outside_a_run(progress: float) -> None:
    within = min(max(progress, 0.0), 1.0)
    assert factor("constant", progress) == 1.0
    assert factor("linear", progress) == 1.0 - within
    assert factor("cosine", progress) == 0.5 * (1.0 + math.cos(math.pi * within))


def test_warmup_rises_in_equal_steps() -> None:
    assert [warmup(updates, 4) for updates in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup(0, 0) == 1.0


@pytest.mark.parametrize(
    ("initial", "decay", "floor", "expected"),
    [
        (0.1, 0.9, 0.02, [max(0.02, 0.1 * 0.9**updates) for updates in range(200)]),
        (0.1, 0.5, 0.0, [0.1 * 0.5**updates for updates in range(9)]),
        (0.01, 0.5, 0.05, [0.01] * 3),
        (0.0, 0.5, 0.05, [0.0] * 3),
        (-0.1, 0.5, 0.05, [-0.1, -0.05, -0.025]),
        (0.1, 1.0, 0.05, [0.1] * 8),
    ],
)
def test_a_decay_is_geometric_down_to_a_floor(
    initial: float, decay: float, floor: float, expected: list[float]
) -> None:
    assert [decayed(initial, decay, floor, updates) for updates in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (0.0, 1.5e-3), (0.0049, 1.5e-3), (0.005, 1e-3), (0.01, 1e-3), (0.02, 1e-3), (0.0201, 1e-3 / 1.5),
        (7.0, 1e-3 / 1.5),
    ],
)  # fmt: skip
def test_the_rate_changes_when_divergence_leaves_half_to_twice_the_target(
    divergence: float, expected: float
) -> None:
    assert steered(1e-3, divergence, 0.01, (1e-6, 1e-2)) == expected
    assert steered(1e-3, divergence, 0.01, (9.9e-4, 1.1e-3)) == min(max(expected, 9.9e-4), 1.1e-3)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)],
)
def test_a_penalty_follows_the_divergence(divergence: float, expected: float) -> None:
    assert adapted(0.05, divergence, 6.0, 100, 1000.0) == pytest.approx(0.05 * expected)
    assert adapted(0.05, 0.0, 6.0, 10_000, 1000.0) == 0.0


@pytest.mark.parametrize(
    ("share", "expected"), [(0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.74, 3), (0.99, 4), (1.0, 4)]
)
def test_an_update_of_a_flush_has_as_many_minibatches_as_it_fills(share: float, expected: int) -> None:
    batch = collect(small_policy(1))
    section = PPOSection(batch_steps=round(int(batch.valid.sum()) / share), minibatches=4, epochs=3)
    for is_flushed, count in ((True, expected), (False, 4)):
        algorithm = PPO(small_policy(0), section, seed=0)
        update = algorithm.update(replace(batch, is_flushed=is_flushed), progress=0.0)
        assert update.gradient_steps == 3 * count


CASES: dict[str, tuple[Space, dict[str, Any]]] = {
    "discrete": (Discrete(3), {}),
    "gaussian": (box(2), {"activation": "relu"}),
    "squashed": (box(2), {"continuous": "squashed"}),
    "shared": (Discrete(3), {"shared_trunk": True}),
    "no-hidden": (Discrete(3), {"hidden_sizes": ()}),
    "choices-and-reals": (Dict((("a", Discrete(3)), ("b", MultiDiscrete((2, 3))), ("c", box(2)))), {}),
    "shared-no-hidden": (Discrete(3), {"hidden_sizes": (), "shared_trunk": True}),
}


def double(name: str) -> Policy:
    action, section = CASES[name]
    return small_policy(2, action, **section).double()


def loss_of(policy: Policy, outputs: Outputs) -> Tensor:
    """Any smooth function of both outputs and the entropy."""
    wave = (outputs.parameters.sin().sum(1) * outputs.value.cos()).mean()
    return wave + 0.3 * policy.joint_entropy(outputs.parameters).mean()


def gradient_of(policy: Policy, network: Network, rows: Tensor) -> Tensor:
    return network.gradient(loss_of(policy, network.outputs(Inputs(rows))))


@pytest.mark.parametrize("name", CASES)
def test_closed_form_gradients_equal_autograd(name: str) -> None:
    policy = double(name)
    adam = FlatAdam(policy, 1e-5)
    by_hand, by_autograd = DenseNetwork(policy, adam), Network(policy, adam)
    for count in (64, 17, 100):
        rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        expected = gradient_of(policy, by_autograd, rows).clone()
        found = gradient_of(policy, by_hand, rows)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


CLIPPED = Objective(learning_rate=0.1, value_coefficient=0.5, entropy_coefficient=0.1, clip_range=0.2)
OBJECTIVES = {
    "plain": replace(CLIPPED, entropy_coefficient=0.0, clip_range=None),
    "clipped": replace(CLIPPED, value_clip=0.3),
    "dual": replace(CLIPPED, dual_clip=1.5),
}


def rows_of(policy: Policy, count: int, *, is_masked: bool) -> Rows:
    """Rows of a minibatch, a share of a larger one; where masked, some choices are forbidden."""
    random = torch.Generator().manual_seed(count)
    vector = torch.randn(count, 4, generator=random, dtype=torch.float64)
    forbidden = torch.zeros((count, policy.actor_head.out_features), dtype=torch.bool)
    forbidden[::3, 0] = not policy.action_heads[0].state_dict()  # a mask is of choices, which come first
    inputs = Inputs(vector, forbidden=forbidden if is_masked else None)
    with torch.no_grad():
        parameters, free = policy.outputs(inputs).parameters, policy.outputs(Inputs(vector)).parameters
    # Some of the actions are forbidden, so that their slopes are at outputs that the mask rules out.
    chosen = policy.choose(free.numpy(), np.random.default_rng(1), deterministic=False).action
    drawn = {path: torch.from_numpy(np.asarray(action)) for path, action in chosen.items()}
    columns = torch.randn(6, count, generator=random, dtype=torch.float64)
    columns[0] = policy.joint_log_prob(parameters, drawn).detach() + 0.3 * columns[0]
    return Rows(columns, inputs, drawn, 2 * count)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if name != "squashed"])
def test_the_closed_form_equals_the_gradient_of_autograd(
    name: str, is_masked: bool, objective: Objective
) -> None:
    policy = double(name)
    ppo = PPO(policy, PPOSection(), seed=0)
    rows = rows_of(policy, 40, is_masked=is_masked)
    by_hand = ppo._network
    assert isinstance(by_hand, DenseNetwork)
    assert by_hand.is_closed
    found = [part.clone() for part in by_hand.gradient_of(rows, objective)]
    again = by_hand.log_prob(policy.outputs(rows.inputs).parameters.detach(), rows.action)
    ppo._optimiser.flat_gradient.fill_(7.0)
    ppo._network = Network(policy, ppo._optimiser)
    expected = ppo.gradient_of(rows, objective)
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(again, found[0], rtol=1e-12, atol=1e-14)


def test_rounding_in_the_network_does_not_stop_the_critics_learning() -> None:
    generator = torch.Generator().manual_seed(0)
    value, old = (torch.randn(4096, generator=generator).numpy() * 0.01 for _ in range(2))
    target = torch.randn(4096, generator=generator).numpy()
    clipped, plain = (_value_slope(value, target, old, clip, 4096)[1] for clip in (1.0, None))
    np.testing.assert_array_equal(clipped, plain)


def test_only_dense_networks_with_suitable_heads_have_closed_forms() -> None:
    dense, curved = small_policy(), small_policy(activation="silu")
    seeing = build(image(8, 8, 3), Discrete(2), PolicySection(), 0)
    assert isinstance(network_of(dense, FlatAdam(dense, 1e-5)), DenseNetwork)
    for policy in (curved, seeing):
        assert not isinstance(network_of(policy, FlatAdam(policy, 1e-5)), DenseNetwork)
    assert has_slopes(dense)
    assert not has_slopes(double("squashed"))
    assert not has_slopes(small_policy(0, Discrete(3), discrete="epsilon_greedy"))


@pytest.mark.parametrize("small", [0, 2**20], ids=["tensors", "arrays"])
def test_steps_are_those_of_torchs_adam_with_clipped_gradients(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithms_gradient, "_SMALL", small)
    flat, plain = double("gaussian"), double("gaussian")
    adam = FlatAdam(flat, 1e-5)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2, eps=1e-5)
    network = network_of(flat, adam)
    for step in range(50):
        rows = (1 + step % 3) * torch.randn(32, 4, dtype=torch.float64)
        norm = adam.step(gradient_of(flat, network, rows), 1e-2, 0.3)
        reference.zero_grad()
        loss_of(plain, plain.outputs(Inputs(rows))).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        reference.step()
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        scaled = torch.cat([own.grad.flatten() for own in plain.parameters() if own.grad is not None])
        torch.testing.assert_close(adam.flat_gradient, scaled, rtol=1e-9, atol=1e-12)
    for one, other in zip(flat.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
