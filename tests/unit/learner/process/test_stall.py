"""The words with which a run ends that made no updates."""

from penstock.broker.log.replies import Status
from penstock.learner.failures import cause


def test_a_run_that_no_actor_came_to_does_not_say_that_its_actors_are_gone() -> None:
    assert "no rollout worker has come" in cause(Status(), {}, 300)
    assert "all actors are gone" in cause(Status(log_head=1), {}, 300)
