import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.config.settings import (
    CloneSection,
    DQNSection,
    ImpalaSection,
    PolicySection,
    PPOSection,
    RandomSection,
    ReinforceSection,
    SACSection,
)
from penstock.learner.algorithms import clone, ppo, token_ppo
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState
from penstock.learner.algorithms.clone import METRICS, Clone
from penstock.learner.algorithms.gradient import Hardware
from penstock.learner.algorithms.off_policy import dqn, sac
from penstock.learner.algorithms.registry import ALGORITHMS, RandomActions, make
from penstock.learner.algorithms.rows import see
from penstock.learner.batch import Batch
from penstock.policy import weights
from penstock.policy.networks import BatchNorm
from penstock.policy.policy import Policy, build
from penstock.policy.weights import encode
from penstock.protocol.spaces import Box, Discrete
from tests.support.experience import token_experience as token_learner
from tests.support.experience.experience import box, collect, same, small_policy
from tests.support.experience.remembering import Actor, batch_of, remembering
from tests.support.experience.replay_worlds import corridor, one_shot, q_policy, soft_policy
from tests.support.experience.token_experience import SmallTokenPolicy

REPLAY: dict[str, Any] = {
    "learning_starts": 64, "error_steps": 64, "publish_period": 20, "replay_ratio": 0.25,
}  # fmt: skip
DQN: dict[str, Any] = REPLAY | {"discount": 0.9, "capacity": 300, "batch_size": 32, "target_period": 20}
SAC: dict[str, Any] = REPLAY | {"capacity": 1000, "batch_size": 64, "critic_hidden_sizes": (32,)}


def infinite_rewards(batch: Batch) -> Batch:
    return replace(batch, reward=torch.full_like(batch.reward, math.inf))


def unknown_observations(batch: Batch) -> Batch:
    return replace(batch, observation={"observation": batch.observation["observation"] * math.nan})


