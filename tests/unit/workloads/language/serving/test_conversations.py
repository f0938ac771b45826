"""Conversations of clients: exact ids, what is learned from and what is not, repeats, rewards, the end."""

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.actor.serving.episodes import REMEMBERED_EPISODES, CallerShares
from penstock.protocol.fragment import Fragment, check, read_payload
from penstock.protocol.refusal import Reason, Refused
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.text_request import TextReply, TextRequest
from tests.support.language.text_stand import (
    EOS,
    TOKENIZER,
    TextStand,
    adapter,
    answers_by_heart,
    tool,
    user,
)


def read(fragment: Fragment) -> dict[str, Any]:
    """Its tensors, by name."""
    return read_payload(fragment.header, fragment.payload)


def unlearned(reason: str) -> float:
    """Tokens that were answered and are not learned from, for this reason."""
    return float(metrics.NOT_LEARNED_STEPS.labels(reason)._value.get())


async def talk(stand: TextStand, conversation: str, **fields: Any) -> tuple[list[Message], list[TextReply]]:
    """The whole dialogue: two calls of tools, then the answer."""
    messages, replies = [user()], list[TextReply]()
    for said in ("3", "sea", None):
        replies.append(await stand.say(conversation, *messages, **fields))
        answer = replies[-1].answers[0].message
        messages.append(answer)
        if said is not None:
            messages.append(tool(said, answer.tool_calls[0]))
    return messages, replies


@pytest.mark.promise("served-conversation-gives-learner")
async def test_a_dialogue_with_tools_is_one_column_of_the_ids_that_were_sampled(stand: TextStand) -> None:
    conversation = stand.start()
    _, replies = await talk(stand, conversation)
    assert [one.answers[0].finish for one in replies] == ["tool_calls", "tool_calls", "stop"]
    assert [(one.turn, one.version, one.unlearned) for one in replies] == [(0, 1, ""), (1, 1, ""), (2, 1, "")]
    assert replies[0].answers[0].message.tool_calls[0].name == "add"
    assert await stand.conversations.reward(conversation, "r-1", [(0, 0.5)]) == 0
    total, turns = stand.conversations.end(conversation, "e-1", terminated=True, abandoned=False, reward=1.0)
    assert (total, turns) == (1.5, 3)
    (fragment,) = stand.fragments()
    check(fragment, stand.specification.schema, "text")
    tensors = read(fragment)
    sampled = [token for one in replies for token in one.answers[0].ids]
    valid = tensors["valid"][:, 0]
    assert tensors["action"][valid, 0].tolist() == sampled
    expected = [number for one in replies for number in one.answers[0].log_prob]
    assert tensors["log_prob"][valid, 0].tolist() == pytest.approx(expected)
    assert tensors["reward"].sum() == pytest.approx(1.5)
    assert tensors["terminated"].sum() == 1
    assert not tensors["truncated"].any()
    assert [(one.version, one.update) for one in fragment.header.weights] == [(1, 0)]
    text = TOKENIZER.decode(np.append(tensors["observation"][:, 0], EOS))
    assert answers_by_heart()[1] in text


@pytest.mark.promise("served-conversation-gives-learner")
async def test_the_same_messages_once_more_get_the_same_answer(stand: TextStand) -> None:
    conversation = stand.start()
    first = await stand.say(conversation, user())
    assert await stand.say(conversation, user(), request_id="again") is first
    second = await stand.say(conversation, user(), regenerate=True)
    assert second is not first
    assert second.turn == first.turn == 0
    before = unlearned("sibling")
    chosen = second.answers[0].message
    await stand.say(conversation, user(), chosen, tool("3", chosen.tool_calls[0]))
    assert unlearned("sibling") - before == len(first.answers[0].ids)


@pytest.mark.promise("served-conversation-gives-learner")
async def test_of_siblings_the_one_that_the_history_continues_is_learned_from(stand: TextStand) -> None:
    conversation = stand.start()
    reply = await stand.say(conversation, user(), count=3)
    assert len(reply.answers) == 3
    kept = reply.answers[2]
    before = unlearned("sibling")
    await stand.say(conversation, user(), kept.message, tool("3", kept.message.tool_calls[0]))
    assert unlearned("sibling") - before == sum(len(one.ids) for one in reply.answers[:2])
    stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=0.0)
    (fragment,) = stand.fragments()
    valid = read(fragment)["valid"][:, 0]
    assert tuple(read(fragment)["action"][valid, 0][: len(kept.ids)]) == kept.ids


