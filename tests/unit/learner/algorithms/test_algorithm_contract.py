"""What the loop relies on, of every algorithm.

Its metrics, what a bad batch leaves, what a checkpoint brings back.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from penstock.config.settings import (
    CloneSection,
    DQNSection,
    ImpalaSection,
    PPOSection,
    ReinforceSection,
    SACSection,
)
from penstock.learner.algorithms import clone, ppo, token_ppo
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.algorithms.off_policy import dqn, sac
from penstock.learner.algorithms.registry import ALGORITHMS
from penstock.learner.batch import Batch
from penstock.policy import weights
from tests.support.experience import token_learner
from tests.support.experience.experience import collect, same, small_policy
from tests.support.experience.replay_worlds import corridor, one_shot, q_policy, soft_policy
from tests.support.experience.token_experience import SmallTokenPolicy

REPLAY: dict[str, Any] = {
    "learning_starts": 64, "error_steps": 64, "publish_period": 20, "replay_ratio": 0.25,
}  # fmt: skip
DQN: dict[str, Any] = REPLAY | {"discount": 0.9, "capacity": 300, "batch_size": 32, "target_period": 20}
SAC: dict[str, Any] = REPLAY | {"capacity": 1000, "batch_size": 64, "critic_hidden_sizes": (32,)}


def infinite_rewards(batch: Batch) -> Batch:
    """No network can fit any of them."""
    return replace(batch, reward=torch.full_like(batch.reward, math.inf))


def infinite_ends(batch: Batch) -> Batch:
    """The last token of a response has the reward of the whole response."""
    reward = batch.reward.clone()
    reward[batch.terminated | batch.truncated] = math.inf
    return replace(batch, reward=reward)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One algorithm with one set of options.

    make: with a seed, of weights and of generators where the algorithm has both.   batch: by number, from 1.
    metrics: the names that an update reports.   stored_after: batches that a checkpoint has behind it.
    poison: a batch whose update is not finite; None where nothing of a batch can make it so.
    """

    name: str
    make: Callable[[int], Algorithm]
    batch: Callable[[int], Batch]
    metrics: frozenset[str]
    stored_after: int = 2
    poison: Callable[[Batch], Batch] | None = infinite_rewards


def of_another_policy(number: int) -> Batch:
    """Experience of another policy than the one that learns."""
    return collect(small_policy(6 + number))


def on_policy_case(
    name: str, options: str = "", policy: dict[str, Any] | None = None, **section: Any
) -> Case:
    """PPO, IMPALA or REINFORCE, from experience of another policy than the one that learns."""
    sections = {"ppo": PPOSection, "impala": ImpalaSection, "reinforce": ReinforceSection}

    def make(seed: int) -> Algorithm:
        return ALGORITHMS[name](small_policy(0, **(policy or {})), sections[name](**section), seed=seed)

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
        poison=infinite_rewards,
    )


def sac_case() -> Case:
    """SAC where every step is an episode."""
    settings = SACSection(**SAC)
    return Case(
        name="sac",
        make=lambda seed: sac.SAC(soft_policy(settings, normalise_observations=True), settings, seed=seed),
        batch=lambda number: one_shot(soft_policy(settings, seed=5), number, 0.4),
        metrics=frozenset({*sac.METRICS, "learning_rate", "replay_steps"}),
        poison=infinite_rewards,
    )


def clone_case(options: str = "", **policy: Any) -> Case:
    """Cloning of the policy that acted; a reward means nothing to it."""
    return Case(
        name=f"clone{options}",
        make=lambda seed: clone.Clone(small_policy(seed, **policy), CloneSection(), seed=seed),
        batch=of_another_policy,
        metrics=frozenset(name for name in clone.METRICS if not name.startswith("validation_")),
        poison=None,
    )


def token_case(advantage: str, **section: Any) -> Case:
    """PPO of tokens, with the critic that its advantages ask for."""
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
    on_policy_case("ppo", ", scaled rewards", scale_rewards=True),
    on_policy_case("ppo", ", lock-step", staleness=0),
    on_policy_case("ppo", ", silu", {"activation": "silu"}, scale_rewards=True),
    on_policy_case("impala", "", {"normalise_observations": True}, scale_rewards=True),
    on_policy_case("reinforce", "", {"normalise_observations": True}, scale_rewards=True),
    dqn_case("", {"normalise_observations": True}),
    dqn_case(", prioritised", {"normalise_observations": True}, prioritised=True),
    dqn_case(", n-step dueling", {"dueling": True}, prioritised=True, n_step=2),
    sac_case(),
    clone_case(),
    clone_case(", normalised", normalise_observations=True),
    token_case("gae", minibatches=3),
    token_case("group"),
    token_case("reinforce"),
)
each = partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def begun(case: Case, seed: int, batches: int = 2) -> Algorithm:
    """An algorithm that has learned from the first batches."""
    algorithm = case.make(seed)
    for number in range(1, batches + 1):
        assert algorithm.update(case.batch(number), progress=0.0).applied
    return algorithm


def test_every_algorithm_has_a_case() -> None:
    named = {case.name.partition(",")[0] for case in CASES}
    assert named == {*ALGORITHMS, "token_ppo"} - {"random"}


@each(CASES)
def test_an_update_reports_every_metric(case: Case) -> None:
    algorithm = begun(case, 0)
    update = algorithm.update(case.batch(3), progress=0.0)
    assert (update.applied, update.reason) == (True, "")
    assert update.metrics.keys() == case.metrics
    assert all(math.isfinite(value) for value in update.metrics.values())
    assert algorithm.updates == 3


@each(CASES)
def test_staleness_is_the_setting_and_is_0_in_lock_step_alone(case: Case) -> None:
    algorithm = case.make(0)
    section = algorithm.section  # type: ignore[attr-defined]
    assert algorithm.staleness == getattr(section, "staleness", algorithm.staleness)
    assert algorithm.lock_step == (algorithm.staleness == 0)


@each([case for case in CASES if case.poison is not None])
def test_an_update_that_is_not_finite_leaves_no_trace(case: Case) -> None:
    assert case.poison is not None
    algorithm = begun(case, 0)
    before = algorithm.state()
    update = algorithm.update(case.poison(case.batch(3)), progress=0.0)
    assert (update.applied, update.reason, update.metrics) == (False, "nan", {})
    after = algorithm.state()
    assert same(before, after)
    assert algorithm.update(case.batch(4), progress=0.0).applied


@each(CASES)
def test_a_restored_state_goes_on_bit_by_bit(case: Case) -> None:
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


COUNTS = ("generator/", "replay/", "rewards/slots", "rewards/returns")
"""Tensors that go on when a checkpoint is restored while a run goes on."""


@pytest.mark.promise("restore-takes-model-optimiser")
@each(CASES)
def test_a_restore_takes_what_was_learned_and_nothing_that_counts(case: Case) -> None:
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
    """The weights that actors would be sent, by policy name."""
    return {name: weights.encode(module) for name, module in algorithm.published_modules().items()}
