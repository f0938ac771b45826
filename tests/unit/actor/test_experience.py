import asyncio
import math
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actor.acting.masks import LearnerReward
from penstock.actor.acting.stepper import Ended, Stepped
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.actor.serving.episodes import CallerShares, EpisodeIds, Segment, SegmentBuilder
from penstock.actor.serving.experience import ARRAY_BYTES, STEP_BYTES
from penstock.config.sections import RewardWrapper
from penstock.learner.batch import check_meaning
from penstock.protocol.fragment import Fragment, Slot
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.refusal import Reason, Refused
from penstock.protocol.schema import Ranges
from penstock.protocol.spaces import Dict
from penstock.rpc.identity import CALLER, Identity, Party
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import (
    RUN,
    Stand,
    broken,
    column,
    parts_of,
    policy_of,
    ready,
    reason_of,
    seen,
    specification,
    steps_seen,
)

TERMINATED, TRUNCATED, ABANDONED = pb.ENDING_TERMINATED, pb.ENDING_TRUNCATED, pb.ENDING_ABANDONED
ADA, BOB, *OTHERS = (Identity(run="r", party=Party.CLIENT, name=name) for name in "abcde")


def not_learned(reason: str) -> float:
    (family,) = metrics.NOT_LEARNED_STEPS.collect()
    return next(s.value for s in family.samples if s.labels["reason"] == reason and s.name.endswith("_total"))


async def begun(unroll: int = 4, **serving: Any) -> tuple[Stand, str]:
    stand = await ready(specification(unroll=unroll), **serving)
    return stand, stand.start()