async def test_what_a_person_thinks_is_the_newest_thing_that_they_said_unasked(stand: TextStand) -> None:
    program = stand.conversations.start("", "program")
    assert program.opinion is None
    episode = stand.conversations.start("", "person", opinions=True)
    conversation, opinion = episode.id, episode.opinion
    assert opinion is not None
    await talk(stand, conversation)
    assert (opinion.turns, opinion.newest, opinion.counts) == (3, None, True)
    for request, turn, amount, asked in (("a", 0, 1.0, False), ("b", 1, -2.0, False), ("c", 2, 3.0, True)):
        await stand.conversations.reward(conversation, request, [(turn, amount)], asked=asked)
    await stand.conversations.reward(conversation, "b", [(1, 9.0)])
    assert (opinion.newest, opinion.asked, opinion.likes) == (-2.0, {2}, False)
    assert episode.total_return == 2.0


@pytest.mark.promise("sampled-policy-answered-learned")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0.5}, "sampling"),
        ({"temperature": 0.0}, "sampling"),
        ({"top_p": 0.9}, "sampling"),
        ({"seed": 7}, "sampling"),
        ({"logit_bias": {9: 1.0}}, "sampling"),
        ({"presence_penalty": 0.5}, "sampling"),
        ({"frequency_penalty": 0.5}, "sampling"),
        ({"begins_with": "<tool_call>"}, "sampling"),
        ({"not_learned": True}, "unasked"),
    ],
)
async def test_what_is_not_sampled_from_the_policy_is_answered_and_not_learned_from(
    stand: TextStand, fields: dict[str, Any], reason: str
) -> None:
    conversation = stand.start()
    before = unlearned(reason)
    reply = await stand.say(conversation, user(), **fields)
    answer = reply.answers[0]
    assert reply.unlearned == reason
    said = [user(), answer.message, Message("user", "sum")]
    after = await stand.say(conversation, *said)
    assert (after.unlearned, after.turn) == ("", 1)
    stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=1.0)
    assert unlearned(reason) - before == len(answer.ids)
    (fragment,) = stand.fragments()
    valid = read(fragment)["valid"][:, 0]
    assert tuple(read(fragment)["action"][valid, 0]) == after.answers[0].ids


async def test_without_a_conversation_nothing_is_learned(stand: TextStand) -> None:
    before = unlearned("unasked")
    reply = await stand.conversations.generate(TextRequest(messages=(user(),), temperature=0.0), 1e9)
    assert (reply.version, reply.unlearned) == (1, "no conversation")
    assert unlearned("unasked") - before == len(reply.answers[0].ids)
    assert stand.fragments() == []


async def test_an_edited_history_ends_the_column_truncated(stand: TextStand) -> None:
    conversation = stand.start()
    first = await stand.say(conversation, user())
    edited = [user(), Message("assistant", "other"), Message("user", "sum")]
    await stand.say(conversation, *edited)
    (fragment,) = stand.fragments()
    assert read(fragment)["truncated"].sum() == 1
    valid = read(fragment)["valid"][:, 0]
    assert tuple(read(fragment)["action"][valid, 0]) == first.answers[0].ids


async def test_a_stop_or_a_most_of_tokens_truncates(stand: TextStand) -> None:
    ways: tuple[dict[str, Any], ...] = ({"stop": ("</tool_call>",)}, {"max_tokens": 1})
    for number, fields in enumerate(ways):
        conversation = stand.start(f"c-{number}")
        reply = await stand.say(conversation, user(), **fields)
        assert reply.answers[0].ids[-1] != EOS
        assert "</tool_call>" not in reply.answers[0].message.content
        stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=1.0)
        (fragment,) = stand.fragments()
        assert read(fragment)["truncated"].sum() == 1
        assert not read(fragment)["terminated"].any()


@pytest.mark.promise("sampled-policy-answered-learned")
async def test_a_client_that_goes_away_costs_what_was_not_rewarded(stand: TextStand) -> None:
    conversation = stand.start()
    first = await stand.say(conversation, user())
    answer = first.answers[0].message
    await stand.conversations.reward(conversation, "r", [(0, 1.0)])
    second = await stand.say(conversation, user(), answer, tool("3", answer.tool_calls[0]))
    silent = stand.start("other")
    third = await stand.say(silent, user())
    before = unlearned("abandoned")
    stand.now_s = stand.section.episode_timeout_s + 1
    stand.conversations.sweep()
    lost = len(second.answers[0].ids) + len(third.answers[0].ids)
    assert unlearned("abandoned") - before == lost
    (fragment,) = stand.fragments()
    assert read(fragment)["valid"].sum() == len(first.answers[0].ids)
    with pytest.raises(Refused, match="it has ended or was given up"):
        await stand.say(conversation, user())


