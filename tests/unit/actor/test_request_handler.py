import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from penstock.actor.serving.episodes import REMEMBERED_EPISODES
from penstock.actor.serving.requests import MAX_REQUEST_ID
from penstock.client.calls import from_plain_parts, to_plain_parts
from penstock.learner.algorithms.rows import see
from penstock.learner.batch import Batch
from penstock.policy.policy import Policy
from penstock.protocol.refusal import Reason, Refused
from penstock.protocol.schema import fragment_schema, mask_rules, state_rules
from penstock.protocol.spaces import Box
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import to_tensor
from penstock.registry.records import Traffic
from penstock.registry.routing import Arms
from penstock.rpc.identity import CALLER, Identity, Party
from penstock.v1 import policy_pb2 as pb
from tests.support.experience.remembering import batch_of
from tests.support.serving.server_parts import (
    FAR,
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
from tests.unit.actor.test_batcher import Held

TERMINATED, TRUNCATED, ABANDONED = pb.ENDING_TERMINATED, pb.ENDING_TRUNCATED, pb.ENDING_ABANDONED


@contextmanager
def refused(reason: Reason, match: str) -> Iterator[None]:
    with pytest.raises(Refused, match=match) as error:
        yield
    assert error.value.refusal.reason is reason


@contextmanager
def called_by(name: str) -> Iterator[None]:
    token = CALLER.set(Identity(run="run-a", party=Party.CLIENT, name=name))
    yield
    CALLER.reset(token)


async def test_a_repeated_start_gives_the_same_episode() -> None:
    stand = await ready()
    first = stand.start("ada", request_id="a")
    assert stand.start("ada", request_id="a") == first
    others = {stand.start("ada", request_id="b"), stand.start("bob", request_id="a")}
    others |= {stand.start("ada", request_id=""), stand.start("ada", request_id="")}
    with called_by("eve"):
        others.add(stand.start("ada", request_id="a"))
    assert len(others | {first}) == 6
    assert len(stand.episodes) == 6


async def test_a_start_is_remembered_as_long_as_its_episode_is_open() -> None:
    stand = await ready(max_episodes=2 * REMEMBERED_EPISODES)
    first = stand.start(request_id="a")
    for _ in range(REMEMBERED_EPISODES + 1):
        stand.start()
    assert stand.start(request_id="a") == first


@pytest.mark.promise("repeated-call-gets-reply")
async def test_a_repeated_act_gets_the_same_reply_without_a_step() -> None:
    stand = await ready()
    episode = stand.start()
    request = stand.asking(seen(0), episode_id=episode, step=0)
    first = await stand.reply(request, 1e9)
    assert await stand.reply(request, 1e9) == first
    assert (await stand.act(episode, seen(1), step=1)).step == 1


async def held_pass(stand: Stand) -> tuple[str, pb.ActRequest, "asyncio.Task[bytes]", Held]:
    """An episode whose first step is computed until `go` is set."""
    episode, held = stand.start(), Held()
    stand.loaded_versions.latest = held.loaded
    stand.batcher._work.note(1, 1.0)
    request = stand.asking(seen(0), episode_id=episode, want_value=True)
    caller = asyncio.create_task(stand.reply(request, 1e9))
    await asyncio.to_thread(held.begun.wait, 60)
    return episode, request, caller, held


async def test_an_act_repeated_during_its_computation_waits_for_it() -> None:
    stand = await ready()
    episode, request, first, held = await held_pass(stand)
    second = asyncio.create_task(stand.reply(request, 1e9))
    with refused(Reason.INVALID, "under way"):
        await stand.act(episode, seen(1))
    with refused(Reason.INVALID, "under way"):
        stand.end(episode, TERMINATED)
    held.go.set()
    assert await first is await second
    assert stand.end(episode, TERMINATED).length == 1


async def test_a_client_that_hung_up_gets_its_lost_reply() -> None:
    stand = await ready()
    episode, request, caller, held = await held_pass(stand)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    held.go.set()
    assert pb.ActReply.FromString(await stand.reply(request, 1e9)).step == 0
    assert stand.end(episode, TERMINATED).length == 1


async def test_a_refused_act_leaves_the_episode_unchanged() -> None:
    stand = await ready()
    episode = stand.start()
    await stand.act(episode, seen(0))
    wrong = stand.asking(seen(1), episode_id=episode, request_id="r", reward=5.0)
    wrong.observation[0].path = "camera"
    with refused(Reason.INVALID, "camera"):
        await stand.reply(wrong, 1e9)
    with refused(Reason.DEADLINE, "its turn"):
        late = stand.asking(seen(1), episode_id=episode, request_id="r", reward=5.0)
        await stand.reply(late, -1.0)
    assert (await stand.act(episode, seen(1), request_id="r", reward=1.0)).step == 1
    assert stand.end(episode, TERMINATED).total_return == 1.0


@pytest.mark.promise("repeated-call-gets-reply")
async def test_a_repeated_reward_counts_once() -> None:
    stand = await ready(reward_window_s=10.0)
    episode = stand.start()
    await stand.act(episode, seen(0))
    for _ in range(3):
        assert await stand.reward(episode, (0, 2.0), request_id="a") == 0
    await stand.reward(episode, (0, 2.0), request_id="b")
    assert stand.end(episode, TERMINATED).total_return == 4.0
    for _ in range(2):
        await stand.reward(episode, (0, 1.0), request_id="c")
    stand.now_s = 10.0
    stand.handler.sweep()
    (fragment,) = stand.fragments()
    assert fragment.arrays()["reward"].tolist() == [[5.0]]


async def test_a_repeated_end_gets_the_same_reply() -> None:
    stand = await ready()
    episode = stand.start()
    await stand.play(episode, 3)
    first = stand.end(episode, TERMINATED, reward=2.0, request_id="e")
    assert stand.end(episode, TERMINATED, reward=2.0, request_id="e") == first
    assert (first.length, first.total_return) == (3, 3.0)
    for request_id in ("f", ""):
        with refused(Reason.EPISODE_UNKNOWN, "has ended or was given up"):
            stand.end(episode, TERMINATED, request_id=request_id)
    assert len(stand.queue.episodes) == 1


async def test_a_step_out_of_turn_is_refused() -> None:
    stand = await ready()
    episode = stand.start()
    for step, request_id in enumerate("abc"):
        await stand.act(episode, seen(step), request_id=request_id, step=step)
    for wrong in (0, 2, 4, 2**63):
        with refused(Reason.INVALID, f"step={wrong}: the next step is 3"):
            await stand.act(episode, seen(3), step=wrong)
    for used in "ab":
        with refused(Reason.INVALID, "was used for an earlier step"):
            await stand.act(episode, seen(3), request_id=used)
    assert (await stand.act(episode, seen(3))).step == 3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"batch": 1}, "one observation at a time"),
        ({"version": 1}, "from its own arm"),
        ({"policy": "other"}, "here 'default' is served"),
        ({"request_id": "x" * 129}, "request_id of 129 characters: at most 128"),
        ({"reward": 1.0}, "there was no step before"),
        ({"taken_log_prob": float("nan"), "taken_action": [0]}, "taken_log_prob=nan: must be finite"),
        ({"taken_action": [3]}, "taken_action/: holds 3, outside Discrete"),
        ({"state": [pb.Part()]}, "no recurrent state"),
    ],
)
async def test_an_impossible_call_of_an_episode_is_refused(fields: dict[str, Any], match: str) -> None:
    stand = await ready()
    episode = stand.start()
    if "taken_action" in fields:
        action = parts_of(stand.specification.action_space, np.int64(fields["taken_action"][0]))
        fields = fields | {"taken_action": action}
    with refused(Reason.INVALID, match):
        await stand.act(episode, seen(0), **fields)
    (found,) = stand.episodes
    assert found.segment_builder.length == 0
    assert len(found.last_request) <= MAX_REQUEST_ID


