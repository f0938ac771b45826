"""A network of the user's in a real run: imported where it is allowed, published, applied and probed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from tests.support.run.actor_run import ActorThread, Plan, ScriptedLearner
from tests.support.run.harness import BrokerProcess, eventually

MODULE = "tests.support.experience.own_networks"


@pytest.fixture
def learner(redis_url: str) -> Iterator[ScriptedLearner]:
    """A run whose policy has such a network, with first weights published."""
    made = ScriptedLearner(redis_url, Plan(policy={"network": f"{MODULE}:Good"}))
    made.publish()
    yield made
    made.log.close()


def test_an_actor_acts_with_what_was_published(broker: BrokerProcess, learner: ScriptedLearner) -> None:
    with ActorThread(broker.address, "actor-0", allow_modules=[MODULE]):
        eventually(lambda: learner.learn() >= 8, "eight fragments")
    learner.read()
    for fragment in learner.fragments:
        arrays: dict[str, Any] = fragment.arrays()
        policy = learner.policies[fragment.header.oldest_version]
        steps = fragment.header.charge
        observed = {"observation": arrays["observation"][:-1].reshape(steps, 4).copy()}
        expected = policy.log_prob(observed, {"action": arrays["action"].reshape(steps).copy()})
        np.testing.assert_allclose(arrays["log_prob"].reshape(steps), expected, atol=2e-5)


def test_an_actor_that_does_not_allow_it_ends(broker: BrokerProcess, learner: ScriptedLearner) -> None:
    error = ActorThread(broker.address, "actor-0").join()
    assert isinstance(error, ConfigurationError)
    assert f'actor.allow_modules=["{MODULE}"]' in str(error)
