import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.actor.serving.episodes import REMEMBERED_EPISODES, CallerShares
from penstock.protocol.fragment import Fragment, check, read_payload
from penstock.protocol.refusal import Reason, Refused
from penstock.registry.routing import Arm
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.conversations import REASONS
from penstock.workloads.language.serving.text_request import TextReply, TextRequest
from tests.support.language.text_stand import (
    EOS,
    FAR,
    TOKENIZER,
    TOOLS,
    TextStand,
    adapter,
    answers_by_heart,
    plain_log_prob,
    running,
    tool,
    trained_tokens,
    unlearned,
    user,
)


def read(fragment: Fragment) -> dict[str, Any]:
    return read_payload(fragment.header, fragment.payload)


async def talk(stand: TextStand, conversation: str, **fields: Any) -> tuple[list[Message], list[TextReply]]:
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
    assert stand.end(conversation) == (1.5, 3)
    (fragment,) = stand.fragments()
    check(fragment, stand.specification.schema, "text")
    tensors = read(fragment)
    valid = tensors["valid"][:, 0]
    assert trained_tokens(fragment) == tuple(token for one in replies for token in one.answers[0].ids)
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
async def test_of_several_answers_the_continued_one_is_learned_from(stand: TextStand) -> None:
    conversation = stand.start()
    reply = await stand.say(conversation, user(), count=3)
    assert len(reply.answers) == 3
    kept = reply.answers[2]
    before = unlearned("sibling")
    await stand.say(conversation, user(), kept.message, tool("3", kept.message.tool_calls[0]))
    assert unlearned("sibling") - before == sum(len(one.ids) for one in reply.answers[:2])
    stand.end(conversation, 0.0)
    (fragment,) = stand.fragments()
    assert trained_tokens(fragment)[: len(kept.ids)] == kept.ids


async def test_a_reward_is_for_the_newest_answer_to_the_same_messages(stand: TextStand) -> None:
    conversation, before = stand.start(), unlearned("sibling")
    first = await stand.say(conversation, user())
    second = await stand.say(conversation, user(), regenerate=True, max_tokens=2)
    assert second.answers[0].ids != first.answers[0].ids
    await stand.conversations.reward(conversation, "r", [(None, 1.0)])
    assert unlearned("sibling") - before == len(first.answers[0].ids)
    after = await stand.say(conversation, user(), second.answers[0].message, user("other"))
    assert (after.turn, after.cut) == (1, "")
    stand.end(conversation)
    (fragment,) = stand.fragments()
    assert trained_tokens(fragment)[:2] == second.answers[0].ids


async def test_of_several_answers_the_reward_says_which(stand: TextStand) -> None:
    conversation = stand.start()
    await stand.say(conversation, user())
    several = await stand.say(conversation, user(), regenerate=True, count=3, max_tokens=2)
    reward = stand.conversations.reward
    for turn in (None, 0):
        with pytest.raises(Refused, match="choice: the turn has 3 answers; say which one, from 0"):
            await reward(conversation, "r", [(turn, 1.0)])
    with pytest.raises(Refused, match="choice=3: the turn has 3 answers"):
        await reward(conversation, "r", [(None, 1.0)], choice=3)
    assert await reward(conversation, "r", [(None, 1.0)], choice=1) == 0
    assert await reward(conversation, "s", [(0, 0.5)], choice=1) == 0
    assert await reward(conversation, "t", [(0, 0.25)]) == 0
    with pytest.raises(Refused, match="choice=2: answer 1 of turn 0 was kept"):
        await reward(conversation, "u", [(0, 1.0)], choice=2)
    assert stand.end(conversation, None) == (1.75, 1)
    (fragment,) = stand.fragments()
    assert trained_tokens(fragment) == several.answers[1].ids


async def test_a_reward_for_an_earlier_turn_chooses_none_of_the_newest_answers(stand: TextStand) -> None:
    conversation = stand.start()
    first = (await stand.say(conversation, user())).answers[0].message
    history = (user(), first, tool("3", first.tool_calls[0]))
    several = await stand.say(conversation, *history, count=2)
    assert await stand.conversations.reward(conversation, "r", [(0, 1.0)]) == 0
    kept = several.answers[1].message
    await stand.say(conversation, *history, kept, tool("sea", kept.tool_calls[0]))
    stand.end(conversation)
    (fragment,) = stand.fragments()
    assert len(fragment.header.weights) == 1