@pytest.mark.parametrize("amount", [float("nan"), 1e39])
async def test_a_reward_that_is_no_number_is_refused(amount: float) -> None:
    stand = await ready()
    episode = stand.start()
    await stand.act(episode, seen(0))
    for call in (
        lambda: stand.act(episode, seen(1), reward=amount),
        lambda: stand.reward(episode, (0, 1.0), (0, amount)),
    ):
        with refused(Reason.INVALID, "must be finite as a 32-bit number"):
            await call()
    with refused(Reason.INVALID, "must be finite"):
        stand.end(episode, TERMINATED, reward=amount)
    assert stand.end(episode, TERMINATED).total_return == 0.0


@pytest.mark.parametrize(
    ("rewards", "match"),
    [
        ([], "0 in one call, send 1 to 1024"),
        ([(0, 1.0)] * 1025, "1025 in one call"),
        ([(0, 1.0), (2, 1.0)], r"rewards.step=2: the episode has 2 steps"),
    ],
)
async def test_rewards_of_no_step_are_refused(rewards: list[tuple[int, float]], match: str) -> None:
    stand = await ready()
    episode = stand.start()
    await stand.play(episode, 2)
    with refused(Reason.INVALID, match):
        await stand.reward(episode, *rewards)
    assert stand.end(episode, TERMINATED).total_return == 0.0


