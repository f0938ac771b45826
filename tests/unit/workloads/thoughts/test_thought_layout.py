"""Rows: where question, thought and answer lie."""

import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.pretraining.tiny_models import SPECIAL, build_tokenizer
from penstock.workloads.thoughts.environment import SPECIAL as OURS
from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.tasks import Rings, open_task


def test_its_tokens_are_those_of_a_tokenizer_of_its_words() -> None:
    layout = Layout(open_task("rings:7:4"))
    tokenizer = build_tokenizer(layout.words)
    assert SPECIAL == OURS
    assert len(tokenizer) == layout.vocabulary
    text = "a>b c k3 <think> b c </think> = d"
    assert tuple(tokenizer(text)["input_ids"]) == (layout.bos, *layout.ids(text.split()))


def test_a_thought_that_its_length_ended_is_closed() -> None:
    layout = Layout(open_task("rings:7:4"))
    question, answer = layout.question(("a", "k1")), layout.ids(("b",))
    ended, cut = layout.thought(("b", "c")), layout.ids(("b", "c"))
    row = layout.thinking(question, ended, answer)
    assert row == layout.thinking(question, cut, answer)
    assert layout.text(row) == ("<bos>", "a", "k1", "<think>", "b", "c", "</think>", "=", "b")
    assert layout.direct(question, answer) == (*question, layout.equals, *answer)


def test_a_word_that_is_a_mark_is_refused() -> None:
    task = Rings(4, 2)
    task.__dict__["words"] = ("a", "=")
    with pytest.raises(ValueError, match="="):
        Layout(task)


def test_a_word_that_the_task_does_not_have_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'zzz' is in a question or an answer"):
        Layout(Rings(4, 2)).question(("a", "zzz"))