async def test_the_reply_says_where_a_column_was_cut(stand: TextStand) -> None:
    conversation = stand.start()
    answer = await stand.say(conversation, user())
    assert answer.cut == ""
    said = answer.answers[0].message
    (call,) = said.tool_calls
    anew = replace(call, arguments=call.arguments.replace(":", " : ").replace("1", "1.0"))
    assert anew.arguments != call.arguments
    written = replace(said, content=f"{said.content}\n", tool_calls=(anew,))
    goes_on = await stand.say(conversation, user(), written, tool("3", call))
    assert (goes_on.turn, goes_on.cut) == (1, "")
    other = replace(call, arguments=call.arguments.replace("1", "true"))
    edited = await stand.say(conversation, user(), replace(said, tool_calls=(other,)), tool("3", call))
    assert (edited.turn, edited.cut) == (2, "history")


async def test_a_conversation_without_any_reward_is_not_learned_from(stand: TextStand) -> None:
    before = unlearned("unrewarded")
    for number, reward in enumerate((None, 0.0)):
        conversation = stand.start(f"c-{number}")
        answer = await stand.say(conversation, user())
        stand.end(conversation, reward)
        assert len(stand.fragments()) == (reward is not None)
        assert unlearned("unrewarded") - before == len(answer.answers[0].ids)
        before = unlearned("unrewarded") - (1 - number) * len(answer.answers[0].ids)


async def test_a_person_who_was_asked_and_says_nothing_gives_no_reward(stand: TextStand) -> None:
    conversation = stand.conversations.start("", "person", opinions=True).id
    await stand.say(conversation, user())
    await stand.conversations.reward(conversation, "asked-0", [(0, 0.0)], asked=True)
    assert stand.end(conversation, None) == (0.0, 1)
    assert stand.fragments() == []


async def test_a_failed_conversation_is_dropped_whole(patient: TextStand) -> None:
    conversation, before = patient.start(), unlearned("failed")
    first = await patient.say(conversation, user())
    await patient.conversations.reward(conversation, "r", [(0, 1.0)])
    second = await patient.say(conversation, user("other"))
    assert second.cut == "history"
    how: Any = {"terminated": True, "abandoned": False, "reward": None, "failed": True}
    for _ in range(2):
        assert patient.conversations.end(conversation, "failed", **how) == (1.0, 2)
    patient.sweep_at(20.0)
    assert patient.fragments() == []
    assert unlearned("failed") - before == len(first.answers[0].ids) + len(second.answers[0].ids)


async def test_a_reward_that_the_learner_would_not_take_is_refused(stand: TextStand) -> None:
    conversation = stand.start()
    await stand.say(conversation, user())
    with pytest.raises(Refused, match=r"reward=1e\+30: the run takes -100 to 100 \(broker\.max_reward\)"):
        await stand.conversations.reward(conversation, "r", [(0, 1e30)])
    with pytest.raises(Refused, match=r"reward=-101: the run takes"):
        stand.end(conversation, -101.0)
    assert stand.end(conversation, -100.0) == (-100.0, 1)