async def test_a_reward_before_any_step_is_refused() -> None:
    stand = await ready()
    with refused(Reason.INVALID, "no newest step is known"):
        await stand.reward(stand.start(), (None, 1.0))


async def test_a_reward_after_its_step_was_sent_is_refused_where_late_rewards_are_not_kept() -> None:
    stand = await ready()
    episode = stand.start()
    await stand.play(episode, 6)
    with refused(Reason.INVALID, "no registry whose feedback table keeps it"):
        await stand.reward(episode, (5, 1.0), (0, 1.0))
    stand.end(episode, TERMINATED)
    assert stand.fragments()[-1].arrays()["reward"].sum() == 4.0


@pytest.mark.parametrize(
    ("ending", "fields", "match"),
    [
        (pb.ENDING_UNSPECIFIED, {}, "say TERMINATED, TRUNCATED or ABANDONED"),
        (9, {}, "ending=9"),
        (TRUNCATED, {}, "final_observation: the value of a truncated episode depends on it"),
        (TERMINATED, {"final": seen(3)[:3]}, r"float32\(3,\) came, float32\(4,\) is wanted"),
    ],
)
async def test_an_invalid_end_of_an_episode_is_refused(
    ending: Any, fields: dict[str, Any], match: str
) -> None:
    stand = await ready()
    episode = stand.start()
    await stand.play(episode, 2)
    with refused(Reason.INVALID, match):
        stand.end(episode, ending, reward=7.0, **fields)
    assert stand.end(episode, TERMINATED).total_return == 0.0


async def test_an_episode_of_another_server_is_refused_as_elsewhere() -> None:
    stand, other = await ready(), await ready()
    foreign = other.start()
    for call in (stand.act(foreign, seen(0)), stand.reward(foreign, (0, 1.0))):
        with refused(Reason.EPISODE_ELSEWHERE, f"this is {stand.episodes.server}"):
            await call
    with refused(Reason.EPISODE_ELSEWHERE, "start a new one"):
        stand.end(foreign, TERMINATED)
    for unknown in ("x", f"{stand.episodes.server}-99-abc"):
        with refused(Reason.EPISODE_UNKNOWN, "."):
            await stand.act(unknown, seen(0))
        with refused(Reason.EPISODE_UNKNOWN, "."):
            stand.end(unknown, TERMINATED)
    with pytest.raises(Refused) as error:
        await stand.act("y" * 100_000, seen(0))
    assert len(error.value.refusal.detail) < 300