async def test_an_episode_is_cut_after_unroll_steps() -> None:
    stand, episode = await begun()
    await stand.play(episode, 10)
    stand.end(episode, TRUNCATED, final=seen(10), reward=9.0)
    found = stand.fragments()
    assert steps_seen(found) == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10]]
    assert [column(fragment, "reward") for fragment in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [fragment.header.slots for fragment in found] == [(Slot(0, 1, first),) for first in (0, 4, 8)]
    assert [column(fragment, "truncated")[-1] for fragment in found] == [False, False, True]
    assert found[-1].arrays()["final/step"].tolist() == [1]
    np.testing.assert_array_equal(found[-1].arrays()["final/observation"], seen(10)[np.newaxis])


async def test_the_drawn_actions_are_the_learned_actions() -> None:
    stand, episode = await begun()
    replies = [await stand.act(episode, seen(step)) for step in range(4)]
    stand.end(episode, TERMINATED)
    (fragment,) = stand.fragments()
    assert column(fragment, "action") == [
        int(np.frombuffer(r.action[0].value.data, np.int64)[0]) for r in replies
    ]
    assert column(fragment, "log_prob") == [reply.log_prob[0] for reply in replies]
    assert fragment.header.oldest_version == fragment.header.newest_version == 1
    policy = policy_of(stand.specification, 1)
    observed = {"observation": np.stack([seen(step) for step in range(4)])}
    expected = policy.log_prob(observed, {"action": np.array(column(fragment, "action"))})
    np.testing.assert_allclose(column(fragment, "log_prob"), expected, atol=1e-5)


async def test_newer_weights_begin_a_new_segment_only_where_one_ends() -> None:
    stand, episode = await begun()
    await stand.play(episode, 2)
    await stand.publish(2)
    await stand.play(episode, 4, first=2)
    stand.end(episode, TERMINATED)
    found = stand.fragments()
    assert steps_seen(found) == [[0, 1, 2, 3, 4], [4, 5, 5]]
    assert [fragment.header.newest_version for fragment in found] == [1, 2]


async def test_an_episode_is_cut_where_its_version_was_released() -> None:
    stand, episode = await begun()
    await stand.play(episode, 2)
    await stand.publish(2)
    for open_episode in stand.episodes:
        open_episode.loaded = None
    await stand.play(episode, 1, first=2)
    stand.end(episode, TERMINATED, final=seen(3))
    found = stand.fragments()
    assert steps_seen(found) == [[0, 1, 2], [2, 3]]
    assert [fragment.header.newest_version for fragment in found] == [1, 2]


async def test_a_slow_episode_changes_to_newer_weights_in_time() -> None:
    stand, episode = await begun(unroll=100, max_fragment_age_s=10.0)
    await stand.play(episode, 2)
    await stand.publish(2)
    stand.now_s = 9.9
    await stand.play(episode, 1, first=2)
    stand.now_s = 10.0
    await stand.play(episode, 1, first=3)
    stand.end(episode, TERMINATED, final=seen(4))
    found = stand.fragments()
    assert steps_seen(found) == [[0, 1, 2, 3], [3, 4]]
    assert [fragment.header.newest_version for fragment in found] == [1, 2]


@pytest.mark.parametrize("final", [None, seen(2)])
async def test_a_terminated_episode_needs_no_final_observation(final: Any) -> None:
    stand, episode = await begun()
    await stand.play(episode, 2)
    stand.end(episode, TERMINATED, reward=5.0, **({} if final is None else {"final": final}))
    (fragment,) = stand.fragments()
    assert column(fragment, "terminated") == [False, True]
    assert column(fragment, "truncated") == [False, False]
    assert column(fragment, "reward") == [0, 5]
    assert len(fragment.arrays()["final/step"]) == int(final is not None)


async def test_an_end_at_a_segment_boundary_leaves_no_empty_segment() -> None:
    stand, episode = await begun()
    await stand.play(episode, 4)
    assert stand.fragments() == []  # what comes of the fourth step is not known yet
    stand.end(episode, TRUNCATED, final=seen(4))
    assert steps_seen(stand.fragments()) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("steps", [1, 3, 5])
async def test_an_abandoned_episode_loses_only_its_last_step(steps: int) -> None:
    stand, episode = await begun()
    await stand.play(episode, steps)
    before = not_learned("abandoned")
    stand.end(episode, ABANDONED)
    whole = [list(range(5))] if steps > 4 else []
    rest = [list(range(steps))] if steps == 3 else []
    assert steps_seen(stand.fragments()) == whole + rest
    assert not_learned("abandoned") == before + 1
    assert stand.learning is not None
    assert stand.learning._buffered.used == 0


async def test_finished_episodes_are_reported() -> None:
    stand, first = await begun()
    second, third, fourth = stand.start(), stand.start(), stand.start()
    for episode, steps in ((first, 6), (second, 3), (third, 3)):
        await stand.play(episode, steps)
    stand.end(first, TERMINATED, reward=5.0)
    stand.end(second, TRUNCATED, final=seen(3))
    stand.end(third, ABANDONED)
    stand.end(fourth, TERMINATED)
    assert list(stand.queue.episodes) == [
        Episode(slot_id=0, episode_id=1, episode_return=15.0, length=6, terminated=True, version=1),
        Episode(slot_id=1, episode_id=2, episode_return=1.0, length=3, terminated=False, version=1),
    ]


async def test_a_late_reward_lands_in_its_step_within_the_window() -> None:
    stand, episode = await begun(reward_window_s=5.0)
    for step in range(6):
        await stand.act(episode, seen(step))
    stand.now_s = 1.0
    stand.end(episode, TERMINATED)
    stand.handler.sweep()
    assert stand.fragments() == []
    assert await stand.reward(episode, (0, 10.0), (3, 13.0), (5, 15.0)) == 0
    stand.now_s = 4.9
    stand.handler.sweep()
    assert stand.fragments() == []
    stand.now_s = 5.0
    stand.handler.sweep()
    (first,) = stand.fragments()
    assert column(first, "reward") == [10, 0, 0, 13]
    assert await stand.reward(episode, (4, 14.0)) == 0
    stand.now_s = 6.0
    stand.handler.sweep()
    (last,) = stand.fragments()
    assert column(last, "reward") == [14, 15]


async def test_a_server_that_ends_sends_segments_that_still_wait_for_rewards() -> None:
    stand, episode = await begun(reward_window_s=5.0)
    await stand.play(episode, 6)
    stand.end(episode, TERMINATED)
    assert stand.learning is not None
    stand.learning.ripen(math.inf)
    assert steps_seen(stand.fragments()) == [[0, 1, 2, 3, 4], [4, 5, 5]]
    assert stand.learning._buffered.used == 0


async def test_a_sum_of_rewards_that_is_too_large_never_makes_an_invalid_fragment() -> None:
    stand, episode = await begun()
    await stand.act(episode, seen(0))
    await stand.reward(episode, (0, 3e38), (0, 3e38))
    stand.end(episode, TERMINATED, reward=3e38)
    (fragment,) = stand.fragments()
    assert np.isfinite(column(fragment, "reward")).all()


async def test_rewards_beyond_the_brokers_limit_are_not_sent() -> None:
    stand = await ready(replace(specification(), max_reward=100.0))
    for amount in (99.0, -101.0):
        episode = stand.start()
        await stand.act(episode, seen(0))
        stand.end(episode, TERMINATED, reward=amount)
    assert [column(fragment, "reward") for fragment in stand.fragments()] == [[99.0]]


@pytest.mark.promise("client-policy-server-session")
async def test_no_observation_of_a_client_quarantines_the_session() -> None:
    stand, episode = await begun()
    far = np.full_like(seen(0), 20_000.0)
    await stand.play(episode, 2)
    with pytest.raises(Refused, match="observation/: holds 20000, outside ±10000"):
        await stand.act(episode, far, reward=1.0)
    with pytest.raises(Refused, match="final_observation/: holds 20000, outside ±10000"):
        stand.end(episode, TRUNCATED, final=far)
    stand.end(episode, TRUNCATED, final=np.full_like(far, 10_000.0), reward=1.0)
    run = stand.specification
    ranges = Ranges.of_run(run.observation_space, run.action_space, Dict(()))
    for fragment in stand.fragments():
        check_meaning(fragment.header, fragment.arrays(), ranges)


async def test_the_learner_is_given_the_rewards_of_the_runs_wrappers() -> None:
    stand, episode = await begun()
    wrappers = (RewardWrapper(clip=(-1.0, 1.0)), RewardWrapper(scale=10.0))
    assert stand.learning is not None
    stand.learning._reward = LearnerReward(wrappers)
    await stand.act(episode, seen(0))
    await stand.reward(episode, (0, 0.25), (0, 0.5))
    await stand.act(episode, seen(1))
    ended = stand.end(episode, TERMINATED, reward=7.0)
    (fragment,) = stand.fragments()
    assert column(fragment, "reward") == [7.5, 10.0]
    assert ended.total_return == 7.75


async def test_a_broken_potential_costs_the_learner_steps_and_clients_nothing() -> None:
    stand, episode = await begun()
    assert stand.learning is not None
    shape = RewardWrapper(shape=f"{__name__}:not_a_number", discount=1.0)
    stand.learning._reward = LearnerReward((shape,))
    before = not_learned("reward")
    await stand.play(episode, 3)
    stand.end(episode, TERMINATED)
    assert stand.fragments() == []
    assert not_learned("reward") - before == 3
    assert stand.learning._buffered.used == 0


def not_a_number(observation: Mapping[str, Any]) -> Any:
    return np.full(len(observation["observation"]), np.nan)


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({}, True),
        ({"deterministic": True}, False),
        ({"taken": 2}, False),
        ({"taken": 2, "taken_log_prob": -1.5}, True),
        ({"mask": [True, True, False]}, False),
    ],
)
async def test_a_step_not_sampled_by_the_policy_is_not_learned_from(
    fields: dict[str, Any], valid: bool
) -> None:
    stand, episode = await begun()
    sent = {name: value for name, value in fields.items() if name not in ("taken", "mask")}
    if "taken" in fields:
        sent["taken_action"] = parts_of(stand.specification.action_space, np.int64(fields["taken"]))
    if "mask" in fields:
        sent["action_mask"] = parts_of(stand.specification.action_space, np.array(fields["mask"]))
    await stand.act(episode, seen(0), **sent)
    stand.end(episode, TERMINATED)
    (fragment,) = stand.fragments()
    assert column(fragment, "valid") == [valid]
    if "taken" in fields:
        assert column(fragment, "action") == [2]
        assert column(fragment, "log_prob") == [fields.get("taken_log_prob", 0.0)]