async def test_the_newest_unrequested_rating_is_the_opinion_of_a_person(stand: TextStand) -> None:
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
async def test_answers_not_sampled_from_the_policy_are_not_learned_from(
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
    stand.end(conversation)
    assert unlearned(reason) - before == len(answer.ids)
    (fragment,) = stand.fragments()
    assert trained_tokens(fragment) == after.answers[0].ids


async def test_without_a_conversation_nothing_is_learned(stand: TextStand) -> None:
    before = unlearned("unasked")
    reply = await stand.say("", user(), temperature=0.0)
    assert (reply.version, reply.unlearned) == (1, "no conversation")
    assert unlearned("unasked") - before == len(reply.answers[0].ids)
    assert stand.fragments() == []


async def test_a_stop_sequence_or_token_limit_truncates(stand: TextStand) -> None:
    ways: tuple[dict[str, Any], ...] = ({"stop": ("</tool_call>",)}, {"max_tokens": 1})
    for number, fields in enumerate(ways):
        conversation = stand.start(f"c-{number}")
        reply = await stand.say(conversation, user(), **fields)
        assert reply.answers[0].ids[-1] != EOS
        assert "</tool_call>" not in reply.answers[0].message.content
        stand.end(conversation)
        (fragment,) = stand.fragments()
        assert read(fragment)["truncated"].sum() == 1
        assert not read(fragment)["terminated"].any()


@pytest.mark.promise("sampled-policy-answered-learned")
async def test_turns_after_the_last_reward_of_a_client_that_goes_away_are_dropped(stand: TextStand) -> None:
    conversation = stand.start()
    first = await stand.say(conversation, user())
    answer = first.answers[0].message
    await stand.conversations.reward(conversation, "r", [(0, 1.0)])
    second = await stand.say(conversation, user(), answer, tool("3", answer.tool_calls[0]))
    silent = stand.start("other")
    third = await stand.say(silent, user())
    before = unlearned("abandoned")
    stand.sweep_at(stand.section.episode_timeout_s + 1)
    lost = len(second.answers[0].ids) + len(third.answers[0].ids)
    assert unlearned("abandoned") - before == lost
    (fragment,) = stand.fragments()
    assert trained_tokens(fragment) == first.answers[0].ids
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
    assert stand.end(conversation, None) == (0.25, 1)
    for _ in range(2):
        assert await stand.conversations.reward(conversation, "r-3", [(0, 1.0)]) == 1
    assert kept == [("", [(conversation, 0, 1.0)])]
    (fragment,) = stand.fragments()
    assert read(fragment)["reward"].sum() == pytest.approx(0.25)


@pytest.fixture
async def patient(dialogue: Any) -> AsyncIterator[TextStand]:
    """It waits 5 seconds for rewards."""
    async with running(TextStand(dialogue, reward_window_s=5.0)) as stand:
        yield stand


async def test_within_the_window_a_reward_reaches_an_ended_column(patient: TextStand) -> None:
    conversation = patient.start()
    await patient.say(conversation, user())
    patient.end(conversation, None)
    assert patient.fragments() == []
    patient.sweep_at(4.0)
    assert await patient.conversations.reward(conversation, "r", [(0, 2.0)]) == 0
    patient.sweep_at(6.0)
    (fragment,) = patient.fragments()
    assert read(fragment)["reward"].sum() == pytest.approx(2.0)
    assert not patient.conversations._talks


@pytest.mark.promise("version-language-model-cannot")
async def test_the_base_model_answers_for_a_version_that_gives_nan(
    stand: TextStand,
) -> None:
    alone = await stand.say("", user(), tools=(), temperature=0.0)
    await stand.publish(2, adapter(stand.base, 2, size=float("inf")))
    conversation = stand.start()
    reply = await stand.say(conversation, user(), tools=(), temperature=0.0)
    assert (reply.is_fallback, reply.version, reply.unlearned) == (True, 0, "sampling")
    assert reply.answers[0].ids == alone.answers[0].ids
    sampled = await stand.say(conversation, user(), tools=())
    assert (sampled.is_fallback, sampled.unlearned) == (True, "fallback")


async def test_before_the_first_weights_the_model_itself_answers(stand: TextStand) -> None:
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
    stand.end(conversation, 0.0)
    (fragment,) = stand.fragments()
    assert [(one.version, one.update) for one in fragment.header.weights] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": ()}, "messages: give at least one"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 5e-324}, "temperature=4.94066e-324: say 0, or 0.001 to 100"),
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
async def test_an_unanswerable_request_is_refused_by_field(
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
    stand.end(conversation, None)
    with pytest.raises(Refused, match=r"rewards\.turn: absent, and no newest turn is known"):
        await stand.conversations.reward(conversation, "r", [(None, 1.0)])
    with pytest.raises(Refused, match=r"rewards\.turn=0: the conversation has 0 turns"):
        await stand.conversations.reward(conversation, "r", [(0, 1.0)])
    for _ in range(REMEMBERED_EPISODES):
        stand.end(stand.start(), None)
    for turn in (1024, 2**53, 2**63, 2**64 - 1):
        with pytest.raises(Refused, match=rf"rewards\.turn={turn}: no conversation has more than 1024"):
            await stand.conversations.reward(conversation, "r", [(turn, 1.0)])
    assert not kept
    assert await stand.conversations.reward(conversation, "r", [(1023, 1.0)]) == 1
    assert kept == [(conversation, 1023, 1.0)]


async def test_the_memory_of_conversations_is_counted_and_bounded(dialogue: Any, patient: TextStand) -> None:
    held = patient.conversations._held
    conversation = patient.start()
    await patient.say(conversation, user())
    first = held.used
    assert first > 1000
    await patient.say(conversation, user(), regenerate=True)
    assert held.used > first
    patient.end(conversation)
    assert 0 < held.used < first
    patient.sweep_at(6.0)
    assert held.used == 0
    full = TextStand(dialogue, max_buffered_bytes=500)
    with pytest.raises(Refused, match=r"serving\.max_buffered_bytes") as refused:
        await full.say(full.start(), user())
    assert refused.value.refusal.reason is Reason.INVALID


async def test_answers_that_grow_together_do_not_share_room(stand: TextStand) -> None:
    held = stand.conversations._held = CallerShares(40_000)
    asks = (stand.say(stand.start(), user(), count=8, max_tokens=8) for _ in range(6))
    answered = await asyncio.gather(*asks, return_exceptions=True)
    refused = [one for one in answered if isinstance(one, Refused)]
    assert {one.refusal.reason for one in refused} == {Reason.OVERLOADED}
    assert len(refused) == 5
    assert held.used == sum(talk.counted_bytes for talk in stand.conversations._talks.values())


async def test_a_client_with_endless_late_rewards_delays_no_other(patient: TextStand) -> None:
    first, second = patient.start(), patient.start()
    for conversation in (first, second):
        await patient.say(conversation, user())
        patient.end(conversation)
    patient.conversations._talks[first].is_keeping = True
    patient.sweep_at(6.0)
    assert list(patient.conversations._talks) == [first]
    patient.conversations._talks[first].is_keeping = False
    patient.conversations.sweep()
    assert not patient.conversations._talks
    assert len(patient.fragments()) == 2


async def test_the_answers_of_a_turn_are_limited(stand: TextStand) -> None:
    conversation = stand.start()
    asked: dict[str, Any] = {"count": 16, "max_tokens": 1, "regenerate": True}
    for _ in range(4):
        await stand.say(conversation, user(), **asked)
    with pytest.raises(Refused, match="regenerate: 64 answers to these messages"):
        await stand.say(conversation, user(), **asked)
    assert (await stand.say(conversation, user("other"))).turn == 1


SAMPLED_OTHERWISE: tuple[dict[str, Any], ...] = ({}, {}, {}, {"seed": 3}, {"count": 2}, {"not_learned": True})


class Client:
    def __init__(self, stand: TextStand, chance: random.Random) -> None:
        self._stand, self._chance = stand, chance
        self.replies: list[TextReply] = []

    async def converse(self, number: int) -> None:
        conversation, messages = self._stand.start(f"c-{number}"), [user()]
        for _ in range(self._chance.randint(1, 4)):
            await self._ask(conversation, messages)
            if self._chance.random() < 0.5:
                await self._reward(conversation)
            if self._chance.random() < 0.2:
                messages[-2 if len(messages) > 1 else 0] = Message("user", "other")
        if self._chance.random() < 0.6:
            is_over = self._chance.random() < 0.7
            self._stand.conversations.end(
                conversation, "e", terminated=is_over, abandoned=not is_over, reward=None
            )

    async def _ask(self, conversation: str, messages: list[Message]) -> None:
        try:
            fields = self._chance.choice(SAMPLED_OTHERWISE)
            reply = await self._stand.say(conversation, *messages, **fields)
            self._note(reply)
            for again in range(self._chance.randint(0, 2)):
                asked = {"regenerate": True} if again else {}
                self._note(reply := await self._stand.say(conversation, *messages, **fields, **asked))
        except Refused:
            messages[:] = [user()]  # No room is left, or what was edited cannot be answered.
            return
        answer = self._chance.choice(reply.answers).message
        follows = tool("3", answer.tool_calls[0]) if answer.tool_calls else user()
        messages += [answer, follows]

    def _note(self, reply: TextReply) -> None:
        if not any(reply is one for one in self.replies):
            self.replies.append(reply)

    async def _reward(self, conversation: str) -> None:
        for _ in range(self._chance.randint(1, 2)):
            talk = self._stand.conversations._talks[conversation]
            choices = [one.choice for one in talk.siblings if len(self.replies[-1].answers) > 1]
            choice = self._chance.choice(choices) if choices else None
            await self._stand.conversations.reward(conversation, "r", [(None, 1.0)], choice=choice)

    @property
    def sampled(self) -> int:
        return sum(len(one.ids) for reply in self.replies for one in reply.answers)


@pytest.mark.promise("token-server-sampled-conversation")
@pytest.mark.parametrize("seed", range(3))
async def test_each_sampled_token_is_learned_from_or_counted(stand: TextStand, seed: int) -> None:
    before, chance = {reason: unlearned(reason) for reason in REASONS}, random.Random(seed)
    client = Client(stand, chance)
    for number in range(12):
        await client.converse(number)
        if chance.random() < 0.3:
            await stand.publish(number + 2)
        if chance.random() < 0.3:
            stand.sweep_at(stand.now_s + stand.section.episode_timeout_s + 1)
    stand.conversations.finish()
    assert not stand.conversations._talks
    assert stand.conversations._held.used == 0
    learned = sum(int(read(fragment)["valid"].sum()) for fragment in stand.fragments())
    counted = {reason: unlearned(reason) - count for reason, count in before.items()}
    assert learned > 0
    assert counted["sibling"] > 0
    assert counted["abandoned"] > 0
    assert learned + sum(counted.values()) == client.sampled, counted


async def test_an_answer_of_a_dead_client_is_counted(stand: TextStand) -> None:
    before, conversation = unlearned("stopped"), stand.start()
    ask = TextRequest(messages=(user(),), conversation_id=conversation, max_tokens=30)

    def show(_index: int, _part: str) -> None:
        task.cancel()

    task = asyncio.ensure_future(stand.conversations.generate(ask, FAR, show))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert unlearned("stopped") > before
    assert (await stand.say(conversation, user())).turn == 0


def difference(stand: TextStand, reply: TextReply, version: int) -> float:
    (answer,) = reply.answers
    prompt = stand.conversations._encoder.begin([user()], TOOLS)
    alone = plain_log_prob(stand.engine, version, [*prompt, *answer.ids], len(prompt))
    return max(abs(one - other) for one, other in zip(answer.log_prob, alone, strict=True))


@pytest.mark.promise("versions-swapped-answers-grow")
@pytest.mark.parametrize(
    ("swaps", "streams"),
    [(12, 8), pytest.param(200, 32, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["few", "many"],
)
async def test_changing_versions_during_streams_mixes_no_answers(
    stand: TextStand, swaps: int, streams: int
) -> None:
    # So far apart that the wrong one gives other log-probabilities.
    blobs = {version: adapter(stand.base, version, size=0.2) for version in range(2, swaps + 2)}
    over = asyncio.Event()

    async def answers() -> list[TextReply]:
        found = []
        while not over.is_set():
            found.append(await stand.say("", user(), max_tokens=20))
        return found

    tasks = [asyncio.create_task(answers()) for _ in range(streams)]
    for version, blob in blobs.items():
        await stand.publish(version, blob)
    over.set()
    replies = [reply for found in await asyncio.gather(*tasks) for reply in found]
    assert len(replies) >= streams
    assert not any(reply.is_fallback for reply in replies)
    by_version = {reply.version: reply for reply in replies}
    assert len(by_version) > 2
    for version, reply in by_version.items():
        stand.engine.load(version, stand.weights[version].blob)
        assert difference(stand, reply, version) < 1e-3
        stand.engine.drop(version)
    newest = max(by_version)
    stand.engine.load(newest, stand.weights[newest].blob)
    assert difference(stand, by_version[min(by_version)], newest) > 0.01


async def test_no_other_version_continues_a_partly_sent_answer(stand: TextStand) -> None:
    shown = list[str]()

    def show(_: int, part: str) -> None:
        shown.append(part)
        engine = stand.engine
        with engine._before_next_step(), torch.no_grad(), engine._loaded.using(1) as network:
            for name, parameter in network.named_parameters():
                if "lora_" in name:
                    parameter.fill_(torch.nan)

    ask = TextRequest(messages=(user(),), conversation_id=stand.start(), max_tokens=30)
    with pytest.raises(Refused, match="the version failed after a part of the answer was sent"):
        await stand.conversations.generate(ask, FAR, show)
    assert shown
    reply = await stand.say("", user(), temperature=0.0)
    assert reply.is_fallback, "where nothing was sent, the model without its adapter answers"
