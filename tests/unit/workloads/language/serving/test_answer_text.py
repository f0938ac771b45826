"""What streams of an answer is what its message says, so that a client that sends it back changes nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.text_answerer import AnswerText, as_message
from tests.support.language.text_stand import ADD, LOOKUP, TOKENIZER, TOOLS

CALL = f"<tool_call> {ADD} </tool_call>"


@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        ("sum 3", "sum 3", 0),
        (CALL, "", 1),
        (f"sum 3 {CALL}", "sum 3", 1),
        (f"sum {CALL} done", "sum  done", 1),
        (f"sum {CALL} {CALL}", "sum", 2),
        (f"sum <tool_call> {LOOKUP}", f"sum <tool_call> {LOOKUP}", 0),
        (f"sum <tool_call> {LOOKUP} </tool_call>", f"sum <tool_call> {LOOKUP} </tool_call>", 0),
    ],
)
def test_what_streams_is_what_the_message_says(written: str, content: str, calls: int) -> None:
    ids = TOKENIZER(written, add_special_tokens=False)["input_ids"]
    said, message = streamed(AnswerText(TOKENIZER, holds_calls=True), ids, TOOLS[:1])
    assert (said, message.content, len(message.tool_calls)) == (content, content, calls)


def streamed(
    text: AnswerText, ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()
) -> tuple[str, Message]:
    """The parts that were shown, joined, and the message."""
    parts = []
    for token in ids:
        text.add(token)
        parts.append(text.take_shown())
        if text.is_stopped:
            break
    message = as_message(text.text, tools, "call")
    return "".join([*parts, text.take_rest(message)]), message


def letters() -> Any:
    """A tokenizer of letters, and of bytes for every other character, as Llama's."""
    letters = [chr(one) for one in range(32, 127)]
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    model = models.BPE(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        byte_fallback=True,
    )
    made = Tokenizer(model)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("stops", "written", "content"),
    [
        (("bc", "abq"), "xabq", "x"),
        (("abq", "bc"), "xabq", "x"),
        (("q", " <t"), "hi <tool_call>{}", "hi"),
        ((" <t", "q"), "hi <tool_call>{}", "hi"),
        (("a<tool_call>x",), "ba<tool_call>x", "b"),
        (("bcd", "cdx"), "abcdx", "a"),
        (("zz",), "az", "az"),
    ],
)
def test_nothing_streams_of_a_stop(stops: tuple[str, ...], written: str, content: str) -> None:
    tokenizer = letters()
    for holds_calls in (False, True):
        text = AnswerText(tokenizer, stops=stops, holds_calls=holds_calls)
        said, message = streamed(text, tokenizer(written, add_special_tokens=False)["input_ids"])
        assert (said, message.content) == (content, content)


@pytest.mark.parametrize("stop", [">>>", "}x", "call>…", "<tool_call>x"])
def test_no_part_of_a_call_streams_for_a_stop_that_it_may_begin(stop: str) -> None:
    tokenizer, written = letters(), f"ok {CALL}"
    text = AnswerText(tokenizer, stops=(stop,), holds_calls=True)
    said, message = streamed(text, tokenizer(written, add_special_tokens=False)["input_ids"], TOOLS)
    assert (said, message.content, len(message.tool_calls)) == ("ok", "ok", 1)


@pytest.mark.parametrize("written", ["a€b", "€", "🌊", "héé", "x€"])
def test_characters_of_several_bytes_stream_as_they_are_in_the_message(written: str) -> None:
    tokenizer = letters()
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    for count in range(1, len(ids) + 1):
        said, message = streamed(AnswerText(tokenizer), ids[:count])
        assert said == message.content
    assert said == written


def test_bytes_that_are_no_text_stream_as_they_are_in_the_message() -> None:
    tokenizer = letters()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("h", "<0x41>", "<0xE2>")]
    said, message = streamed(AnswerText(tokenizer), ids)
    assert said == message.content


@pytest.mark.parametrize("argument", [r'"\ud800"', "NaN", "Infinity", "1e999"])
def test_what_is_no_text_or_no_json_is_no_call(argument: str) -> None:
    written = f'<tool_call> {{"name":"add","arguments":{{"a":{argument}}}}} </tool_call>'
    assert as_message(written, TOOLS, "call") == Message("assistant", written)