async def test_an_episode_may_end_with_an_unlearned_step() -> None:
    stand, episode = await begun()
    await stand.act(episode, seen(0))
    await stand.act(episode, seen(1), deterministic=True)
    stand.end(episode, TRUNCATED, final=seen(2))
    (fragment,) = stand.fragments()
    assert column(fragment, "valid") == [True, False]
    assert len(fragment.arrays()["final/observation"]) == 0


async def test_a_fallback_step_is_not_learned_from_and_loses_nothing() -> None:
    stand, episode = await begun(unroll=8)
    await stand.play(episode, 1)
    await stand.publish(2, policy=broken(policy_of(stand.specification, 2)))
    for open_episode in stand.episodes:
        open_episode.loaded = None
    reply = await stand.act(episode, seen(1))
    assert (reply.fallback, reply.version) == (pb.FALLBACK_PREVIOUS, 1)
    await stand.publish(3)
    await stand.act(episode, seen(2))
    stand.end(episode, TERMINATED, final=seen(3))
    found = stand.fragments()
    assert steps_seen(found) == [[0, 1, 2], [2, 3]]
    assert [column(fragment, "valid") for fragment in found] == [[True, False], [True]]
    assert [fragment.header.newest_version for fragment in found] == [1, 3]


async def test_the_counted_memory_is_the_used_memory() -> None:
    stand, episode = await begun(unroll=10_000, max_fragment_age_s=1e9)
    await stand.play(episode, 100)
    assert stand.learning is not None
    counted = stand.learning._buffered.used
    tracemalloc.start()
    try:
        await stand.play(episode, 500, 100)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * taken < stand.learning._buffered.used - counted < 1.5 * taken


