"""What streams of an answer is what its message says, so that a client that sends it back changes nothing."""

import pytest

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
    text, offered = AnswerText(TOKENIZER, holds_calls=True), TOOLS[:1]
    parts = []
    for token in TOKENIZER(written, add_special_tokens=False)["input_ids"]:
        text.add(token)
        parts.append(text.take_shown())
    message = as_message(text.text, offered, "call")
    parts.append(text.take_rest(message))
    assert ("".join(parts), message.content, len(message.tool_calls)) == (content, content, calls)