async def test_anothers_episode_is_unknown() -> None:
    stand = await ready()
    with called_by("ada"):
        episode = stand.start()
        await stand.act(episode, seen(0))
    for caller in (called_by("eve"), nullcontext()):
        with caller:
            for call in (stand.act(episode, seen(1)), stand.reward(episode, (0, 1.0))):
                with refused(Reason.EPISODE_UNKNOWN, "another client's"):
                    await call
            with refused(Reason.EPISODE_UNKNOWN, "another client's"):
                stand.end(episode, TERMINATED)
    with called_by("ada"):
        assert stand.end(episode, TERMINATED, request_id="e").length == 1
    with refused(Reason.EPISODE_UNKNOWN, "another client's"):
        stand.end(episode, TERMINATED, request_id="e")


async def test_an_episode_that_was_given_up_is_unknown_and_learned_from() -> None:
    stand = await ready(episode_timeout_s=60.0)
    kept, left = stand.start(), stand.start()
    await stand.play(left, 3)
    stand.now_s = 59.9
    await stand.act(kept, seen(0))
    stand.handler.sweep()
    assert len(stand.episodes) == 2
    stand.now_s = 60.0
    stand.handler.sweep()
    assert [episode.id for episode in stand.episodes] == [kept]
    with refused(Reason.EPISODE_UNKNOWN, "given up"):
        await stand.act(left, seen(0))
    with refused(Reason.EPISODE_UNKNOWN, "given up"):
        stand.end(left, TERMINATED)
    assert steps_seen(stand.fragments()) == [[0, 1, 2]]


async def test_an_episode_is_not_given_up_while_its_answer_is_computed() -> None:
    stand = await ready(episode_timeout_s=1.0)
    _, _, caller, held = await held_pass(stand)
    stand.now_s = 100.0
    stand.handler.sweep()
    assert len(stand.episodes) == 1
    held.go.set()
    await caller


async def test_memory_stays_limited_after_ten_thousand_abandoned_episodes() -> None:
    stand = await ready(episode_timeout_s=1.0)
    for round_ in range(100):
        stand.now_s = 10.0 * round_
        for number in range(100):
            episode = stand.start()
            if number % 10 == 0:
                await stand.act(episode, seen(0))
        stand.now_s += 5.0
        stand.handler.sweep()
    assert len(stand.episodes) == 0
    assert len(stand.episodes._over) == REMEMBERED_EPISODES
    assert len(stand.episodes._started) <= REMEMBERED_EPISODES
    assert sorted(stand.episodes._lanes) == list(range(100))
    assert stand.learning is not None
    assert stand.learning._buffered.used == 0
    assert stand.fragments() == []


async def test_at_most_max_episodes_are_open() -> None:
    stand = await ready(max_episodes=3)
    first, *_ = [stand.start(request_id=name) for name in "abc"]
    with refused(Reason.OVERLOADED, r"episodes: callers have 3 of 3 \(serving.max_episodes\); end some"):
        stand.start()
    assert stand.start(request_id="a") == first
    stand.end(first, TERMINATED)
    assert stand.start()


async def test_a_caller_at_its_limit_leaves_room_for_others() -> None:
    stand = await ready(max_episodes=2 * REMEMBERED_EPISODES)
    with called_by("eve"):
        opened = [stand.start() for _ in range(REMEMBERED_EPISODES)]
        with refused(Reason.OVERLOADED, "this caller has 4096, .* the others leave free of 8192"):
            stand.start()
    with called_by("ada"):
        first = stand.start(request_id="a")
        stand.end(first, TERMINATED)
    with called_by("eve"):
        for episode in opened:
            stand.end(episode, TERMINATED)
    with called_by("ada"):
        assert stand.start(request_id="a") == first
    assert len(stand.episodes._over) == REMEMBERED_EPISODES