async def test_episodes_beyond_the_memory_limit_are_answered_but_not_learned_from() -> None:
    each = STEP_BYTES + 2 * ARRAY_BYTES + 16 + 8  # observation and action
    stand, first = await begun(unroll=100, max_buffered_bytes=5 * each)
    before = not_learned("full")
    await stand.play(first, 4)
    second = stand.start()
    await stand.play(second, 3)  # one fits
    assert not_learned("full") == before + 2
    assert stand.learning is not None
    assert stand.learning._buffered.used == 4 * each
    assert stand.fragments() == []  # of the second it is not known what came of the only step
    stand.end(first, TERMINATED)
    assert stand.learning._buffered.used == 0
    assert steps_seen(stand.fragments()) == [[0, 1, 2, 3, 3]]
    ended = stand.end(second, TERMINATED, reward=2.0)
    assert (ended.length, ended.total_return) == (3, 3.0)
    third = stand.start()
    await stand.play(third, 5)
    stand.end(third, TERMINATED)
    assert steps_seen(stand.fragments()) == [[0, 1, 2, 3, 4, 4]]


async def test_a_full_outbox_loses_experience_but_no_answer() -> None:
    stand, episode = await begun(outbox_fragments=2)
    before = not_learned("full")
    await stand.play(episode, 16)
    stand.end(episode, TERMINATED)
    assert not_learned("full") == before + 8
    assert steps_seen(stand.fragments()) == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("fields", "learns", "reason"), [({"not_learned": True}, True, "unasked"), ({}, False, None)]
)
async def test_an_episode_that_is_not_learned_from_leaves_nothing(
    fields: dict[str, Any], learns: bool, reason: str | None
) -> None:
    stand = await ready(learns=learns)
    before = not_learned("unasked")
    episode = stand.start(**fields)
    await stand.play(episode, 6)
    assert await stand.reward(episode, (0, 2.0)) == 0
    assert stand.end(episode, TERMINATED).total_return == 12.0
    assert stand.fragments() == []
    assert not_learned("unasked") - before == (6 if reason else 0)


QUARTERS: Final = st.integers(-400, 400).map(lambda n: n / 4)  # their sums are exact
REWARDS: Final = st.tuples(QUARTERS, st.sampled_from(("with the next", "at once", "in two", "late")))
EPISODES: Final = st.lists(
    st.tuples(st.lists(REWARDS, min_size=1, max_size=12), st.booleans()), min_size=1, max_size=4
)
Played = tuple[list[tuple[float, str]], bool]
"""An episode: its rewards by step and how each was said, and whether it was truncated."""


async def served(played: Sequence[Played], unroll: int) -> list[tuple[Any, ...]]:
    """What is learned of episodes that clients play."""
    stand, _ = await begun(unroll, reward_window_s=1.0, max_fragment_age_s=1e6)
    for number, (rewards, truncated) in enumerate(played):
        episode = stand.start()
        told: dict[str, float] = {}
        for step, (reward, way) in enumerate(rewards):
            await stand.act(episode, seen(step, number), seed=1000 * number + step, **told)
            told = {"reward": reward} if way == "with the next" else {}
            if way == "at once":
                await stand.reward(episode, (None, reward))
            if way == "in two":
                await stand.reward(episode, (step, reward - 1), (step, 1))
        ending = TRUNCATED if truncated else TERMINATED
        stand.end(episode, ending, final=seen(len(rewards), number), **told)
        for step, (reward, way) in enumerate(rewards):
            if way == "late":
                assert await stand.reward(episode, (step, reward)) == 0
    stand.now_s = 2.0
    stand.handler.sweep()
    found = stand.fragments()
    assert all(fragment.header.steps <= unroll for fragment in found)
    found.sort(key=lambda fragment: fragment.header.slots[0][1:])
    return [step for fragment in found for step in transitions(fragment)]


