"""What a served run of thoughts makes of messages, and how it answers."""

from typing import Any

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.text_request import Thought
from penstock.workloads.thoughts.acting import length_of_answers, question_tokenizer, thinking_form
from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.tasks import Example, Rings

TASK = Rings(6, 3)
LAYOUT = Layout(TASK)


def encoder() -> ChatEncoder:
    """As the server has it."""
    return ChatEncoder(question_tokenizer(LAYOUT), TASK.words)


def example(seed: int) -> Example:
    """A question of the hardest level."""
    return TASK.example(np.random.default_rng(seed), 3)


def test_a_row_that_is_served_is_a_row_that_was_trained() -> None:
    one, form = example(0), thinking_form(LAYOUT, 4, 1)
    prompt = tuple(encoder().begin([Message("user", " ".join(one.question))]))
    question, answer = LAYOUT.question(one.question), LAYOUT.ids(one.answer)
    assert prompt == question
    whole = LAYOUT.thought(one.steps)
    for thought, is_cut in ((whole, False), (LAYOUT.ids(one.steps), True), ((LAYOUT.end,), False)):
        before = form.before(Thought(tokens=len(thought), ids=thought, is_cut=is_cut, milliseconds=0.0))
        assert (*prompt, *before, *answer) == LAYOUT.thinking(question, thought, answer)
        assert len(before) <= form.room
    assert (*prompt, *form.before(None), *answer) == LAYOUT.direct(question, answer)


def test_the_last_message_alone_is_the_question() -> None:
    first, last = example(1), example(2)
    messages = [
        Message("user", " ".join(first.question)),
        Message("assistant", " ".join(first.answer)),
        Message("user", " ".join(last.question)),
    ]
    assert tuple(encoder().begin(messages)) == LAYOUT.question(last.question)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([Message("user", "a b what")], "'what' is none of the"),
        ([Message("user", "a = b")], "'=' is none of the"),
        ([Message("user", "a </think> = b")], "'</think>' is none of the"),
        ([Message("user", "a <eos>")], "control token"),
        ([Message("system", "a"), Message("user", "a")], "roles user and assistant"),
    ],
)
def test_what_is_no_question_is_refused(messages: list[Message], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        encoder().begin(messages)


def test_tools_are_refused() -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "a"}}
    with pytest.raises(ValueError, match="calls no tools"):
        encoder().begin([Message("user", "a")], [tool])


class Uneven(Rings):
    """Its answers have one or two words."""

    def example(self, random: np.random.Generator, level: int) -> Example:
        """One of level 1 has a longer answer."""
        made = super().example(random, level)
        if level > 1:
            return made
        return Example(
            question=made.question, answer=made.answer * 2, steps=(), level=level, identity=made.identity
        )


def test_answers_of_one_length_are_served_and_no_others() -> None:
    assert length_of_answers("rings:6:3", TASK) == 1
    with pytest.raises(ConfigurationError, match="have 1 to 2 words.*fill shorter ones with a filler word"):
        length_of_answers("mine:task", Uneven(6, 3))
