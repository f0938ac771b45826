"""The learner's update beside a bare loop: what is compared does the same work."""

import torch

from benchmarks import update
from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import assemble, check_meaning
from penstock.policy.policy import build
from penstock.protocol.fragment import check


def test_made_up_fragments_are_ones_that_a_learner_takes() -> None:
    first, second = update.made_up(1), update.made_up(2)
    check(first, update.SCHEMA, update._RUN)
    check_meaning(first.header, first.arrays())
    assert first.payload != second.payload


def test_both_train_as_many_parameters() -> None:
    loop = update.Loop(update.made_up_rows(64), PPOSection())
    policy = build(update.OBSERVATION, update.ACTION, PolicySection(), 0)
    shapes = sorted(tuple(own.shape) for own in policy.parameters())
    assert sorted(tuple(own.shape) for own in loop.parameters) == shapes


def test_the_bare_loop_learns() -> None:
    rows = update.made_up_rows(256)
    loop = update.Loop(rows, PPOSection(learning_rate=3e-3))
    before = _losses(loop, rows)
    for _ in range(20):
        loop.update()
    after = _losses(loop, rows)
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_update_of_a_made_up_batch_is_applied() -> None:
    algorithm = PPO(build(update.OBSERVATION, update.ACTION, PolicySection(), 0), PPOSection(), seed=0)
    loaded = update.opened([update.made_up(1)])
    outcome = algorithm.update(assemble(loaded, torch.device("cpu")), progress=0.0)
    assert (outcome.applied, outcome.gradient_steps) == (True, 16)


def _losses(loop: update.Loop, rows: update.Rows) -> tuple[float, float]:
    """Mean of advantage times log-probability, and the squared error of the values."""
    observation, action, (_, advantage, target) = rows
    with torch.no_grad():
        log_prob = loop.actor(observation).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        error = (loop.critic(observation).squeeze(1) - target).square().mean()
    return float((advantage * log_prob).mean()), float(error)
