"""Random actions: uniform from the start, nothing learned, all of it stored."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.config.settings import PolicySection, RandomSection
from penstock.learner.algorithms.algorithm import AlgorithmState
from penstock.learner.algorithms.gradient import Hardware
from penstock.learner.algorithms.registry import RandomActions, make
from penstock.policy.policy import build
from penstock.protocol.spaces import Discrete
from tests.support.experience.experience import box, collect, small_policy


def algorithm() -> RandomActions:
    """Of four numbers and three actions, as the learner makes it."""
    policy = build(box(4), Discrete(3), PolicySection(hidden_sizes=(8,)), 0)
    made = make(policy, RandomSection(batch_steps=64), seed=0, hardware=Hardware())
    assert isinstance(made, RandomActions)
    return made


def test_every_action_is_as_likely_whatever_is_seen() -> None:
    policy = algorithm().policy
    seen = {"observation": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}
    with torch.no_grad():
        acted = policy.act(seen)
    np.testing.assert_allclose(np.exp(acted.log_prob), 1 / 3, rtol=1e-6)
    assert len(set(acted.action["action"].tolist())) == 3


def test_it_is_stored_and_found_again() -> None:
    first, second = algorithm(), algorithm()
    second.load(AlgorithmState(tensors=first.state().tensors, numbers={"updates": 7}))
    assert second.updates == 7
    with pytest.raises(ValueError, match="updates missing"):
        second.load(AlgorithmState(tensors=first.state().tensors, numbers={}))


def test_batches_are_counted_and_change_nothing() -> None:
    made = algorithm()
    before = made.state().tensors
    batch = collect(small_policy(6))
    told = made.update(batch, progress=0.5)
    assert (told.applied, told.steps, told.gradient_steps, made.updates) == (
        True,
        int(batch.valid.sum()),
        0,
        1,
    )
    nothing = made.update(replace(batch, valid=torch.zeros_like(batch.valid)), progress=0.5)
    assert (nothing.applied, nothing.reason, made.updates) == (False, "empty", 1)
    made.restore(made.state())
    assert all(torch.equal(one, made.state().tensors[name]) for name, one in before.items())
