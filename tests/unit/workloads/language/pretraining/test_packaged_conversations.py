"""Conversations of a package: they take turns, each is there once, and a measure is made of their answers."""

import pytest

from penstock.workloads.language.pretraining.conversation_files import (
    as_typed,
    closeness,
    packaged_conversations,
)

pytest.importorskip("chatterbot_corpus", reason="needs the extra data")


def test_they_take_turns_and_each_is_there_once() -> None:
    found = packaged_conversations()
    assert len(found) > 700
    for one in found:
        assert [said.role for said in one.messages] == ["user", "assistant"] * (len(one.messages) // 2)
        assert all(said.content.strip() for said in one.messages)
    assert len({one.messages for one in found}) == len(found)


def test_what_people_say_is_also_had_as_they_type_it() -> None:
    one = packaged_conversations()[0]
    typed = as_typed(one)
    assert typed.messages[0].content == one.messages[0].content.lower().replace("?", "").replace(".", "")
    assert typed.messages[1] == one.messages[1]


def test_an_answer_is_measured_by_the_nearest_that_is_known() -> None:
    one = packaged_conversations()[0]
    question, answer = one.messages[0].content, one.messages[1].content
    assert closeness([question, one.messages[:1]], [answer, answer]) == [1.0, 1.0]
    assert closeness([question, "never asked"], ["xyzzy", answer]) == [0.0, 0.0]
    assert 0 < closeness([question], [answer.split()[0]])[0] < 1
