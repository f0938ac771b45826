import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.config.settings import ServingSection
from penstock.protocol.refusal import Reason, Refused
from penstock.runtime import metrics
from penstock.v1 import policy_pb2, refusal_pb2
from penstock.v1 import text_pb2 as pb
from penstock.v1.text_pb2_grpc import TextServiceStub
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.text_answerer import Drawing
from penstock.workloads.language.serving.text_request import TextReply, TextRequest, Thought
from penstock.workloads.language.serving.text_server import TextService
from tests.support.language.text_stand import (
    BEHIND,
    FAR,
    MOST,
    PATIENCE_S,
    THOUGHT,
    TOKENIZER,
    WITHOUT,
    WORDS,
    Caller,
    TextStand,
    adapter,
    form_of,
    guard_of,
    ids,
    make_thinker,
    running,
    served_text,
    unlearned,
    user,
)

TOOL = '{"type": "function", "function": {"name": "add"}}'


@pytest.fixture
def stub(dialogue: Path, short_folder: Path) -> Iterator[TextServiceStub]:
    socket = short_folder / "text.sock"
    with served_text(dialogue, socket), grpc.insecure_channel(f"unix:{socket}") as channel:
        yield TextServiceStub(channel)


def test_invalid_tools_are_refused_with_their_position(stub: TextServiceStub) -> None:
    messages = [pb.TextMessage(role="user", content="sum")]
    wrong = {
        (TOOL, '{"type": '): "tools[1]: is no JSON",
        ("[" * 4_000,): "tools[0]: is no JSON",
        ('"add"',): 'tools[0]: write {"type": "function"',
        ('{"type": "function", "function": {"name": 3}}',): 'tools[0]: write {"type": "function"',
        (TOOL,) * 129: "tools: 129 are given, at most 128 are taken",
    }
    for tools, said in wrong.items():
        reply = stub.Generate(pb.GenerateRequest(messages=messages, tools=tools), timeout=PATIENCE_S)
        assert said in reply.refusal.detail
        assert not reply.answers
    assert stub.Generate(pb.GenerateRequest(messages=messages, tools=[TOOL]), timeout=PATIENCE_S).answers


def refused(reply: Any) -> str:
    assert reply.refusal.reason == refusal_pb2.REASON_INVALID
    assert len(reply.refusal.detail) < 400
    return str(reply.refusal.detail)


def ask(stub: TextServiceStub, **fields: Any) -> Any:
    asked: dict[str, Any] = {"messages": [pb.TextMessage(role="user", content="sum")]} | fields
    return stub.Generate(pb.GenerateRequest(**asked), timeout=PATIENCE_S)


LONG = "x" * 1_000_000


