"""The canary on trial: what clients see decides, each client once, and hard guards never end."""

import re
from typing import Any

import numpy as np
import pytest
from torch import nn

from penstock.policy.policy import Policy
from penstock.protocol.refusal import Refused
from penstock.registry import canary as canary_trial
from penstock.registry.canary import Cause, ClientReturn, Seen, TrialState, Verdict, Window
from penstock.registry.records import Traffic
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import Stand, broken, policy_of, seen

ACTIVE, CANARY = 1, 2
SETTLE_S = 10.0


async def on_trial(policy: Policy | None = None, **canary: Any) -> Stand:
    """Half of the clients get the canary."""
    given: dict[str, Any] = {"slow_ms": 1e6, "horizon": 60, "settle_s": SETTLE_S}
    serving = {key: canary.pop(key) for key in ("fallback",) if key in canary}
    stand = Stand(canary=given | canary, **serving)
    stand.keep(ACTIVE)
    stand.keep(CANARY, policy=policy)
    await steer(stand, CANARY)
    return stand


async def steer(stand: Stand, canary: int | None, **traffic: Any) -> None:
    """As after a look into the registry."""
    shares = {"canary_share": 0.0 if canary is None else 0.5} | traffic
    held = frozenset({ACTIVE, CANARY, *stand.weights})
    arms = Arms(traffic=Traffic(policy="default", **shares), active=ACTIVE, canary=canary, pinned=held)
    await stand.loaded_versions.steer(arms)
    stand.canary_monitor.steer(arms)


def look(stand: Stand, passed_s: float = 0.0) -> list[Seen]:
    """Hand on what was seen, after so many seconds, and take the judgement, as one server alone does."""
    stand.now_s += passed_s
    monitor, found = stand.canary_monitor, stand.canary_monitor.take()
    if monitor.trial is not None:
        monitor.judged(monitor.trial, canary_trial.observe_all(monitor.state, monitor.bounds, found))
    return found


async def play(stand: Stand, client: int, good: float = 1.0, bad: float = 1.0) -> None:
    """An episode of one step; its return depends on the arm."""
    episode = stand.start(f"client-{client}")
    reply = await stand.act(episode, seen(0))
    reward = bad if reply.arm == pb.ARM_CANARY else good
    stand.end(episode, pb.ENDING_TERMINATED, reward=reward)


async def ask(stand: Stand, client: int) -> None:
    """A request without an episode."""
    request = stand.asking(seen(0), client_key=f"client-{client}")
    stand.canary_monitor.answered((await stand.answer(request, 1e9))[1])


def negated(stand: Stand) -> Policy:
    """Weights of a policy that prefers what the active one avoids."""
    policy = policy_of(stand.specification, ACTIVE)
    nn.init.zeros_(policy.actor_head.bias)
    policy.actor_head.weight.data.neg_()
    return policy