def rolled_out(played: Sequence[Played], unroll: int) -> list[tuple[Any, ...]]:
    """The same with a rollout worker's FragmentBuilder, one slot."""
    made = specification(unroll=unroll)
    policy = policy_of(made, 1)
    builder = FragmentBuilder(made.schema, unroll, 1)
    builder.start({"observation": seen(0, 0)[np.newaxis]})
    found: list[Fragment] = []
    last = len(played) - 1, len(played[-1][0]) - 1
    for number, (rewards, truncated) in enumerate(played):
        for step, (reward, _) in enumerate(rewards):
            parameters = policy.step({"observation": seen(step, number)[np.newaxis]}).parameters
            acted = policy.choose(parameters, np.random.default_rng(1000 * number + step))
            over, following = step + 1 == len(rewards), seen(step + 1, number)[np.newaxis]
            stepped = Stepped(  # as an environment says that is reset at once
                observation={"observation": seen(0, number + 1)[np.newaxis] if over else following},
                reward=np.array([reward]),
                terminated=np.array([over and not truncated]),
                truncated=np.array([over and truncated]),
                valid=None,
                ended=Ended(np.array([0]), {"observation": following}) if over else None,
            )
            builder.record(acted.action, acted.log_prob, stepped)
            if builder.is_full or (number, step) == last:
                weights, sequence = Publication(1, 1), len(found) + 1
                fields = HeaderFields(run=RUN, session=1, sequence=sequence, weights=weights, round=0)
                found.append(builder.cut(fields)[0])
    return [step for fragment in found for step in transitions(fragment)]


def transitions(fragment: Fragment) -> list[tuple[Any, ...]]:
    """The steps of a fragment of one slot: what was observed, done, earned, how it ended, what came."""
    arrays: dict[str, Any] = fragment.arrays()
    finals = dict(zip(arrays["final/step"].tolist(), arrays["final/observation"].tolist(), strict=True))
    observed = column(fragment, "observation")
    rows = [column(fragment, name) for name in ("action", "log_prob", "reward", "terminated", "truncated")]
    return [
        (observed[step], *(row[step] for row in rows), finals.get(step, observed[step + 1]))
        for step in range(fragment.header.steps)
    ]


@pytest.mark.promise("served-episodes-give-learner")
@settings(max_examples=15)
@given(played=EPISODES, unroll=st.integers(1, 7))
def test_served_episodes_equal_those_of_a_rollout_worker(played: list[Played], unroll: int) -> None:
    assert asyncio.run(served(played, unroll)) == rolled_out(played, unroll)


async def test_a_caller_that_fills_the_memory_leaves_room_for_others() -> None:
    each = STEP_BYTES + 2 * ARRAY_BYTES + 16 + 8  # observation and action
    stand, _ = await begun(unroll=100, max_buffered_bytes=10 * each)
    before = not_learned("full")
    for caller, steps, lost in ((BOB, 5, 0), (ADA, 2, 0), (BOB, 1, 1)):
        token = CALLER.set(caller)
        await stand.play(stand.start(), steps)
        assert not_learned("full") == before + lost
        CALLER.reset(token)


def fill(shares: CallerShares, owner: Identity | None) -> int:
    count = 0
    while shares.fits(owner, 1):
        shares.add(owner, 1)
        count += 1
    return count


def test_a_later_caller_finds_room() -> None:
    shares = CallerShares(1000)
    assert [fill(shares, one) for one in (ADA, BOB, *OTHERS[:2])] == [500, 250, 125, 63]
    assert shares.used == 938
    assert "this caller has 500" in shares.why_not(ADA, "serving.max_episodes")
    assert "of 1000 (serving.max_episodes)" in shares.why_not(ADA, "serving.max_episodes")
    shares.add(ADA, -500)
    assert all(fill(shares, one) > 0 for one in OTHERS[1:])
    assert fill(CallerShares(1), ADA) == 1