async def test_a_reward_counts_once_and_late_ones_go_to_the_feedback_table(stand: TextStand) -> None:
    kept: list[Any] = []

    async def keep(caller: str, rewards: Any) -> None:
        kept.append((caller, list(rewards)))

    stand.conversations._feedback = keep
    conversation = stand.start()
    await stand.say(conversation, user())
    for _ in range(2):
        assert await stand.conversations.reward(conversation, "r-1", [(None, 0.25)]) == 0
    with pytest.raises(Refused, match="turn=1: the conversation has 1 so far"):
        await stand.conversations.reward(conversation, "r-2", [(1, 1.0)])
    with pytest.raises(Refused, match="reward=nan: must be finite"):
        await stand.conversations.reward(conversation, "r-2", [(0, float("nan"))])
    total, _ = stand.conversations.end(conversation, "e", terminated=True, abandoned=False, reward=None)
    assert total == 0.25
    for _ in range(2):
        assert await stand.conversations.reward(conversation, "r-3", [(0, 1.0)]) == 1
    assert kept == [("", [(conversation, 0, 1.0)])]
    (fragment,) = stand.fragments()
    assert read(fragment)["reward"].sum() == pytest.approx(0.25)


async def test_in_the_window_a_reward_reaches_a_column_that_is_over(stand: TextStand) -> None:
    stand.section = stand.conversations._section = stand.section.model_copy(update={"reward_window_s": 5.0})
    conversation = stand.start()
    await stand.say(conversation, user())
    stand.conversations.end(conversation, "e", terminated=True, abandoned=False, reward=None)
    assert stand.fragments() == []
    stand.now_s = 4.0
    stand.conversations.sweep()
    assert await stand.conversations.reward(conversation, "r", [(0, 2.0)]) == 0
    stand.now_s = 6.0
    stand.conversations.sweep()
    (fragment,) = stand.fragments()
    assert read(fragment)["reward"].sum() == pytest.approx(2.0)
    assert not stand.conversations._talks


@pytest.mark.promise("version-language-model-cannot")
async def test_a_version_that_gives_no_numbers_is_stood_in_for_by_the_model_without_its_adapter(
    stand: TextStand,
) -> None:
    alone = await stand.conversations.generate(
        TextRequest(messages=(user(),), temperature=0.0, tools=()), 1e9
    )
    await stand.publish(2, adapter(stand.base, 2, size=float("inf")))
    conversation = stand.start()
    reply = await stand.say(conversation, user(), tools=(), temperature=0.0)
    assert (reply.is_fallback, reply.version, reply.unlearned) == (True, 0, "sampling")
    assert reply.answers[0].ids == alone.answers[0].ids
    sampled = await stand.say(conversation, user(), tools=())
    assert (sampled.is_fallback, sampled.unlearned) == (True, "fallback")


async def test_before_the_first_weights_the_model_itself_answers(dialogue: Any, stand: TextStand) -> None:
    stand.versions.latest = None
    reply = await stand.say("", user())
    assert (reply.is_fallback, reply.version) == (True, 0)
    stand.conversations._answerer.section = stand.section.model_copy(update={"fallback": "none"})
    with pytest.raises(Refused) as refused:
        await stand.say("", user())
    assert refused.value.refusal.reason is Reason.NOT_READY