def value_of(name: str) -> float:
    """What this process tells at /metrics."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", metrics.exposition("server").decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


# ---------------------------------------------------------------- returns


async def test_a_canary_whose_clients_earn_less_is_withdrawn() -> None:
    stand, before = await on_trial(), value_of("penstock_canaries_withdrawn_total")
    for client in range(100):
        await play(stand, client, good=1.0, bad=0.0)
    look(stand, SETTLE_S)
    ((version, why),) = stand.withdrawn
    assert value_of("penstock_canaries_withdrawn_total") == before + 1
    assert version == CANARY
    assert why.startswith("withdraw for lower_return")
    assert stand.canary_monitor.state.levels[0].canary < 60


async def test_a_canary_that_does_the_wrong_thing_is_withdrawn() -> None:
    stand = await on_trial()
    stand.keep(CANARY, policy=negated(stand))
    await steer(stand, None)
    await steer(stand, CANARY)
    observation = seen(3)
    active = policy_of(stand.specification, ACTIVE)
    best = int(active.act({"observation": observation[None]}, deterministic=True).action["action"][0])
    for client in range(100):
        episode = stand.start(f"client-{client}")
        reply = await stand.act(episode, observation, deterministic=True)
        right = np.frombuffer(reply.action[0].value.data, np.int64)[0] == best
        stand.end(episode, pb.ENDING_TERMINATED, reward=float(right))
    look(stand, SETTLE_S)
    assert [version for version, _ in stand.withdrawn] == [CANARY]


async def test_a_canary_that_is_as_good_is_undecided_at_the_horizon_and_judged_on() -> None:
    stand = await on_trial()
    for client in range(200):
        await play(stand, client)
    look(stand, SETTLE_S)
    assert stand.withdrawn == []
    assert stand.canary_monitor.state.verdict is Verdict.UNDECIDED
    assert value_of("penstock_canary_undecided") == 1
    for client in range(200, 300):
        await play(stand, client, bad=0.0)
    look(stand, SETTLE_S)
    assert [version for version, _ in stand.withdrawn] == [CANARY]


@pytest.mark.promise("episode-never-ends-delays")
@pytest.mark.parametrize("held", [0, 5])
async def test_an_episode_that_never_ends_delays_no_client(held: int) -> None:
    stand = await on_trial()
    for client in range(1000, 1000 + 4 * held):
        await stand.act(stand.start(f"client-{client}"), seen(0))
    for client in range(60):
        await play(stand, client, bad=0.0)
    found = look(stand, SETTLE_S)
    assert len([one for one in found if isinstance(one, ClientReturn)]) == 60
    assert [version for version, _ in stand.withdrawn] == [CANARY]


async def test_a_client_is_compared_at_fixed_times_by_its_mean() -> None:
    stand = await on_trial()
    for earned in (1.0, 3.0):
        await play(stand, 7, good=earned, bad=earned)
    open_ = stand.start("client-8")
    await stand.act(open_, seen(0))
    await stand.reward(open_, (0, 0.25))
    values = {}
    for level, age in enumerate((SETTLE_S, 8 * SETTLE_S, 64 * SETTLE_S)):
        early, due = look(stand, age - 0.1 - stand.now_s), look(stand, 0.1)
        assert all(isinstance(one, Window) for one in early)
        values[level] = [one.value for one in due if isinstance(one, ClientReturn)]
        await play(stand, 7, good=2.0, bad=2.0)
    assert values == {0: [2.0, 0.25], 1: [2.0, 0.25], 2: [2.0, 0.25]}


async def test_an_abandoned_episode_is_no_return() -> None:
    stand = await on_trial()
    for client in range(100):
        episode = stand.start(f"client-{client}")
        reply = await stand.act(episode, seen(0))
        earned = 0.0 if reply.arm == pb.ARM_CANARY else 1.0
        await stand.reward(episode, (0, earned))
        stand.end(episode, pb.ENDING_ABANDONED)
    assert all(isinstance(one, Window) for one in look(stand, SETTLE_S))
    assert stand.withdrawn == []


async def test_what_began_in_another_trial_or_with_other_shares_counts_for_nothing() -> None:
    stand = await on_trial()
    for change in ({"canary": 3}, {"canary": 3, "canary_share": 0.6}, {"canary": 3, "experiment": "second"}):
        open_ = [stand.start(f"client-{client}") for client in range(40)]
        for episode in open_:
            await stand.act(episode, seen(0))
        stand.keep(3)
        await steer(stand, **change)
        for episode in open_:
            stand.end(episode, pb.ENDING_TERMINATED, reward=0.5)
        assert all(isinstance(one, Window) for one in look(stand, SETTLE_S))


async def test_what_the_registry_did_not_hear_is_told_again() -> None:
    stand = await on_trial()
    for client in range(20):
        await play(stand, client)
    stand.now_s += SETTLE_S
    found = stand.canary_monitor.take()
    assert found
    stand.canary_monitor.give_back(found)
    assert value_of('penstock_canary_unguarded{reason="registry"}') == 1
    assert look(stand) == found
    assert value_of('penstock_canary_unguarded{reason="registry"}') == 0


async def test_a_canary_that_is_still_there_is_withdrawn_again() -> None:
    stand, before = await on_trial(), value_of("penstock_canaries_withdrawn_total")
    for client in range(60):
        await play(stand, client, bad=0.0)
    for times in (1, 2):
        look(stand, SETTLE_S)
        look(stand)
        assert [version for version, _ in stand.withdrawn] == [CANARY] * times
        await steer(stand, CANARY)
    assert value_of("penstock_canaries_withdrawn_total") == before + 1
    await steer(stand, None)
    look(stand)
    assert len(stand.withdrawn) == 2


async def test_a_canary_without_clients_to_compare_with_is_a_metric() -> None:
    def unguarded(reason: str) -> bool:
        return value_of(f'penstock_canary_unguarded{{reason="{reason}"}}') == 1

    stand = await on_trial()
    assert unguarded("returns")
    await steer(stand, CANARY, canary_share=0.0)
    assert unguarded("no_comparison")
    await steer(stand, CANARY)
    for client in range(40):
        await play(stand, client)
    look(stand, SETTLE_S)
    assert not unguarded("returns")
    assert not unguarded("no_comparison")
    await steer(stand, None)
    assert not unguarded("returns")


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("fallback", ["previous", "uniform", "none"])
@pytest.mark.parametrize("in_episodes", [True, False])
async def test_a_canary_that_answers_nan_is_withdrawn_at_once(fallback: str, in_episodes: bool) -> None:
    policy = broken(policy_of(Stand().specification, CANARY))
    stand = await on_trial(policy=policy, fallback=fallback)
    for client in range(20):
        try:
            await (play if in_episodes else ask)(stand, client)
        except Refused:
            assert fallback == "none"
    assert [version for version, _ in stand.withdrawn] == [CANARY]
    look(stand)
    assert stand.canary_monitor.state.cause is Cause.NOT_FINITE


@pytest.mark.promise("judgement-canary-never-ends")
async def test_guards_outlive_ten_thousand_answers() -> None:
    stand = await on_trial()
    for client in range(64):
        await play(stand, client)
    good = Window(answers=256, slower=0.0)
    state = canary_trial.observe_all(stand.canary_monitor.state, stand.canary_monitor.bounds, [good] * 1000)
    assert stand.canary_monitor.trial is not None
    stand.canary_monitor.judged(stand.canary_monitor.trial, state)
    stand.keep(3, policy=broken(policy_of(stand.specification, CANARY)))
    stand.loaded_versions._held[CANARY] = await stand.loaded_versions.load(stand.weights[3])
    for client in range(10):
        await ask(stand, client)
    assert [version for version, _ in stand.withdrawn] == [CANARY]


async def test_a_question_that_no_version_can_answer_is_not_the_canarys_fault() -> None:
    made = Stand().specification
    stand = await on_trial(policy=broken(policy_of(made, CANARY)))
    stand.keep(ACTIVE, policy=broken(policy_of(made, ACTIVE)))
    stand.loaded_versions._held[ACTIVE] = await stand.loaded_versions.load(stand.weights[ACTIVE])
    for client in range(40):
        await ask(stand, client)
    look(stand, 10.0)
    assert stand.withdrawn == []
    state: TrialState = stand.canary_monitor.state
    assert (state.answers > 10, state.failed) == (True, 0)


async def test_a_canary_without_weights_is_withdrawn_by_its_failed_answers() -> None:
    stand = await on_trial()
    del stand.weights[CANARY], stand.loaded_versions._held[CANARY]
    stand.loaded_versions.note_answered(Arm.CANARY, stand.loaded_versions._held[ACTIVE])
    for _ in range(6):
        for client in range(40):
            await ask(stand, client)
        look(stand, 10.0)
    assert [version for version, _ in stand.withdrawn][:1] == [CANARY]
    assert stand.canary_monitor.state.cause is Cause.ERRORS
