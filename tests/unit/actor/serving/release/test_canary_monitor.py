"""The canary on canary_monitor.

What clients see decides, each episode once, and nobody decides for another trial.
"""

import re
from typing import Any

import numpy as np
import pytest
from torch import nn

from penstock.policy.policy import Policy
from penstock.registry.records import Evaluation, Traffic
from penstock.registry.routing import Arm, Arms
from penstock.registry.safety import Cause, Verdict
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import Stand, broken, policy_of, seen

ACTIVE, CANARY = 1, 2


async def on_trial(policy: Policy | None = None, **canary: Any) -> Stand:
    """Half of the clients get the canary; returns are between 0 and 1."""
    given: dict[str, Any] = {
        "return_range": (0.0, 1.0),
        "slow_ms": 1e6,
        "horizon": 60,
    }
    stand = Stand(canary=given | canary)
    stand.keep(ACTIVE)
    stand.keep(CANARY, policy=policy)
    await steer(stand, CANARY)
    return stand


async def steer(stand: Stand, canary: int | None) -> None:
    """As after a look into the registry."""
    share = 0.0 if canary is None else 0.5
    held = frozenset({ACTIVE, CANARY, *stand.weights})
    traffic = Traffic(policy="default", canary_share=share)
    await stand.loaded_versions.steer(Arms(traffic=traffic, active=ACTIVE, canary=canary, pinned=held))
    stand.canary_monitor.steer(ACTIVE, canary, Evaluation(mean=0.5, std=0.1, episodes=10))


async def play(stand: Stand, client: int, good: float = 1.0, bad: float = 1.0) -> None:
    """An episode of one step; its return depends on the arm."""
    episode = stand.start(f"client-{client}")
    reply = await stand.act(episode, seen(0))
    reward = bad if reply.arm == pb.ARM_CANARY else good
    stand.end(episode, pb.ENDING_TERMINATED, reward=reward)


def negated(stand: Stand) -> Policy:
    """Weights of a policy that prefers what the active one avoids."""
    policy = policy_of(stand.specification, ACTIVE)
    nn.init.zeros_(policy.actor_head.bias)
    policy.actor_head.weight.data.neg_()
    return policy