async def test_a_caller_with_few_remembered_episodes_keeps_them() -> None:
    stand = await ready(max_episodes=2 * REMEMBERED_EPISODES)
    with called_by("ada"):
        first = stand.start(request_id="a")
        stand.end(first, TERMINATED)
    for name, count in (("eve", REMEMBERED_EPISODES - 500), ("bob", 499), ("cyd", 5)):
        with called_by(name):
            for _ in range(count):
                stand.end(stand.start(), TERMINATED)
    with called_by("ada"):
        assert stand.start(request_id="a") == first
    assert len(stand.episodes._over) == REMEMBERED_EPISODES


@pytest.mark.parametrize(
    "fields", [{"client_key": "x" * 257}, {"request_id": "x" * 129}, {"policy": "other"}]
)
async def test_a_start_that_would_fill_the_memory_is_refused(fields: dict[str, Any]) -> None:
    stand = await ready()
    with refused(Reason.INVALID, "."):
        stand.start(**fields)
    assert len(stand.episodes) == 0


async def test_open_episodes_have_different_lanes() -> None:
    stand = await ready()
    random, open_ = np.random.default_rng(0), [stand.start()]
    for _ in range(300):
        if random.random() < 0.5 or not open_:
            open_.append(stand.start())
        else:
            stand.end(open_.pop(int(random.integers(len(open_)))), ABANDONED)
        lanes = [episode.lane for episode in stand.episodes]
        assert len(set(lanes)) == len(lanes)


def arms(*, pinned: tuple[int, ...], **fields: Any) -> Arms:
    traffic = Traffic(policy="default", **{name: fields.pop(name) for name in ("pins",) if name in fields})
    return Arms(**({"traffic": traffic, "active": None, "canary": None} | fields), pinned=frozenset(pinned))


async def test_a_client_that_is_tied_to_a_version_plays_its_episodes_with_it() -> None:
    stand = await ready()
    stand.keep(2)
    stand.keep(3)
    await stand.loaded_versions.steer(arms(active=3, pinned=(2, 3), pins={"ada": 2}))
    replies = [await stand.act(stand.start("ada"), seen(0)) for _ in range(2)]
    assert [(reply.version, reply.arm) for reply in replies] == [(2, pb.ARM_PINNED)] * 2
    reply, _ = await stand.answer(stand.asking(seen(0), client_key="ada"), 1e9)
    assert (reply.version, reply.arm) == (2, pb.ARM_PINNED)
    assert (await stand.act(stand.start("bob"), seen(0))).version == 3


async def test_only_clients_on_the_learners_newest_version_are_learned_from() -> None:
    stand = await ready()
    stand.keep(2)
    await stand.loaded_versions.steer(arms(active=2, pinned=(2,)))
    reply = stand.handler.start(pb.StartEpisodeRequest(client_key="ada"))
    assert (reply.arm, reply.learned) == (pb.ARM_ACTIVE, False)
    await stand.play(reply.episode_id, 6)
    assert stand.end(reply.episode_id, TERMINATED).length == 6
    assert stand.fragments() == []


@pytest.mark.parametrize("value", [-1.0, 1.0])
async def test_a_fixed_fallback_on_the_bounds_answers_an_episode_too(value: float) -> None:
    force = Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    made = specification(action=force, continuous="squashed")
    stand = await ready(made, fallback="fixed", fallback_action=[value, value])
    episode = stand.start()
    await stand.publish(2, policy=broken(policy_of(made, 2)))
    reply = await stand.act(episode, seen(0))
    assert reply.fallback == pb.FALLBACK_FIXED
    assert np.frombuffer(reply.action[0].value.data, np.float32).tolist() == [value, value]
    await stand.publish(3)
    await stand.act(episode, seen(1))
    stand.end(episode, TERMINATED, final=seen(2))
    found = stand.fragments()
    assert [valid for fragment in found for (valid,) in fragment.arrays()["valid"].tolist()] == [False, True]
    assert steps_seen(found) == [[0, 1], [1, 2]]