def test_without_identities_one_caller_may_use_all_the_memory() -> None:
    shares = CallerShares(7)
    assert fill(shares, None) == 7
    assert "7 of 7 (it)" in shares.why_not(None, "it")
    assert not shares.fits(None, 1)


def test_a_caller_that_holds_nothing_is_forgotten() -> None:
    shares = CallerShares(10)
    for one in OTHERS:
        shares.add(one, 1)
        shares.add(one, -1)
    assert shares.used == 0
    assert not shares._held


def reason(ids: EpisodeIds, episode_id: str, owner: Identity | None) -> Reason | None:
    """With which an id is refused; None for one that holds."""
    try:
        ids.check(episode_id, owner)
    except Refused as refused:
        assert len(str(refused)) < 400
        return reason_of(refused)
    return None


@pytest.mark.promise("id-episode-proves-given")
def test_an_id_is_valid_only_for_the_identity_it_was_given_to() -> None:
    ids = EpisodeIds()
    for number in (1, 2, 10**15):
        for owner in (ADA, BOB, None):
            given = ids.give(number, owner)
            assert len(given) <= 48
            assert [reason(ids, given, other) for other in (ADA, BOB, None)] == [
                None if other == owner else Reason.EPISODE_UNKNOWN for other in (ADA, BOB, None)
            ]


@pytest.mark.promise("id-episode-proves-given")
@pytest.mark.parametrize(
    "changed",
    [
        "{server}-8-{token}",
        "{server}-07-{token}",
        "{server}-7-{token}\n",
        "{server}-7-{shorter}",
        "{server}-7-{token}{endless}",
        "{server}-{endless}-{token}",
        "{server}-\N{ARABIC-INDIC DIGIT SEVEN}-{token}",
        "{server}-7-000000000000",
        "{server}-\0",
        "{server}",
        "",
    ],
)
def test_an_id_that_was_changed_is_unknown(changed: str) -> None:
    ids = EpisodeIds()
    server, _, token = ids.give(7, ADA).split("-")
    words = {"server": server, "token": token, "shorter": token[:-1], "endless": "9" * 100_000}
    assert reason(ids, changed.format(**words), ADA) is Reason.EPISODE_UNKNOWN


def row(number: int) -> dict[str, np.ndarray]:
    return {"observation": np.full((1, 2), number, np.float32)}


def segments_stepped(builder: SegmentBuilder, number: int) -> Segment | None:
    done = builder.step(row(number), {"action": np.full((1,), number)}, -float(number), (1, 0), 0.0, {})
    assert builder.open is not None
    builder.open.add_reward(number, float(number))
    builder.open.bytes += 10
    return done


@given(length=st.integers(1, 12), flushes=st.sets(st.integers(0, 12)))
def test_cutting_more_often_sends_the_same_steps(length: int, flushes: set[int]) -> None:
    builder = SegmentBuilder(lane=0, number=3, unroll_length=5, max_age_s=100.0)
    segments: list[Segment | None] = []
    for number in range(length):
        segments.append(segments_stepped(builder, number))
        if number in flushes:
            segments.append(builder.cut())
    segments.append(builder.end(terminated=True, final=row(length)))
    found = [segment for segment in segments if segment is not None]
    steps = [number for segment in found for number in segment.rewards]
    assert steps == list(range(length))
    assert [-number for segment in found for number in segment.log_probs] == steps
    assert sum(segment.bytes for segment in found) == 10 * length
    for segment in found:
        first = segment.slot.first_step
        seen = [int(one["observation"][0, 0]) for one in segment.observations]
        assert seen == list(range(first, first + segment.steps + 1))
        assert segment.steps <= 5


def test_single_steps_and_policies_with_memory_are_not_cut() -> None:
    builder = SegmentBuilder(lane=0, number=3, unroll_length=5, max_age_s=100.0)
    assert builder.cut() is None
    segments_stepped(builder, 0)
    assert builder.cut() is None
    remembering = SegmentBuilder(lane=0, number=3, unroll_length=5, max_age_s=100.0)
    state = {"state/h": np.zeros((1, 4), np.float32)}
    for number in range(3):
        remembering.step(row(number), {"action": np.zeros(1)}, 0.0, (1, 0), 0.0, state)
    assert remembering.cut() is None
    assert remembering.open is not None
    assert remembering.open.steps == 3
