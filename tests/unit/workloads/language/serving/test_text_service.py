"""Requests on the wire that no client of ours would send: refused by the field and its place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.v1 import policy_pb2, refusal_pb2
from penstock.v1 import text_pb2 as pb
from penstock.v1.text_pb2_grpc import TextServiceStub
from tests.support.language.text_address import PATIENCE_S, served_text

TOOL = '{"type": "function", "function": {"name": "add"}}'


@pytest.fixture
def stub(dialogue: Path, short_folder: Path) -> Iterator[TextServiceStub]:
    """Of a server."""
    socket = short_folder / "text.sock"
    with served_text(dialogue, socket), grpc.insecure_channel(f"unix:{socket}") as channel:
        yield TextServiceStub(channel)


def test_tools_that_do_not_parse_are_refused_by_their_place(stub: TextServiceStub) -> None:
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
    """The detail of a refusal for what a caller sent."""
    assert reply.refusal.reason == refusal_pb2.REASON_INVALID
    assert len(reply.refusal.detail) < 400
    return str(reply.refusal.detail)


def begun(stub: TextServiceStub, **fields: Any) -> str:
    """The id of a new conversation."""
    reply = stub.StartConversation(pb.StartConversationRequest(**fields), timeout=PATIENCE_S)
    assert not reply.refusal.detail
    return str(reply.conversation_id)


def ask(stub: TextServiceStub, **fields: Any) -> Any:
    """TextRequest once."""
    asked: dict[str, Any] = {"messages": [pb.TextMessage(role="user", content="sum")]} | fields
    return stub.Generate(pb.GenerateRequest(**asked), timeout=PATIENCE_S)


MANY = 1_000_000
LONG = "x" * MANY


def test_no_call_remembers_what_is_long_or_many(stub: TextServiceStub) -> None:
    conversation = begun(stub)
    assert ask(stub, conversation_id=conversation).answers
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


def test_ids_of_any_length_are_no_conversations(stub: TextServiceStub) -> None:
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