async def test_an_action_beyond_the_bounds_is_refused_for_a_squashed_policy() -> None:
    force = Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    stand = await ready(specification(action=force, continuous="squashed"))
    episode = stand.start()
    taken = parts_of(force, np.array([1.0, 0.0], np.float32))
    with refused(Reason.INVALID, "taken_action: .*inside its bounds"):
        await stand.act(episode, seen(0), taken_action=taken)
    assert (await stand.act(episode, seen(0))).step == 0


def _taken(stand: Stand, action: int = 1) -> list[pb.Part]:
    return parts_of(stand.specification.action_space, np.int64(action))


async def test_a_step_is_of_the_version_that_drew_its_action() -> None:
    stand = await ready()
    await stand.publish(2)
    episode = stand.start()
    await stand.act(episode, seen(0), taken_action=_taken(stand), taken_log_prob=-0.5, taken_version=1)
    await stand.act(episode, seen(1), taken_action=_taken(stand), taken_log_prob=-0.5)
    stand.end(episode, TERMINATED)
    spans = [(one.version, one.update) for fragment in stand.fragments() for one in fragment.header.weights]
    assert spans == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("fields", "reason", "match"),
    [
        ({"taken_version": 1}, Reason.INVALID, "taken_version=1: give taken_action"),
        ({"taken_version": 9, "taken_action": True}, Reason.UNKNOWN_VERSION, "9"),
    ],
)
async def test_a_version_that_sampled_nothing_in_this_episode_is_refused(
    fields: dict[str, Any], reason: Reason, match: str
) -> None:
    stand = await ready()
    episode = stand.start()
    action = {"taken_action": _taken(stand)} if "taken_action" in fields else {}
    with refused(reason, match):
        await stand.act(episode, seen(0), **(fields | action))
    assert (await stand.act(episode, seen(0), **action)).step == 0


POLICIES: dict[str, dict[str, Any]] = {
    "lstm": {"recurrent": "lstm", "recurrent_size": 5},
    "gru behind a stack": {"recurrent": "gru", "recurrent_size": 5, "shared_trunk": True, "frame_stack": 3},
    "stack": {"frame_stack": 3},
    "nothing": {},
}


def made(section: dict[str, Any], *, masked: bool = False, unroll: int = 4) -> RunSpecification:
    plain = specification(unroll=unroll, **section)
    spaces = (plain.observation_space, plain.action_space)
    masks = mask_rules(spaces[1]) if masked else ()
    state = state_rules(policy_of(plain, 0).state_space)
    schema = fragment_schema(*spaces, (*masks, *state))
    return RunSpecification(**{name: getattr(plain, name) for name in plain.__slots__} | {"schema": schema})