def value_of(name: str) -> float:
    """What this process tells at /metrics."""
    found = re.search(rf"^{name} (\S+)$", metrics.exposition("server").decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_a_canary_whose_clients_earn_less_is_withdrawn() -> None:
    """By number, once, with the evidence in words; long before the horizon."""
    stand, before = await on_trial(), value_of("penstock_canaries_withdrawn_total")
    for client in range(120):
        await play(stand, client, good=1.0, bad=0.0)
    ((version, why),) = stand.withdrawn
    assert value_of("penstock_canaries_withdrawn_total") == before + 1
    assert version == CANARY
    assert why.startswith("withdraw for lower_return")
    assert stand.canary_monitor.state.canary_episodes < 60


async def test_a_canary_that_answers_nan_is_withdrawn_with_its_first_episode() -> None:
    """And with its first request of a client without episodes."""
    made = Stand().specification
    for without_episode in (False, True):
        stand = await on_trial(policy=broken(policy_of(made, CANARY)))
        for client in range(20):
            if without_episode:
                request = stand.asking(seen(0), client_key=f"client-{client}")
                stand.canary_monitor.answered((await stand.answer(request, 1e9))[1])
            else:
                await play(stand, client)
        assert [version for version, _ in stand.withdrawn] == [CANARY]
        assert stand.canary_monitor.state.cause is Cause.NOT_FINITE
        assert stand.canary_monitor.state.canary_episodes == 1


async def test_answers_of_nan_wait_for_no_episode_that_began_before() -> None:
    """An open one, however long it lasts, does not keep such a canary."""
    stand = await on_trial(policy=broken(policy_of(Stand().specification, CANARY)))
    for client in range(10):
        stand.start(f"client-{client}")
    assert {episode.arm for episode in stand.episodes} == {Arm.ACTIVE, Arm.CANARY}
    for client in range(10, 30):
        await play(stand, client)
    assert [version for version, _ in stand.withdrawn] == [CANARY]


async def test_a_canary_that_does_the_wrong_thing_is_withdrawn() -> None:
    """Negated weights, in a game whose good action the active version knows."""
    stand = await on_trial()
    stand.keep(CANARY, policy=negated(stand))
    await steer(stand, None)
    await steer(stand, CANARY)
    observation = seen(3)
    active = policy_of(stand.specification, ACTIVE)
    best = int(active.act({"observation": observation[None]}, deterministic=True).action["action"][0])
    for client in range(300):
        episode = stand.start(f"client-{client}")
        reply = await stand.act(episode, observation, deterministic=True)
        right = np.frombuffer(reply.action[0].value.data, np.int64)[0] == best
        stand.end(episode, pb.ENDING_TERMINATED, reward=float(right))
        if stand.withdrawn:
            break
    assert [version for version, _ in stand.withdrawn] == [CANARY]


async def test_a_canary_that_is_as_good_stays_until_the_horizon() -> None:
    """Then it is for the operator to say."""
    stand = await on_trial()
    for client in range(200):
        await play(stand, client)
    assert stand.withdrawn == []
    assert (stand.canary_monitor.state.verdict, stand.canary_monitor.state.canary_episodes) == (
        Verdict.UNDECIDED,
        60,
    )


async def test_an_episode_of_a_trial_that_is_over_counts_for_nothing() -> None:
    """It began with another canary."""
    stand = await on_trial()
    open_ = [stand.start(f"client-{client}") for client in range(40)]
    for episode in open_:
        await stand.act(episode, seen(0))
    stand.keep(3)
    await steer(stand, 3)
    for episode in open_:
        stand.end(episode, pb.ENDING_TERMINATED, reward=0.5)
    assert (stand.canary_monitor.state.canary_episodes, stand.canary_monitor.state.active_episodes) == (0, 0)


async def test_short_episodes_wait_for_those_that_began_before() -> None:
    """Outcomes are judged in the order of the beginnings."""
    stand = await on_trial()
    open_ = [stand.start(f"client-{client}") for client in range(20)]
    for episode in open_:
        await stand.act(episode, seen(0))
    for episode in reversed(open_[1:]):
        stand.end(episode, pb.ENDING_TERMINATED, reward=0.5)
    arms = {episode.arm for episode in stand.episodes}
    waiting = (
        stand.canary_monitor.state.canary_episodes
        if Arm.CANARY in arms
        else stand.canary_monitor.state.active_episodes
    )
    assert waiting == 0
    stand.end(open_[0], pb.ENDING_TERMINATED, reward=0.5)
    assert stand.canary_monitor.state.canary_episodes + stand.canary_monitor.state.active_episodes == 20


async def test_an_abandoned_episode_counts_by_its_answers_alone() -> None:
    """What it has earned so far is no return."""
    stand = await on_trial()
    for client in range(200):
        episode = stand.start(f"client-{client}")
        reply = await stand.act(episode, seen(0))
        earned = 0.0 if reply.arm == pb.ARM_CANARY else 1.0
        await stand.reward(episode, (0, earned))
        stand.end(episode, pb.ENDING_ABANDONED)
    assert stand.withdrawn == []
    assert stand.canary_monitor.state.evidence(Cause.LOWER_RETURN) == 1.0
    assert stand.canary_monitor.state.canary_episodes == 60


async def test_a_canary_that_is_still_there_is_withdrawn_again() -> None:
    """The registry may have been away the first time."""
    stand = await on_trial()
    for client in range(120):
        await play(stand, client, bad=0.0)
    assert len(stand.withdrawn) == 1
    await steer(stand, CANARY)
    assert [version for version, _ in stand.withdrawn] == [CANARY, CANARY]
    await steer(stand, None)
    assert len(stand.withdrawn) == 2


@pytest.mark.parametrize("known", [True, False])
async def test_without_a_range_returns_do_not_count(known: bool) -> None:
    """A range is declared, or comes from the active version's evaluation."""
    stand = await on_trial(return_range=None)
    if not known:
        stand.canary_monitor.steer(None, None, None)
        stand.canary_monitor.steer(ACTIVE, CANARY, None)
    for client in range(200):
        await play(stand, client, good=0.9, bad=0.1)
    assert bool(stand.withdrawn) is known


async def test_slow_answers_count_against_the_canary() -> None:
    """As late as the configuration calls slow."""
    stand = await on_trial(slow_ms=1e-6, horizon=10)
    for client in range(40):
        await play(stand, client)
    # Slow on both arms is nothing that the canary does worse.
    assert stand.canary_monitor.state.cause is Cause.HORIZON
