"""The clients of a server of text, for threads and for event loops, against a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.client import (
    Arm,
    AsyncTextClient,
    DeadlinePassed,
    EpisodeUnknown,
    Fallback,
    InvalidRequest,
    TextClient,
    UnknownVersion,
)
from penstock.runtime import metrics
from tests.support.language.text_address import served_text
from tests.support.language.text_stand import TOOLS, TextStand, answers_by_heart, make_model
from tests.support.run.broker_process import eventually

ASKED: Final = ({"role": "user", "content": "sum"},)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model and the socket."""
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def stand(folder: Path) -> Iterator[TextStand]:
    """The server."""
    with served_text(make_model(folder / "model"), folder / "text.sock") as made:
        yield made


@pytest.fixture
def client(stand: TextStand, folder: Path) -> Iterator[TextClient]:
    """Of threads."""
    with TextClient(f"unix:{folder / 'text.sock'}") as made:
        yield made


def test_a_conversation_goes_on_with_the_messages_as_they_came(client: TextClient) -> None:
    conversation = client.start_conversation("ada")
    assert (conversation.arm, conversation.learned) == (Arm.LATEST, True)
    messages: list[Any] = list(ASKED)
    for turn, said in enumerate(("3", "sea", None)):
        made = conversation.generate(messages, tools=TOOLS)
        assert (made.turn, made.version, made.learned, made.fallback) == (turn, 1, True, None)
        messages.append(made.answers[0].message)
        if said is not None:
            (call,) = made.answers[0].message["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    assert made.text == "done"
    assert conversation.reward(0.5, turn=1) == 0
    assert conversation.end(reward=1.0).total_return == 1.5
    with pytest.raises(EpisodeUnknown):
        conversation.generate([*messages, {"role": "user", "content": "and now"}])


def test_parts_of_a_stream_are_the_answer(client: TextClient) -> None:
    stream = client.stream(ASKED, temperature=0.0)
    text = "".join(part.text for part in stream)
    assert stream.result is not None
    assert text == stream.result.text == answers_by_heart()[0]
    held = client.stream(ASKED, temperature=0.0, tools=TOOLS)
    assert "".join(part.text for part in held) == ""
    assert held.result is not None
    assert held.result.answers[0].message["tool_calls"][0]["function"]["name"] == "add"


def test_a_stream_that_is_closed_stops_its_answer(client: TextClient, stand: TextStand) -> None:
    before = metrics.NOT_LEARNED_STEPS.labels("stopped")._value.get()
    with client.stream(ASKED, max_tokens=55, logit_bias={9: 100.0}) as stream:
        next(iter(stream))
    eventually(lambda: metrics.NOT_LEARNED_STEPS.labels("stopped")._value.get() > before)
    eventually(lambda: stand.engine.under_way == 0)


def test_an_option_that_there_is_not_and_a_value_that_it_does_not_take_are_named(client: TextClient) -> None:
    misspelt: dict[str, Any] = {"thoughts_token": 0}
    for asks in (client.generate, client.start_conversation("ada").generate):
        with pytest.raises(
            TypeError, match="thoughts_token: no option of an answer; there are .*thought_tokens"
        ):
            asks(ASKED, **misspelt)
    of_single: dict[str, Any] = {"version": 1}
    with pytest.raises(TypeError, match="version: no option"):
        client.start_conversation("ada").generate(ASKED, **of_single)
    with pytest.raises(ValueError, match="thought_tokens=-1: "):
        client.generate(ASKED, thought_tokens=-1)
    halves: dict[str, Any] = {"max_tokens": 2.5}
    with pytest.raises(TypeError, match=r"max_tokens=2\.5: "):
        client.generate(ASKED, **halves)


def test_refusals_are_typed(client: TextClient, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="top_p=2: say 1e-06 to 1"):
        client.generate(ASKED, top_p=2.0)
    with pytest.raises(UnknownVersion):
        client.generate(ASKED, version=77)
    with pytest.raises(InvalidRequest, match=r"tools\[0\]: write"):
        client.generate(ASKED, tools=[{"function": {}}])
    with pytest.raises(ValueError, match=r"messages\[0\]"):
        client.generate([{"content": "no role"}])
    with (
        TextClient(f"unix:{folder / 'text.sock'}", deadline_s=0.05) as hasty,
        pytest.raises(DeadlinePassed),
    ):
        hasty.generate(ASKED, max_tokens=55, logit_bias={9: 100.0}, count=16)


def test_the_description_tells_versions_and_limits(client: TextClient) -> None:
    told = client.describe()
    assert [(one.version, one.arms) for one in told.versions] == [(1, (Arm.LATEST,))]
    assert (told.max_tokens, told.answer_tokens, told.learns) == (64, 6, True)


async def test_the_client_of_an_event_loop_does_the_same(stand: TextStand, folder: Path) -> None:
    async with AsyncTextClient(f"unix:{folder / 'text.sock'}") as client:
        made = await client.generate(ASKED, temperature=0.0)
        assert made.text == answers_by_heart()[0]
        stream = client.stream(ASKED, temperature=0.0)
        assert "".join([part.text async for part in stream]) == made.text
        conversation = await client.start_conversation(name="async")
        again = await client.start_conversation(name="async", must_exist=True)
        assert again.conversation_id == conversation.conversation_id
        await conversation.generate(ASKED)
        assert await conversation.reward(1.0) == 0
        assert (await conversation.end()).turns == 1
        assert Fallback(4) is Fallback.ADAPTER_OFF