async def test_versions_that_answer_no_request_are_released(stand: TextStand) -> None:
    conversation = stand.start()
    first = await stand.say(conversation, user())
    await stand.publish(2)
    assert stand.engine.versions == [2]
    answer = first.answers[0].message
    second = await stand.say(conversation, user(), answer, tool("3", answer.tool_calls[0]))
    assert (first.version, second.version) == (1, 2)
    pinned = await stand.say("", user(), version=1)
    assert (pinned.version, pinned.arm) == (1, Arm.PINNED)
    stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=0.0)
    (fragment,) = stand.fragments()
    assert [(one.version, one.update) for one in fragment.header.weights] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": ()}, "messages: give at least one"),
        ({"temperature": -1.0}, "temperature=-1: say 0 to 100"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 5e-324}, "temperature=4.94066e-324: say 0, or 0.001 to 100"),
        ({"top_p": 0.0}, "top_p=0: say 1e-06 to 1"),
        ({"top_p": 5e-324}, "top_p=4.94066e-324: say 1e-06 to 1"),
        ({"count": 17}, "count=17: ask for 1 to 16"),
        ({"stop": ("",)}, "stop: give at most 16 texts"),
        ({"logit_bias": {999: 1.0}}, "logit_bias=999: the vocabulary has the token ids 0 to"),
        ({"messages": (Message("user", "sum <eos>"),)}, "holds '<eos>', which is a control token"),
        ({"messages": (Message("user", "sum " * 70),)}, "do not fit into 64; send fewer messages"),
        ({"messages": (Message("user", "x" * 5000),)}, "have 5[0-9]* bytes, at most 4096 are read"),
        ({"max_tokens": 63}, "tokens and an answer of up to 63 do not fit into 64"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_its_field(
    stand: TextStand, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message) as refused:
        await stand.say("", **({"messages": (user(),), "tools": ()} | fields))
    assert refused.value.refusal.reason is Reason.INVALID
    assert (await stand.say("", user())).answers


async def test_an_arm_without_a_version_and_an_unknown_version_are_refused(stand: TextStand) -> None:
    for fields in ({"arm": Arm.CANARY}, {"version": 99}):
        with pytest.raises(Refused) as refused:
            await stand.say("", user(), **fields)
        assert refused.value.refusal.reason is Reason.UNKNOWN_VERSION
    with pytest.raises(Refused) as refused:
        await stand.say("made-up", user())
    assert refused.value.refusal.reason is Reason.EPISODE_UNKNOWN
    with pytest.raises(Refused, match="has begun no conversation"):
        stand.start("never", must_exist=True)


async def test_the_same_name_is_the_same_conversation(stand: TextStand) -> None:
    assert stand.start("mine") == stand.start("mine") == stand.start("mine", must_exist=True)
    assert stand.start() != stand.start()


async def test_rewards_of_a_conversation_that_is_over_are_for_turns_that_it_had(dialogue: Any) -> None:
    kept: list[Any] = []

    async def keep(caller: str, rewards: Any) -> None:
        kept.extend(rewards)

    stand = TextStand(dialogue, feedback=keep, reward_window_s=0.0)
    conversation = stand.start()
    stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=None)
    with pytest.raises(Refused, match=r"rewards\.turn: absent, and no newest turn is known"):
        await stand.conversations.reward(conversation, "r", [(None, 1.0)])
    with pytest.raises(Refused, match=r"rewards\.turn=0: the conversation has 0 turns"):
        await stand.conversations.reward(conversation, "r", [(0, 1.0)])
    for _ in range(REMEMBERED_EPISODES):
        stand.conversations.end(stand.start(), "", terminated=True, abandoned=False, reward=None)
    for turn in (1024, 2**53, 2**63, 2**64 - 1):
        with pytest.raises(Refused, match=rf"rewards\.turn={turn}: no conversation has more than 1024"):
            await stand.conversations.reward(conversation, "r", [(turn, 1.0)])
    assert not kept
    assert await stand.conversations.reward(conversation, "r", [(1023, 1.0)]) == 1
    assert kept == [(conversation, 1023, 1.0)]


async def test_what_conversations_hold_is_counted_and_bounded(dialogue: Any, stand: TextStand) -> None:
    held = stand.conversations._held
    conversation = stand.start()
    await stand.say(conversation, user())
    first = held.used
    assert first > 1000
    await stand.say(conversation, user(), regenerate=True)
    assert held.used > first
    stand.section = stand.section.model_copy(update={"reward_window_s": 5.0})
    stand.conversations._section = stand.section
    stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=1.0)
    assert 0 < held.used < first
    stand.now_s = 6.0
    stand.conversations.sweep()
    assert held.used == 0
    full = TextStand(dialogue, max_buffered_bytes=500)
    with pytest.raises(Refused, match=r"serving\.max_buffered_bytes") as refused:
        await full.say(full.start(), user())
    assert refused.value.refusal.reason is Reason.INVALID


async def test_answers_that_grow_beside_one_another_do_not_share_the_same_room(
    dialogue: Any, stand: TextStand
) -> None:
    held = CallerShares(40_000)
    stand.conversations._held = held
    asks = (stand.say(stand.start(), user(), count=8, max_tokens=8) for _ in range(6))
    answered = await asyncio.gather(*asks, return_exceptions=True)
    refused = [one for one in answered if isinstance(one, Refused)]
    assert {one.refusal.reason for one in refused} == {Reason.OVERLOADED}
    assert len(refused) == 5
    assert held.used == sum(talk.counted_bytes for talk in stand.conversations._talks.values())


async def test_who_keeps_late_rewards_coming_holds_no_other_up(stand: TextStand) -> None:
    stand.section = stand.conversations._section = stand.section.model_copy(update={"reward_window_s": 5.0})
    first, second = stand.start(), stand.start()
    for conversation in (first, second):
        await stand.say(conversation, user())
        stand.conversations.end(conversation, "e", terminated=True, abandoned=False, reward=1.0)
    keeping = stand.conversations._talks[first]
    keeping.is_keeping = True
    stand.now_s = 6.0
    stand.conversations.sweep()
    assert list(stand.conversations._talks) == [first]
    keeping.is_keeping = False
    stand.conversations.sweep()
    assert not stand.conversations._talks
    assert len(stand.fragments()) == 2


async def test_a_turn_has_so_many_answers(stand: TextStand) -> None:
    conversation = stand.start()
    asked: dict[str, Any] = {"count": 16, "max_tokens": 1, "regenerate": True}
    for _ in range(4):
        await stand.say(conversation, user(), **asked)
    with pytest.raises(Refused, match="regenerate: 64 answers to these messages"):
        await stand.say(conversation, user(), **asked)
    assert (await stand.say(conversation, user("other"))).turn == 1