def infinite_ends(batch: Batch) -> Batch:
    reward = batch.reward.clone()
    reward[batch.terminated | batch.truncated] = math.inf
    return replace(batch, reward=reward)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One algorithm with one set of options.

    make: with a seed, of weights and of generators where the algorithm has both.   batch: by number, from 1.
    metrics: the names that an update reports.   stored_after: batches that a checkpoint has behind it.
    poison: makes a batch whose update is not finite.
    """

    name: str
    make: Callable[[int], Algorithm]
    batch: Callable[[int], Batch]
    metrics: frozenset[str]
    stored_after: int = 2
    poison: Callable[[Batch], Batch] = infinite_rewards


def of_another_policy(number: int) -> Batch:
    return collect(small_policy(6 + number))


def on_policy_case(
    name: str, options: str = "", policy: dict[str, Any] | None = None, **section: Any
) -> Case:
    sections = {"ppo": PPOSection, "impala": ImpalaSection, "reinforce": ReinforceSection}

    def make(seed: int) -> Algorithm:
        # What is dropped out is drawn from the seed of the settings, which a resumed run keeps.
        kept = 0 if policy and "dropout" in policy else seed
        return ALGORITHMS[name](small_policy(0, **(policy or {})), sections[name](**section), seed=kept)

    return Case(
        name=f"{name}{options}",
        make=make,
        batch=of_another_policy,
        metrics=frozenset(ppo.METRICS if name == "ppo" else ppo.SHARED_METRICS),
    )


def dqn_case(options: str = "", policy: dict[str, Any] | None = None, **section: Any) -> Case:
    """DQN in the corridor; replay has let its oldest go after ten batches."""
    settings = DQNSection(**(DQN | section))
    return Case(
        name=f"dqn{options}",
        make=lambda seed: dqn.DQN(q_policy(settings, **(policy or {})), settings, seed=seed),
        batch=corridor,
        metrics=frozenset({*dqn.METRICS, "learning_rate", "replay_steps", "epsilon", "epsilon_spread"}),
        stored_after=12,
    )


def sac_case() -> Case:
    settings = SACSection(**SAC)
    return Case(
        name="sac",
        make=lambda seed: sac.SAC(soft_policy(settings, normalise_observations=True), settings, seed=seed),
        batch=lambda number: one_shot(soft_policy(settings, seed=5), number, 0.4),
        metrics=frozenset({*sac.METRICS, "learning_rate", "replay_steps"}),
    )


def clone_case() -> Case:
    return Case(
        name="clone",
        make=lambda seed: Clone(small_policy(seed, normalise_observations=True), CloneSection(), seed=seed),
        batch=of_another_policy,
        metrics=frozenset(name for name in clone.METRICS if not name.startswith("validation_")),
        poison=unknown_observations,
    )


def token_case(advantage: str, **section: Any) -> Case:
    given = {"advantage": advantage, "kl_target": 1.0, "kl_horizon": 20.0, "epochs": 2} | section
    critic = token_ppo.CRITIC_METRICS if advantage == "gae" else ()

    def make(seed: int) -> Algorithm:
        made = token_learner.make(SmallTokenPolicy(seed), **given)
        # The reference is read from the folder of the model; this policy has none.
        made.policy._reference.load_state_dict(SmallTokenPolicy()._reference.state_dict())  # type: ignore[attr-defined]
        return made

    return Case(
        name=f"token_ppo, {advantage}",
        make=make,
        batch=token_learner.stale,
        # Its batch is of older weights, of which no difference of the engine is told.
        metrics=frozenset({*token_ppo.METRICS, *critic} - {"engine_difference"}),
        poison=infinite_ends,
    )


CASES = (
    on_policy_case("ppo"),
    on_policy_case("ppo", ", normalised", {"normalise_observations": True}, scale_rewards=True),
    on_policy_case("ppo", ", lock-step", staleness=0),
    on_policy_case("ppo", ", thinned", {"activation": "silu", "hidden_norm": "batch", "dropout": 0.3}),
    on_policy_case("impala", "", {"normalise_observations": True}, scale_rewards=True),
    on_policy_case("reinforce", "", {"normalise_observations": True}, scale_rewards=True),
    dqn_case("", {"normalise_observations": True}),
    dqn_case(", prioritised", {"normalise_observations": True}, prioritised=True),
    dqn_case(", n-step dueling", {"dueling": True}, prioritised=True, n_step=2),
    sac_case(),
    clone_case(),
    token_case("gae", minibatches=3),
    token_case("group"),
    token_case("reinforce"),
)
each = partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def begun(case: Case, seed: int, batches: int = 2) -> Algorithm:
    algorithm = case.make(seed)
    for number in range(1, batches + 1):
        assert algorithm.update(case.batch(number), progress=0.0).applied
    return algorithm


def test_every_algorithm_has_a_case() -> None:
    named = {case.name.partition(",")[0] for case in CASES}
    assert named == {*ALGORITHMS, "token_ppo"} - {"random"}


@each(CASES)
def test_what_is_empty_or_not_finite_leaves_no_trace_and_an_update_reports_every_metric(case: Case) -> None:
    algorithm, batch = begun(case, 0), case.batch(3)
    before = algorithm.state()
    empty = replace(batch, valid=torch.zeros_like(batch.valid))
    for spoiled, reason in ((empty, "empty"), (case.poison(batch), "nan")):
        update = algorithm.update(spoiled, progress=0.0)
        assert (update.applied, update.reason, update.metrics) == (False, reason, {})
        assert same(before, algorithm.state())
    update = algorithm.update(batch, progress=0.0)
    assert (update.applied, update.reason, algorithm.updates) == (True, "", 3)
    assert update.metrics.keys() == case.metrics
    assert all(math.isfinite(value) for value in update.metrics.values())


@each(CASES)
def test_a_restored_state_continues_bit_by_bit(case: Case) -> None:
    first, second = begun(case, 1, case.stored_after), case.make(2)
    state = first.state()
    second.load(state)
    assert second.retain_from() == first.retain_from()
    if first.retain_from() is not None:
        for number in range(1, case.stored_after + 1):
            second.reload(case.batch(number))
        assert second.end_reload() == 0
    assert same(second.state(), state)
    for algorithm in (first, second):
        for number in range(case.stored_after + 1, case.stored_after + 3):
            algorithm.update(case.batch(number), progress=0.1)
    assert same(first.state(), second.state())
    assert published(first) == published(second)


@each(CASES)
def test_a_state_with_a_part_missing_is_refused_by_name(case: Case) -> None:
    algorithm = case.make(0)
    state = algorithm.state()
    for name in state.tensors:
        tensors = {key: tensor for key, tensor in state.tensors.items() if key != name}
        with pytest.raises(ValueError, match=re.escape(name.rpartition("/")[2])):
            algorithm.load(replace(state, tensors=tensors))
    for name in state.numbers:
        numbers = {key: number for key, number in state.numbers.items() if key != name}
        with pytest.raises(ValueError, match=name):
            algorithm.load(replace(state, numbers=numbers))


COUNTS = ("generator/", "replay/", "rewards/slots", "rewards/returns")
"""Tensors that go on when a checkpoint is restored while a run goes on."""


@pytest.mark.promise("restore-takes-model-optimiser")
@each(CASES)
def test_a_restore_takes_weights_and_keeps_counters(case: Case) -> None:
    algorithm = begun(case, 1, case.stored_after)
    named, weights_then = algorithm.state(), published(algorithm)
    for number in range(case.stored_after + 1, case.stored_after + 3):
        algorithm.update(case.batch(number), progress=0.1)
    before, retained = algorithm.state(), algorithm.retain_from()
    assert published(algorithm) != weights_then
    algorithm.restore(named)
    after = algorithm.state()
    assert published(algorithm) == weights_then
    for name, tensor in after.tensors.items():
        source = before if name.startswith(COUNTS) else named
        assert torch.equal(tensor, source.tensors[name]), name
    steps = {"gradient_steps": named.numbers["gradient_steps"]}
    assert after.numbers == before.numbers | steps
    assert algorithm.retain_from() == retained
    assert algorithm.update(case.batch(case.stored_after + 3), progress=0.1).applied
    assert algorithm.updates == case.stored_after + 3


@pytest.mark.promise("fit-refused-name-run")
@each(CASES)
def test_a_restore_that_does_not_fit_changes_nothing(case: Case) -> None:
    algorithm = begun(case, 1)
    named = algorithm.state()
    algorithm.update(case.batch(3), progress=0.1)
    before = algorithm.state()
    last = [name for name in named.tensors if not name.startswith(COUNTS)][-1]
    other = named.tensors | {last: torch.zeros(7, 7)}
    missing = {name: tensor for name, tensor in named.tensors.items() if name != last}
    for tensors in (other, missing):
        with pytest.raises(ValueError, match=re.escape(last)):
            algorithm.restore(replace(named, tensors=tensors))
    with pytest.raises(ValueError, match="gradient_steps"):
        algorithm.restore(replace(named, numbers={}))
    assert same(algorithm.state(), before)


def published(algorithm: Algorithm) -> dict[str, bytes]:
    return {name: weights.encode(module) for name, module in algorithm.published_modules().items()}


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
    critic = {name: tensor.clone() for name, tensor in policy.state_dict().items() if "critic" in name}
    for _ in range(10):
        update = clone.update(batch, progress=0.0)
        assert (update.applied, update.steps, update.gradient_steps) == (True, count, 4)
        assert ("accuracy" in update.metrics) == (action is None), "of choices alone"
    actor = [p for layer in [*(policy.actor_body.chain or ()), policy.actor_head] for p in layer.parameters()]
    spread = [p for name, p in policy.named_parameters() if "log_std" in name]
    for found, wanted in zip([*actor, *spread], expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-9, atol=1e-12)
    assert critic
    assert all(torch.equal(policy.state_dict()[name], tensor) for name, tensor in critic.items())


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


def test_nll_and_accuracy_equal_values_worked_out_by_hand() -> None:
    clone, batch = indifferent(learning_rate=0.0)
    clone.validate_on(replace(batch, valid=batch.valid & (batch.action["action"] == 1)))
    metrics = clone.update(batch, progress=0.0).metrics
    assert metrics["nll"] == pytest.approx(math.log(2))
    assert metrics["accuracy"] == 0.75
    assert metrics["validation_nll"] == pytest.approx(math.log(2))
    assert metrics["validation_accuracy"] == 0.0
    assert set(metrics) == set(METRICS)


def test_the_critic_is_fitted_to_discounted_returns_on_request() -> None:
    policy = small_policy(0)
    batch = collect(policy, steps=3)
    ends = torch.zeros_like(batch.valid)
    ends[2] = True
    rewards = torch.tensor([1.0, 2.0, 4.0])[:, None].expand_as(batch.reward)
    none = torch.empty(0, dtype=torch.int64)
    batch = replace(batch, reward=rewards, terminated=ends, truncated=~batch.valid)
    batch = replace(batch, final_slot=none, final_step=none)
    clone = Clone(policy, CloneSection(value_coefficient=0.5, discount=0.5), seed=0)
    with torch.no_grad():
        steps = clone._steps(batch, see(policy, batch))
    assert steps.target.view_as(rewards)[:, 0].tolist() == pytest.approx([3.0, 4.0, 4.0], rel=1e-6)
    before = clone.update(batch, progress=0.0).metrics["value_loss"]
    for _ in range(200):
        after = clone.update(batch, progress=0.0).metrics["value_loss"]
    assert after < 0.1 * before


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
    for each in (one, other, whole):
        assert each.update(batch, progress=0.0).applied
    weights = [encode(each.policy) for each in (one, other, whole)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("section", [{"recurrent": "lstm"}, {"frame_stack": 2}], ids=["lstm", "frames"])
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


def random_actions() -> RandomActions:
    policy = build(box(4), Discrete(3), PolicySection(hidden_sizes=(8,)), 0)
    made = make(policy, RandomSection(batch_steps=64), seed=0, hardware=Hardware())
    assert isinstance(made, RandomActions)
    return made


def test_all_actions_are_equally_likely_for_any_observation() -> None:
    policy = random_actions().policy
    seen = {"observation": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}
    with torch.no_grad():
        acted = policy.act(seen)
    np.testing.assert_allclose(np.exp(acted.log_prob), 1 / 3, rtol=1e-6)
    assert len(set(acted.action["action"].tolist())) == 3


def test_random_actions_count_their_batches_and_learn_nothing() -> None:
    made, batch = random_actions(), collect(small_policy(6))
    before = made.state().tensors
    told = made.update(batch, progress=0.5)
    assert (told.applied, told.steps, told.gradient_steps) == (True, int(batch.valid.sum()), 0)
    nothing = made.update(replace(batch, valid=torch.zeros_like(batch.valid)), progress=0.5)
    assert (nothing.applied, nothing.reason, made.updates) == (False, "empty", 1)
    made.restore(made.state())
    assert all(torch.equal(one, made.state().tensors[name]) for name, one in before.items())
    resumed = random_actions()
    resumed.load(AlgorithmState(tensors=before, numbers={"updates": 7}))
    assert resumed.updates == 7
    with pytest.raises(ValueError, match="updates missing"):
        resumed.load(AlgorithmState(tensors=before, numbers={}))