def test_no_call_keeps_data_without_bound(stub: TextServiceStub) -> None:
    message = pb.TextMessage(role="user", content="sum")
    calling = pb.TextMessage(role="assistant", tool_calls=[pb.ToolCall()] * 65)
    wrong_asks: dict[str, dict[str, Any]] = {
        "request_id of 1000000": {"request_id": LONG},
        "client_key of 1000000": {"client_key": LONG},
        "client_key of 257": {"client_key": "k" * 257, "arm": policy_pb2.ARM_LATEST},
        "messages: 65 are given": {"messages": [message] * 65},
        "messages.tool_calls: 65 are given": {"messages": [calling, message]},
        "messages: have 1000018 bytes": {
            "messages": [pb.TextMessage(role="assistant", tool_calls=[pb.ToolCall(id=LONG)]), message]
        },
        "tools (characters): 1000000": {"tools": [LONG]},
        "stop: 17 are given": {"stop": [""] * 17},
        "logit_bias: 1025 are given": {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        "version=": {"version": 2**64 - 1},
    }
    for said, fields in wrong_asks.items():
        reply = ask(stub, **fields)
        assert said in reply.refusal.detail
        assert not reply.answers
        parts = stub.GenerateStream(
            pb.GenerateRequest(**{"messages": [message], **fields}), timeout=PATIENCE_S
        )
        assert said in list(parts)[-1].reply.refusal.detail


def test_no_beginning_reward_or_end_keeps_data_without_bound(stub: TextServiceStub) -> None:
    begun = stub.StartConversation(pb.StartConversationRequest(), timeout=PATIENCE_S)
    conversation = str(begun.conversation_id)
    assert ask(stub, conversation_id=conversation).answers
    for said, start in {
        "request_id of 129": pb.StartConversationRequest(request_id="r" * 129),
        "client_key of 257": pb.StartConversationRequest(client_key="k" * 257, arm=policy_pb2.ARM_LATEST),
        "arm=77": pb.StartConversationRequest(arm=77),  # type: ignore[arg-type]
    }.items():
        assert said in refused(stub.StartConversation(start, timeout=PATIENCE_S))
    wrong_rewards: dict[str, dict[str, Any]] = {
        "rewards: 1025 in one call": {"rewards": [pb.TurnReward(turn=0, amount=1.0)] * 1025},
        "rewards: 0 in one call": {"rewards": []},
        "request_id of 1000000": {"rewards": [pb.TurnReward(amount=1.0)], "request_id": LONG},
        "turn=9223372036854775808": {"rewards": [pb.TurnReward(turn=2**63, amount=1.0)]},
        "reward=1e+300": {"rewards": [pb.TurnReward(amount=1e300)]},
    }
    for said, fields in wrong_rewards.items():
        request = pb.TurnRewardsRequest(conversation_id=conversation, **fields)
        assert said in refused(stub.Reward(request, timeout=PATIENCE_S))
    wrong_ends: dict[str, dict[str, Any]] = {
        "request_id of 129": {"request_id": "r" * 129},
        "ending=77": {"ending": 77},
        "reward=inf": {"reward": float("inf")},
    }
    for said, fields in wrong_ends.items():
        ending: dict[str, Any] = {"ending": policy_pb2.ENDING_TERMINATED} | fields
        request_of_end = pb.EndConversationRequest(conversation_id=conversation, **ending)
        assert said in refused(stub.EndConversation(request_of_end, timeout=PATIENCE_S))
    described = stub.Describe(pb.DescribeTextRequest(policy=LONG), timeout=PATIENCE_S)
    assert refused(described).startswith("policy='xxx")
    ended = stub.EndConversation(
        pb.EndConversationRequest(
            conversation_id=conversation, ending=policy_pb2.ENDING_TERMINATED, reward=1
        ),
        timeout=PATIENCE_S,
    )
    assert (ended.total_return, ended.turns) == (1.0, 1)


def test_invalid_ids_of_any_length_are_refused(stub: TextServiceStub) -> None:
    rewards = [pb.TurnReward(turn=0, amount=1.0)]
    for wrong in (LONG, "", "c-1", "0" * 48):
        for reply in (
            stub.Reward(pb.TurnRewardsRequest(conversation_id=wrong, rewards=rewards), timeout=PATIENCE_S),
            stub.EndConversation(
                pb.EndConversationRequest(conversation_id=wrong, ending=policy_pb2.ENDING_TERMINATED),
                timeout=PATIENCE_S,
            ),
        ):
            assert reply.refusal.reason == refusal_pb2.REASON_EPISODE_UNKNOWN
            assert len(reply.refusal.detail) < 200


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker") / "model")


@pytest.fixture
async def thinking(thinker: Path) -> AsyncIterator[TextStand]:
    async with running(TextStand(thinker, form=form_of())) as made:
        yield made


async def thinking_ask(stand: TextStand, **fields: Any) -> TextReply:
    return await stand.say("", user(), **({"tools": (), "temperature": 0.0} | fields))


async def test_an_answer_comes_from_the_thought_before_it_that_who_asks_is_shown(thinking: TextStand) -> None:
    (answer,) = (await thinking_ask(thinking)).answers
    assert answer.message.content == BEHIND
    assert answer.thought is not None
    assert (answer.thought.tokens, answer.thought.is_cut) == (3, False)
    assert answer.thought.milliseconds > 0.0
    assert (answer.thought.text, answer.thought.ids) == (None, ())
    assert answer.before == ids("sea lookup 3 done lookup")
    assert len(answer.ids) == len(answer.log_prob) == len(answer.tokens) == 2
    (answer,) = (await thinking_ask(thinking, show_thought=True)).answers
    assert answer.thought is not None
    assert (answer.thought.text, answer.thought.ids) == (THOUGHT, ids("lookup 3 done"))
    (answer,) = (await thinking_ask(thinking, thought_tokens=0, show_thought=True)).answers
    assert (answer.message.content, answer.thought, answer.before) == (WITHOUT, None, ids("3"))


async def test_thoughts_are_counted_with_their_length_and_time_by_arm(thinking: TextStand) -> None:
    counted = metrics.THOUGHT_TOKENS.labels("latest"), metrics.THOUGHT_SECONDS.labels("latest")

    def sums() -> list[float]:
        return [float(one._sum.get()) for one in counted]

    (tokens, seconds), before = sums(), thoughts_counted("latest")
    await thinking_ask(thinking, count=2)
    await thinking_ask(thinking, thought_tokens=0)
    assert thoughts_counted("latest") - before == 2
    assert sums()[0] - tokens == 2 * 3
    assert sums()[1] > seconds


def thoughts_counted(arm: str) -> float:
    (family,) = metrics.THOUGHT_TOKENS.collect()
    return sum(
        one.value for one in family.samples if one.name.endswith("_count") and one.labels == {"arm": arm}
    )


@pytest.mark.promise("thought-answer-leaves-server")
@pytest.mark.parametrize("budget", [1, 2, 3, MOST])
async def test_a_thought_takes_no_more_than_its_budget(thinking: TextStand, budget: int) -> None:
    (answer,) = (await thinking_ask(thinking, thought_tokens=budget, show_thought=True)).answers
    assert answer.thought is not None
    assert answer.thought.tokens == min(budget, 3)
    assert answer.thought.is_cut is (budget < 3)
    assert answer.before == (*ids("sea"), *answer.thought.ids[:2], *ids("done lookup"))


async def test_a_budget_beyond_the_runs_is_refused(thinking: TextStand, stand: TextStand) -> None:
    with pytest.raises(Refused, match="thought_tokens=6: ask for 0 to 5") as refused:
        await thinking_ask(thinking, thought_tokens=6)
    assert refused.value.refusal.reason is Reason.INVALID
    with pytest.raises(Refused, match="thought_tokens=1: there are no thoughts here: leave it out"):
        await thinking_ask(stand, thought_tokens=1)
    assert (await thinking_ask(stand, thought_tokens=0)).answers[0].thought is None


@pytest.mark.promise("thought-answer-leaves-server")
@pytest.mark.parametrize("shows", [True, False])
async def test_no_stream_contains_a_thought(thinking: TextStand, shows: bool) -> None:
    reply, parts = await thinking.stream(user(), tools=(), temperature=0.0, show_thought=shows, count=3)
    assert sorted(parts) == [BEHIND] * 3
    assert len(reply.answers) == 3


@pytest.mark.promise("thought-answer-leaves-server")
async def test_a_hidden_thought_is_sent_only_as_numbers(thinking: TextStand) -> None:
    fields: dict[str, Any] = {"messages": [pb.TextMessage(role="user", content="sum")], "temperature": 0.0}
    hidden = await thinking.service.generate(pb.GenerateRequest(**fields), Caller())
    stream = thinking.service.generate_stream(pb.GenerateRequest(**fields), Caller())
    streamed = [chunk async for chunk in stream]
    for reply in (hidden, *streamed):
        assert b"lookup" not in reply.SerializeToString()
    for reply in (hidden, streamed[-1].reply):
        assert reply.answers[0].thought.tokens == 3
        assert not reply.answers[0].thought.token_ids
        assert (reply.learned, reply.unlearned) == (False, "no conversation")
    shown = await thinking.service.generate(pb.GenerateRequest(**fields, show_thought=True), Caller())
    assert shown.answers[0].thought.text == THOUGHT
    none = await thinking.service.generate(pb.GenerateRequest(**fields, thought_tokens=0), Caller())
    assert not none.answers[0].HasField("thought")
    described = thinking.service.describe(pb.DescribeTextRequest())
    assert described.thought_tokens == MOST


async def test_stops_biases_and_lengths_apply_only_to_the_answer(thinking: TextStand) -> None:
    stopped = (await thinking_ask(thinking, stop=("lookup", BEHIND))).answers[0]
    assert (stopped.message.content, stopped.finish) == ("", "stop")
    assert stopped.thought is not None
    assert stopped.thought.tokens == 3
    biased = (await thinking_ask(thinking, logit_bias={ids("other")[0]: 100.0}, max_tokens=1)).answers[0]
    assert (biased.message.content, biased.finish) == ("other", "length")
    assert biased.before == ids("sea lookup 3 done lookup")


async def test_answers_of_one_length_are_complete_there(thinker: Path) -> None:
    async with running(TextStand(thinker, form=form_of(answer_tokens=1))) as stand:
        whole = (await thinking_ask(stand, max_tokens=6)).answers[0]
        assert (whole.message.content, len(whole.ids), whole.finish, whole.ended) == (BEHIND, 1, "stop", True)
        with pytest.raises(Refused, match="begins_with='done': every answer of this model has 1 tokens"):
            await thinking_ask(stand, begins_with="done")
    async with running(TextStand(thinker, form=form_of(answer_tokens=2))) as stand:
        cut = (await thinking_ask(stand, max_tokens=1)).answers[0]
        assert (cut.message.content, cut.finish, cut.ended) == (BEHIND, "length", False)


async def test_the_limits_of_a_request_leave_room_for_a_thought(thinking: TextStand) -> None:
    fits = 64 - len(thinking.conversations._encoder.begin([user()])) - form_of().room
    assert (await thinking_ask(thinking, max_tokens=fits)).answers
    with pytest.raises(Refused, match="8 of a thought and an answer of up to"):
        await thinking_ask(thinking, max_tokens=fits + 1)


async def test_sampled_answers_have_their_own_thoughts(thinking: TextStand) -> None:
    hot: dict[str, Any] = {"temperature": 3.0, "count": 8, "seed": 7, "show_thought": True}
    first, again = await thinking_ask(thinking, **hot), await thinking_ask(thinking, **hot)
    thoughts = [one.thought.ids for one in first.answers if one.thought is not None]
    assert len(thoughts) == 8
    assert len(set(thoughts)) > 1
    for one, other in zip(first.answers, again.answers, strict=True):
        assert (one.message, one.ids, one.before) == (other.message, other.ids, other.before)


async def test_a_conversation_of_thoughts_continues_and_is_not_learned_from(thinking: TextStand) -> None:
    conversation, before = thinking.start(), unlearned("thought")
    fields: dict[str, Any] = {"tools": (), "temperature": 0.0}
    first = await thinking.say(conversation, user(), **fields)
    assert (first.unlearned, first.turn) == ("thought", 0)
    assert unlearned("thought") - before == 3
    assert await thinking.say(conversation, user(), **fields, request_id="again") is first
    second = await thinking.say(
        conversation, user(), first.answers[0].message, Message("user", "sum"), **fields
    )
    assert (second.unlearned, second.turn) == ("thought", 1)
    assert thinking.end(conversation) == (1.0, 2)
    assert unlearned("thought") - before >= 3 + len(first.answers[0].ids)


async def test_an_arm_without_thoughts_answers_at_once(thinker: Path) -> None:
    async with running(TextStand(thinker, form=form_of(), arms_without_thought=("latest",))) as stand:
        for fields in ({}, {"thought_tokens": 3}):
            (answer,) = (await thinking_ask(stand, **fields)).answers
            assert (answer.message.content, answer.thought) == (WITHOUT, None)
        (pinned,) = (await thinking_ask(stand, version=1)).answers
        assert pinned.message.content == BEHIND


@pytest.mark.promise("thought-answer-leaves-server")
@pytest.mark.parametrize(("pattern", "shown"), [("lookup", None), ("banned", THOUGHT)])
async def test_a_thought_that_is_shown_passes_the_guard(
    thinker: Path, pattern: str, shown: str | None
) -> None:
    async with running(TextStand(thinker, form=form_of(), guard=guard_of(pattern))) as stand:
        counter = metrics.TEXT_BLOCKED.labels("latest", "output", "rule:banned")._value
        before = counter.get()
        (answer,) = (await thinking_ask(stand, show_thought=True)).answers
        assert answer.message.content == BEHIND
        assert answer.thought is not None
        assert (answer.thought.text, bool(answer.thought.ids)) == (shown, shown is not None)
        assert answer.thought.tokens == 3
        assert counter.get() - before == (shown is None)


async def test_a_blocked_answer_hides_its_thought_too(thinker: Path) -> None:
    async with running(TextStand(thinker, form=form_of(), guard=guard_of(BEHIND), fallback="none")) as stand:
        (answer,) = (await thinking_ask(stand, show_thought=True)).answers
        assert answer.is_blocked
        assert answer.thought is not None
        assert (answer.thought.text, answer.thought.ids, answer.thought.tokens) == (None, (), 3)


async def test_a_passed_deadline_ends_a_thought(thinker: Path) -> None:
    stand = TextStand(thinker, form=form_of())
    await stand.publish(1)
    until_s = asyncio.get_running_loop().time() + 0.05
    with pytest.raises(Refused) as refused:
        await stand.conversations.generate(TextRequest(messages=(user(),), count=3), until_s)
    assert refused.value.refusal.reason is Reason.DEADLINE
    stand.engine.step()
    assert (stand.engine.under_way, stand.engine.waiting) == (0, 0)


async def test_a_caller_that_goes_away_leaves_its_thought_counted(thinker: Path) -> None:
    stand, before = TextStand(thinker, form=form_of()), unlearned("stopped")
    await stand.publish(1)
    asked = TextRequest(messages=(user(),), temperature=0.0)
    answering = asyncio.ensure_future(stand.conversations.generate(asked, FAR))
    while not stand.engine.waiting:
        await asyncio.wait([answering], timeout=0)
    stand.engine.step()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert unlearned("stopped") - before == 1
    stand.engine.step()
    assert stand.engine.under_way == 0


async def test_the_base_model_answers_for_a_version_that_cannot_think(thinking: TextStand) -> None:
    await thinking.publish(2, adapter(thinking.base, 2, size=float("inf")))
    reply = await thinking_ask(thinking)
    assert (reply.is_fallback, reply.version) == (True, 0)
    assert reply.answers[0].thought is not None
    assert reply.answers[0].message.content == BEHIND


@pytest.mark.promise("thought-answer-leaves-server")
async def test_thought_and_answer_use_one_version(
    thinking: TextStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Drawing._thought

    async def replaced_meanwhile(*thought: Any) -> Thought:
        found = await whole(*thought)
        await thinking.publish(2)
        return found

    monkeypatch.setattr(Drawing, "_thought", replaced_meanwhile)
    reply = await thinking_ask(thinking)
    assert (reply.version, reply.is_fallback) == (1, False)
    assert reply.answers[0].message.content == BEHIND
    monkeypatch.undo()
    await thinking.publish(3)
    assert thinking.engine.versions == [3]


async def test_a_refused_word_is_shown_to_its_caller_and_not_logged(
    thinking: TextStand, caplog: pytest.LogCaptureFixture
) -> None:
    thinking.conversations._encoder = ChatEncoder(TOKENIZER, WORDS)
    asked: dict[str, Any] = {"messages": [pb.TextMessage(role="user", content="sum hunter2")]}
    for conversation in ("", thinking.start()):
        service = TextService("run", ServingSection(), thinking.conversations, thinking.versions)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            request = pb.GenerateRequest(**asked, conversation_id=conversation)
            reply = await service.generate(request, Caller())
        assert "'hunter2' is none of the 11 words" in reply.refusal.detail
        (line,) = (one.__dict__ for one in caplog.records if one.message == "refused")
        assert line["detail"] == "messages[0].content: a word is none of the 11 words of the model"