def log_probs(policy: Policy, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        parameters = policy.outputs(see(policy, batch).inputs).parameters[: batch.valid.numel()]
        found = policy.joint_log_prob(parameters, {"action": batch.action["action"].flatten()})
    return found.view_as(batch.log_prob)


def mask_parts(stand: Stand, allowed: list[bool]) -> list[pb.Part]:
    return parts_of(stand.specification.action_space, np.array(allowed))


@pytest.mark.parametrize("section", POLICIES.values(), ids=POLICIES)
async def test_the_learner_recomputes_the_probabilities_of_served_actions(section: dict[str, Any]) -> None:
    stand = await ready(made(section, masked=True))
    episodes = [stand.start("ada"), stand.start("bob")]
    for step in range(10):
        for number, episode in enumerate(episodes):
            mask = {"action_mask": mask_parts(stand, [True, step % 4 == 0, True])} if step % 2 else {}
            await stand.act(episode, seen(step, number), **mask)
    for number, episode in enumerate(episodes):
        stand.end(episode, pb.ENDING_TRUNCATED, final=seen(10, number))
    fragments = stand.fragments()
    assert len(fragments) == 6
    assert all(all(column(fragment, "valid")) for fragment in fragments)
    batch = batch_of(fragments)
    expected = log_probs(policy_of(stand.specification, 1), batch)
    torch.testing.assert_close(expected[batch.valid], batch.log_prob[batch.valid], rtol=1e-4, atol=1e-4)
    masks = np.concatenate([fragment.arrays()["mask/action"][:-1, 0] for fragment in fragments])
    assert (~masks[:, 1]).sum() == 2 * 5


async def test_a_step_under_a_mask_is_learned_from_where_the_run_has_masks() -> None:
    stand = await ready(made({}, masked=True))
    episode = stand.start()
    taken = parts_of(stand.specification.action_space, np.int64(1))
    with pytest.raises(Refused) as error:
        await stand.act(
            episode, seen(0), taken_action=taken, action_mask=mask_parts(stand, [True, False, True])
        )
    assert reason_of(error.value) is Reason.INVALID
    assert "action_mask forbids" in error.value.refusal.detail
    await stand.act(episode, seen(0), action_mask=mask_parts(stand, [False, False, True]))
    stand.end(episode, pb.ENDING_TERMINATED, final=seen(1))
    (fragment,) = stand.fragments()
    assert column(fragment, "valid") == [True]
    assert column(fragment, "action") == [2]
    assert column(fragment, "log_prob") == [0.0]
    assert fragment.arrays()["mask/action"][:, 0].tolist() == [[False, False, True], [True, True, True]]


@pytest.mark.parametrize("section", [POLICIES["lstm"], POLICIES["stack"]], ids=["lstm", "stack"])
async def test_a_client_that_keeps_the_state_gets_an_episodes_answers(section: dict[str, Any]) -> None:
    stand = await ready(made(section))
    episode, state = stand.start(), list[pb.Part]()
    wishes = {"deterministic": True, "want_value": True}
    for step in range(6):
        held = await stand.act(episode, seen(step), **wishes)
        reply, _ = await stand.answer(stand.asking(seen(step), state=state, **wishes), FAR)
        assert not held.state
        np.testing.assert_allclose(reply.value, held.value, rtol=1e-5)
        assert [part.value.data for part in reply.action] == [part.value.data for part in held.action]
        # Through the client's own hands.
        state = to_plain_parts(from_plain_parts("state", reply.state))
    fresh, _ = await stand.answer(stand.asking(seen(5), **wishes), FAR)
    assert not np.allclose(fresh.value, reply.value, rtol=1e-3)


async def test_the_state_of_a_batch_has_one_row_each() -> None:
    stand = await ready(made(POLICIES["lstm"]))
    rows = [pb.Part(value=to_tensor(np.zeros((3, 4), np.float32)))]
    reply, _ = await stand.answer(pb.ActRequest(observation=rows, batch=3), FAR)
    shapes = {part.path: tuple(part.value.shape) for part in reply.state}
    assert shapes == {"actor/h": (3, 5), "actor/c": (3, 5), "critic/h": (3, 5), "critic/c": (3, 5)}


@pytest.mark.parametrize(
    ("parts", "with_episode", "said"),
    [
        ({"actor/h": np.zeros(5, np.float32)}, False, "state: 1 parts, the space has 'actor/h'"),
        ({"actor/h": np.zeros(4, np.float32)}, False, "float32(4,) came, float32(5,) is wanted"),
        ({"actor/h": np.full(5, np.nan, np.float32)}, False, "NaN or infinity"),
        ({"actor/h": np.zeros(5, np.float32)}, True, "the episode keeps it here"),
    ],
)
async def test_state_that_is_not_the_policys_is_refused(
    parts: dict[str, Any], with_episode: bool, said: str
) -> None:
    stand = await ready(made(POLICIES["lstm"]))
    names = ["actor/h"] if "has" in said else ["actor/h", "actor/c", "critic/h", "critic/c"]
    whole = dict.fromkeys(names, parts["actor/h"])
    fields = {"episode_id": stand.start()} if with_episode else {}
    request = stand.asking(seen(0), state=to_plain_parts(whole), **fields)
    asked = stand.reply(request, FAR) if with_episode else stand.answer(request, FAR)
    with pytest.raises(Refused) as error:
        await asked
    assert said in error.value.refusal.detail
