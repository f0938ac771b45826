"""PPO of tokens as an algorithm like the others: what an update tells, keeps and leaves behind."""

from dataclasses import replace

import pytest

from penstock.learner.algorithms.rows import edges
from penstock.policy import weights
from tests.support.experience.experience import same
from tests.support.experience.token_experience import SmallTokenPolicy, batch_of, fragment
from tests.support.experience.token_learner import make, move, responses, stale


def test_what_is_missing_in_a_state_is_named() -> None:
    algorithm = make()
    state = algorithm.state()
    for name in ("critic/weight", "policy/1.bias", "optimiser/critic/first/bias", "generator/permutations"):
        tensors = {key: tensor for key, tensor in state.tensors.items() if key != name}
        with pytest.raises(ValueError, match=name.split("/")[-1]):
            algorithm.load(replace(state, tensors=tensors))
    with pytest.raises(ValueError, match="kl_coefficient"):
        algorithm.load(replace(state, numbers={"updates": 0, "gradient_steps": {}}))


def test_the_critic_learns_first() -> None:
    algorithm = make(critic_warmup_updates=1, kl_target=1.0, kl_horizon=20.0)
    policy, critic = weights.encode(algorithm.policy.published), weights.encode(algorithm.policy.critic)
    told = algorithm.update(stale(), progress=0.0).metrics
    assert told["learning_rate"] == told["gradient_norm"] == 0.0
    assert weights.encode(algorithm.policy.published) == policy
    assert weights.encode(algorithm.policy.critic) != critic
    assert algorithm.update(stale(), progress=0.0).metrics["kl_coefficient"] == told["kl_coefficient"]
    assert weights.encode(algorithm.policy.published) != policy


def test_the_coefficient_follows_the_divergence() -> None:
    for target, expected in ((1e-6, 1.2), (1e6, 0.8)):
        policy = SmallTokenPolicy()
        move(policy)
        algorithm = make(policy, kl_target=target, kl_horizon=12.0, kl_coefficient=0.1, learning_rate=0.0)
        told = [
            algorithm.update(batch_of(fragment(responses(policy))), progress=0.0).metrics for _ in range(2)
        ]
        assert told[0]["kl_reference"] > 0
        assert told[1]["kl_coefficient"] == pytest.approx(0.1 * expected)


def test_what_it_found_is_how_far_it_is_from_the_reference() -> None:
    policy = SmallTokenPolicy()
    move(policy)
    algorithm = make(policy)
    assert algorithm.findings() == {}
    told = algorithm.update(batch_of(fragment(responses(policy))), progress=0.0).metrics["kl_reference"]
    found = algorithm.findings()
    assert found["kl_reference"] == told > 0
    assert found["remarks"] == [f"KL to the reference in the last update: {told:.3g} nats per response"]
    without = make(kl_coefficient=0.0)
    without.update(stale(), progress=0.0)
    assert without.findings() == {}


def test_epochs_end_where_the_policy_has_moved_far() -> None:
    assert (
        make(epochs=4, minibatches=4, target_kl=1e-9).update(stale(), progress=0.0).metrics["epochs"] == 1.0
    )
    assert make(epochs=4, minibatches=4, target_kl=1e9).update(stale(), progress=0.0).metrics["epochs"] == 4.0


def test_two_runs_are_equal_bit_by_bit() -> None:
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
    assert edges(5, 2) == [0, 2, 5]
    assert edges(2, 4) == [0, 1, 2]
