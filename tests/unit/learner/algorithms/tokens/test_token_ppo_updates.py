"""PPO of tokens as an algorithm like the others: what an update tells, keeps and leaves behind."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.tokens import token_metrics, token_ppo
from penstock.policy import weights
from tests.support.experience.token_experience import SmallTokenPolicy, batch_of, fragment
from tests.support.experience.token_learner import make, move, responses, same, stale


def test_every_metric_is_reported() -> None:
    """And those of a critic only where there is one."""
    for advantage, critic in (("gae", True), ("group", False), ("reinforce", False)):
        algorithm: Algorithm = make(advantage=advantage)
        update = algorithm.update(stale(), progress=0.0)
        expected = {*token_metrics.METRICS, *(token_metrics.CRITIC_METRICS if critic else ())}
        assert update.metrics.keys() == expected
        assert all(math.isfinite(value) for value in update.metrics.values())
        assert (update.applied, update.gradient_steps, algorithm.updates) == (True, 1, 1)


def test_an_update_that_is_not_finite_leaves_no_trace() -> None:
    """Of weights, moments and coefficient."""
    algorithm = make(kl_target=1.0, epochs=2)
    assert algorithm.update(stale(), progress=0.0).applied
    before, batch = algorithm.state(), stale()
    reward = batch.reward.clone()
    reward[batch.terminated | batch.truncated] = math.inf
    update = algorithm.update(replace(batch, reward=reward), progress=0.0)
    assert (update.applied, update.reason, update.metrics) == (False, "nan", {})
    # The generator of permutations has gone on, as it does with the other algorithms.
    after = algorithm.state()
    generator = {"generator/permutations": before.tensors["generator/permutations"]}
    assert same(before, replace(after, tensors=after.tensors | generator))


def test_a_restored_state_goes_on_bit_by_bit() -> None:
    """The adapted coefficient too."""
    settings: dict[str, Any] = {"kl_target": 1.0, "kl_horizon": 20.0, "epochs": 2, "minibatches": 3}
    first, second = make(**settings), make(SmallTokenPolicy(3), **settings)
    first.update(stale(), progress=0.0)
    state = first.state()
    assert state.numbers["kl_coefficient"] != 0.05
    second.load(state)
    # The reference is read from the folder of the model; this one has none.
    second.policy._reference.load_state_dict(first.policy._reference.state_dict())  # type: ignore[attr-defined]
    for algorithm in (first, second):
        algorithm.update(stale(1), progress=0.1)
    assert same(first.state(), second.state())
    blobs = [weights.encode(one.published_modules()["default"]) for one in (first, second)]
    assert blobs[0] == blobs[1]


def test_what_is_missing_in_a_state_is_named() -> None:
    """Before anything is taken over."""
    algorithm = make()
    state = algorithm.state()
    for name in ("critic/weight", "policy/1.bias", "optimiser/critic/first/bias", "generator/permutations"):
        tensors = {key: tensor for key, tensor in state.tensors.items() if key != name}
        with pytest.raises(ValueError, match=name.split("/")[-1]):
            algorithm.load(replace(state, tensors=tensors))
    with pytest.raises(ValueError, match="kl_coefficient"):
        algorithm.load(replace(state, numbers={"updates": 0, "gradient_steps": {}}))


def test_the_critic_learns_first() -> None:
    """In the warm-up the policy stands still, and so does what is adapted to its divergence."""
    algorithm = make(critic_warmup_updates=1, kl_target=1.0, kl_horizon=20.0)
    policy, critic = weights.encode(algorithm.policy.published), weights.encode(algorithm.policy.critic)
    told = algorithm.update(stale(), progress=0.0).metrics
    assert told["learning_rate"] == told["gradient_norm"] == 0.0
    assert weights.encode(algorithm.policy.published) == policy
    assert weights.encode(algorithm.policy.critic) != critic
    assert algorithm.update(stale(), progress=0.0).metrics["kl_coefficient"] == told["kl_coefficient"]
    assert weights.encode(algorithm.policy.published) != policy


def test_the_coefficient_follows_the_divergence() -> None:
    """Up where it is too large, down where it is too small, by at most 20 % · n / horizon."""
    for target, expected in ((1e-6, 1.2), (1e6, 0.8)):
        policy = SmallTokenPolicy()
        move(policy)
        algorithm = make(policy, kl_target=target, kl_horizon=12.0, kl_coefficient=0.1, learning_rate=0.0)
        told = [
            algorithm.update(batch_of(fragment(responses(policy))), progress=0.0).metrics for _ in range(2)
        ]
        assert told[0]["kl_reference"] > 0
        assert told[1]["kl_coefficient"] == pytest.approx(0.1 * expected)


def test_epochs_end_where_the_policy_has_moved_far() -> None:
    """As with PPO."""
    assert (
        make(epochs=4, minibatches=4, target_kl=1e-9).update(stale(), progress=0.0).metrics["epochs"] == 1.0
    )
    assert make(epochs=4, minibatches=4, target_kl=1e9).update(stale(), progress=0.0).metrics["epochs"] == 4.0


def test_two_runs_are_equal_bit_by_bit() -> None:
    """Sampling, fragments and updates, with nothing but seeds in common."""
    states = []
    for _ in range(2):
        policy = SmallTokenPolicy()
        algorithm = make(policy, epochs=2, minibatches=2, micro_batch_tokens=30)
        for update in range(3):
            algorithm.update(
                batch_of(fragment(responses(policy, seed=10 * update), update=update)), progress=0.0
            )
        states.append(algorithm.state())
    assert same(*states)


def test_a_minibatch_holds_whole_responses() -> None:
    """Parts of nearly equal size, in the order of the permutation."""
    parts = [part.tolist() for part in token_ppo.minibatches(np.arange(5), 2)]
    assert parts == [[0, 1], [2, 3, 4]]
    assert len(list(token_ppo.minibatches(np.arange(2), 4))) == 2
