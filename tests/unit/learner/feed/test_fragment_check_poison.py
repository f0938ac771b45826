"""Every way to poison a fragment, each alone among honest ones, against one update of each algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import (
    CloneSection,
    DQNSection,
    ImpalaSection,
    PolicySection,
    PPOSection,
    ReinforceSection,
    SACSection,
)
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.algorithms.clone import Clone
from penstock.learner.algorithms.off_policy.dqn import DQN
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.learner.algorithms.ppo import PPO, Impala, Reinforce
from penstock.learner.batch import Batch, assemble, check_meaning
from penstock.policy import policy as building
from penstock.policy.policy import Policy
from penstock.protocol.fragment import build, check_content
from penstock.protocol.schema import Ranges
from tests.support.abuse.poison import (
    OF_BOXES,
    OF_CHOICES,
    OF_DENSITIES,
    OF_DRAWS,
    OF_EVERY_RUN,
    OF_MASKS,
    OF_RATIOS,
    OF_STATE,
    Way,
)
from tests.support.experience.experience import Collector, Fragment, Line, box, small_policy
from tests.support.experience.remembering import Actor, remembering
from tests.support.experience.replay_worlds import q_policy

COUNT, SPOILED, STEPS = 6, 3, 8
BOUNDS = {"reward": 1e6, "log_prob": 1e4}
REPLAY: dict[str, Any] = {
    "capacity": 512, "learning_starts": 16, "batch_size": 16, "replay_ratio": 0.125, "error_steps": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An algorithm, the policy that it trains, and the ways that its fragments can be poisoned in."""

    name: str
    policy: Callable[[], Policy]
    make: Callable[[Policy], Algorithm]
    ways: Sequence[Way]


def gaussian() -> Policy:
    """One number."""
    return small_policy(action=box(1))


def q_values() -> Policy:
    """Of two actions."""
    return q_policy(DQNSection(**REPLAY))


def squashed() -> Policy:
    """One number between bounds."""
    section = SACSection(**REPLAY).policy_section(PolicySection(hidden_sizes=(16,)))
    return building.build(box(4), box(1), section, 0)


def memory() -> Policy:
    """An LSTM under masks."""
    return remembering(recurrent="lstm")


CHOICES = (*OF_EVERY_RUN, *OF_BOXES, *OF_CHOICES)
OF_RATIO_CHOICES = (*CHOICES, *OF_RATIOS)
DRAWS = (*OF_EVERY_RUN, *OF_BOXES, *OF_DRAWS)
MEMORY = (*OF_EVERY_RUN, *OF_BOXES, *OF_MASKS, *OF_STATE)


def ppo(policy: Policy) -> Algorithm:
    """One gradient step for each attempt at an update."""
    return PPO(policy, PPOSection(epochs=1, minibatches=1), seed=0)


def clone(policy: Policy) -> Algorithm:
    """As of PPO."""
    return Clone(policy, CloneSection(minibatches=1), seed=0)


CASES = (
    Case("ppo", small_policy, ppo, OF_RATIO_CHOICES),
    Case("impala", small_policy, lambda p: Impala(p, ImpalaSection(), seed=0), OF_RATIO_CHOICES),
    Case(
        "reinforce", small_policy, lambda p: Reinforce(p, ReinforceSection(), seed=0), (*CHOICES, *OF_RATIOS)
    ),
    Case("clone", small_policy, clone, CHOICES),
    Case("dqn", q_values, lambda p: DQN(p, DQNSection(**REPLAY), seed=0), CHOICES),
    Case("ppo, a box", gaussian, ppo, (*DRAWS, *OF_RATIOS, *OF_DENSITIES)),
    Case("sac", squashed, lambda p: SAC(p, SACSection(**REPLAY), seed=0), DRAWS),
    Case("ppo, masks and memory", memory, ppo, (*MEMORY, *OF_RATIOS)),
    Case("clone, masks and memory", memory, clone, MEMORY),
)


@cache
def honest(case: Case) -> list[Fragment]:
    """Fragments of two or three slots, of sessions of their own."""
    policy = case.policy()
    if policy.state_space.spaces:
        actors = [Actor(policy, masked=True, session=number, seed=number) for number in range(1, COUNT + 1)]
        made = [actor.fragment(STEPS) for actor in actors]
        return [(fragment.header, dict(fragment.arrays())) for fragment in made]
    return [
        Collector([Line(5, "truncated"), Line(3, "terminated")], session).fragment(policy, STEPS)
        for session in range(1, COUNT + 1)
    ]


def outcome(case: Case, way: Way) -> str:
    """What becomes of a fragment that is spoiled in that way; the honest ones are trained."""
    parts = list(honest(case))
    header, arrays = parts[SPOILED - 1]
    spoiled = {name: array.copy() for name, array in arrays.items()}
    way.spoil(spoiled)
    fragment = build(header, spoiled)
    policy = case.policy()
    ranges = Ranges.of_run(policy.observation_space, policy.action_space, policy.state_space)
    for other, tensors in parts:
        check_meaning(other, tensors, ranges)
    try:
        check_content(fragment.header, fragment.payload, BOUNDS)
    except ValueError:
        return "broker"
    try:
        checked = check_meaning(header, spoiled, ranges)
    except ValueError:
        return "check"
    parts[SPOILED - 1] = (header, dict(checked))
    culprits = trained(case.make(policy), parts)
    assert all(torch.isfinite(parameter).all() for parameter in policy.parameters())
    if culprits:
        assert culprits == {SPOILED}
        return "update"
    same = all(np.array_equal(checked[name], spoiled[name]) for name in spoiled)
    return "bounded" if same else "replaced"


def trained(algorithm: Algorithm, parts: list[Fragment]) -> set[int]:
    """Learn from all, and again from the honest ones; returns the fragments that were left out."""
    alone = algorithm.makes_batch(1, 1)
    places = [[number] for number in range(1, COUNT + 1)] if alone else [list(range(1, COUNT + 1))]
    left_out: set[int] = set()
    for numbers in places:
        update = algorithm.update(batch_of(parts, numbers), progress=0.0)
        assert np.isfinite(list(update.metrics.values())).all()
        left_out |= set(update.culprits) if update.applied else set(numbers)
    numbers = [number for number in range(1, COUNT + 1) if number != SPOILED]
    for numbered in [[number] for number in numbers] if alone else [numbers]:
        assert algorithm.update(batch_of(parts, numbered, COUNT), progress=0.0).applied
    return left_out


def batch_of(parts: list[Fragment], numbers: list[int], behind: int = 0) -> Batch:
    """Some of the fragments, as log entries of these numbers and so many more."""
    places = [(number + behind, 100) for number in numbers]
    return assemble([parts[number - 1] for number in numbers], torch.device("cpu"), places)


@pytest.mark.promise("54-ways-poison-fragment")
@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}: {way.name}") for case in CASES for way in case.ways],
)
def test_poison_ends_where_it_is_known(case: Case, way: Way) -> None:
    assert outcome(case, way) == way.outcome


def test_there_are_many_ways() -> None:
    ways = {way.name for case in CASES for way in case.ways}
    assert len(ways) >= 50
