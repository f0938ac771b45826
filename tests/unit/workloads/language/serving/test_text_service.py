"""Requests on the wire that no client of ours would send: refused by the field and its place."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

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
    """No JSON, no function, a name that is none, too deep, too many; the next request is answered."""
    messages = [pb.TextMessage(role="user", content="sum")]
    wrong = {
        (TOOL, '{"type": '): "tools[1]: is no JSON",
        ("[" * 100_000,): "tools[0]: is no JSON",
        ('"add"',): 'tools[0]: write {"type": "function"',
        ('{"type": "function", "function": {"name": 3}}',): 'tools[0]: write {"type": "function"',
        (TOOL,) * 129: "tools: 129 are given, at most 128 are taken",
    }
    for tools, said in wrong.items():
        reply = stub.Generate(pb.GenerateRequest(messages=messages, tools=tools), timeout=PATIENCE_S)
        assert said in reply.refusal.detail
        assert not reply.answers
    assert stub.Generate(pb.GenerateRequest(messages=messages, tools=[TOOL]), timeout=PATIENCE_S).answers
