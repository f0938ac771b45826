"""Messages as ids, and how a conversation goes on behind ids that were sampled."""

import pytest

from penstock.workloads.language.conversation import ChatEncoder, NotContinued
from penstock.workloads.language.pretraining.tiny_models import build_tokenizer
from penstock.workloads.language.prompt import Message, ToolCall
from tests.support.language.chat_words import FORGETTING_TEMPLATE, chat_tokenizer

EOS, USER, ASSISTANT, TOOL = 2, 5, 6, 7
A, B, C, ADD = 8, 9, 10, 11


def encoder(**kwargs: str) -> ChatEncoder:
    """Of the words a, b, c, add."""
    return ChatEncoder(chat_tokenizer("a", "b", "c", "add", **kwargs))


def test_a_prompt_ends_where_the_assistant_begins() -> None:
    ask = [Message("user", "a b")]
    assert encoder().begin(ask) == [USER, A, B, EOS, ASSISTANT]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert encoder().begin(ask, tools) == [4, ADD, EOS, USER, A, B, EOS, ASSISTANT]


@pytest.mark.parametrize(("last", "first"), [(EOS, []), (C, [EOS])])
def test_what_follows_begins_behind_the_end_that_was_sampled(last: int, first: list[int]) -> None:
    follow = encoder().follow([Message("user", "a")], last, [Message("user", "b")])
    assert follow == [*first, USER, B, EOS, ASSISTANT]


def test_prompt_answer_and_what_follows_are_the_rendering_of_all() -> None:
    made, ask = encoder(), [Message("user", "a")]
    call = ToolCall("call-0", "add", "{}")
    whole = [*ask, Message("assistant", "b c"), Message("tool", "a", tool_call_id=call.id)]
    held = [*made.begin(ask), B, C, EOS]
    assert [*held, *made.follow(ask, EOS, whole[2:])] == made.begin(whole)


def test_a_template_that_changes_earlier_answers_cannot_be_continued() -> None:
    with pytest.raises(NotContinued, match="changes earlier messages"):
        encoder(template=FORGETTING_TEMPLATE).follow([Message("user", "a")], EOS, [Message("user", "b")])


@pytest.mark.promise("trained-conversation-sampled-later")
@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message("user", "a <eos> b"), "content"),
        (Message("tool", "a<assistant>b"), "content"),
        (Message("user <eos>", "a"), "role"),
        (Message("tool", "a", tool_call_id="<eos>"), "tool_call_id"),
        (Message("assistant", "", (ToolCall("0", "add", '{"x": "<user>"}'),)), r"tool_calls\.arguments"),
    ],
)
def test_control_tokens_in_texts_are_refused(message: Message, field: str) -> None:
    with pytest.raises(ValueError, match=rf"messages\[1\]\.{field} holds '<"):
        encoder().begin([Message("user", "a"), message])
    with pytest.raises(ValueError, match="is a control token"):
        encoder().follow([Message("user", "a")], EOS, [message])


def test_control_tokens_in_tools_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "a <eos> <assistant>"}}
    with pytest.raises(ValueError, match=r"tools\[0\] holds '<assistant>'"):
        encoder().begin([Message("user", "a")], [tool])
    with pytest.raises(ValueError, match=r"tools\[0\] holds '<assistant>'"):
        encoder().follow([Message("user", "a")], EOS, [Message("user", "a")], [tool])


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set tokenizer\.chat_template"):
        ChatEncoder(build_tokenizer(["a"]))


def test_what_cannot_be_rendered_is_refused_as_what_it_is() -> None:
    nested: object = {}
    for _ in range(5_000):
        nested = {"in": nested}
    deep = {"type": "function", "function": {"name": "add", "parameters": nested}}
    halved = {"type": "function", "function": {"name": "\ud800"}}
    with pytest.raises(ValueError, match=r"tools\[0\]: is nested too deep"):
        encoder().begin([Message("user", "a")], [deep])
    with pytest.raises(ValueError, match="hold what is no Unicode text"):
        encoder().begin([Message("user", "a")], [halved])


def test_arguments_nested_too_deep_stay_text() -> None:
    call = ToolCall("call-0", "add", "[" * 100_000)
    messages = [
        Message("user", "a"),
        Message("assistant", "", (call,)),
        Message("tool", "b", tool_call_id="call-0"),
    ]
    assert encoder().begin(messages)


def test_a_model_of_some_words_is_asked_in_those_alone() -> None:
    made = ChatEncoder(chat_tokenizer("a", "b", "c", "add"), words=("a", "b"))
    assert made.begin([Message("user", " a\n b ")]) == [USER, A, B, EOS, ASSISTANT]
    with pytest.raises(ValueError, match=r"messages\[1\].content: 'c' is none of the 2 words of the model"):
        made.begin([Message("user", "a"), Message("user", "b c d")])
    with pytest.raises(ValueError, match="'x{40}' is none of"):
        made.begin([Message("user", "x" * 1_000)])
