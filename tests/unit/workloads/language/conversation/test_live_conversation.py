"""A conversation under way: exact ids, rewards at once and later, and where its columns are cut."""

import pytest

from penstock.workloads.language.conversation import ChatEncoder, Column, LiveConversation, Sampled
from penstock.workloads.language.prompt import Message
from tests.support.language.chat_words import FORGETTING_TEMPLATE, chat_tokenizer

EOS, USER, ASSISTANT = 2, 5, 6
A, B, C = 8, 9, 10


def conversation(most: int = 64, lag: int | None = None, **kwargs: str) -> LiveConversation:
    """Of the words a, b, c."""
    return LiveConversation(
        ChatEncoder(chat_tokenizer("a", "b", "c", **kwargs)), most_tokens=most, most_lag=lag
    )


def said(*texts: str) -> list[Message]:
    """Of a user and an assistant in turn."""
    return [Message(("user", "assistant")[index % 2], text) for index, text in enumerate(texts)]


def ask(live: LiveConversation, *texts: str, update: int = 0) -> tuple[int, ...]:
    """With room for four tokens of answer."""
    return live.ask(said(*texts), answer_tokens=4, update=update)


def answer(live: LiveConversation, *ids: int, text: str = "b", update: int = 0) -> int:
    """With these ids, which the caller got as this text."""
    sampled = Sampled(ids, tuple(-0.5 - n for n in range(len(ids))), update + 1, update)
    return live.answer(sampled, Message("assistant", text))


def column(live: LiveConversation) -> Column:
    """The only one that is over."""
    (only,) = live.take()
    return only


@pytest.mark.promise("trained-conversation-sampled-later")
def test_three_turns_are_one_column_of_the_ids_that_were_sampled() -> None:
    live = conversation()
    assert ask(live, "a") == (USER, A, EOS, ASSISTANT)
    assert answer(live, B, EOS) == 0
    assert ask(live, "a", "b", "c") == (USER, A, EOS, ASSISTANT, B, EOS, USER, C, EOS, ASSISTANT)
    answer(live, C, C, text="a")
    prompt = ask(live, "a", "b", "c", "a", "b")
    assert prompt[10:] == (C, C, EOS, USER, B, EOS, ASSISTANT)
    answer(live, A, EOS, text="a")
    live.end()
    made = column(live)
    assert made.ids == (*prompt, A, EOS)
    assert [(turn.start, turn.end) for turn in made.turns] == [(4, 6), (10, 12), (17, 19)]
    assert [made.ids[turn.start : turn.end] for turn in made.turns] == [(B, EOS), (C, C), (A, EOS)]
    assert made.terminated
    assert live.cuts.total() == 0


def test_rewards_come_at_once_and_later_and_add_up() -> None:
    live = conversation()
    ask(live, "a")
    answer(live, B, EOS)
    assert live.reward(0.5)
    ask(live, "a", "b", "c")
    answer(live, B, EOS)
    assert live.reward(1.0)
    assert live.reward(0.25, turn=0)
    live.end()
    assert [turn.reward for turn in column(live).turns] == [0.75, 1.0]
    assert not live.reward(1.0, turn=1)
    with pytest.raises(ValueError, match="turn=2: the conversation has 2 so far"):
        live.reward(1.0, turn=2)


def test_another_history_ends_the_column_truncated_and_begins_another() -> None:
    live = conversation()
    ask(live, "a")
    answer(live, B, EOS)
    assert ask(live, "a", "c", "a") == (USER, A, EOS, ASSISTANT, C, EOS, USER, A, EOS, ASSISTANT)
    cut = column(live)
    assert (cut.ids[-2:], cut.terminated, live.cuts) == ((B, EOS), False, {"history": 1})
    assert answer(live, B, EOS) == 1
    live.end()
    second = column(live)
    assert [(turn.start, turn.end) for turn in second.turns] == [(10, 12)]
    assert second.terminated


def test_a_template_that_cannot_go_on_cuts_every_turn() -> None:
    live = conversation(template=FORGETTING_TEMPLATE)
    ask(live, "a")
    answer(live, B, EOS)
    ask(live, "a", "b", "c")
    assert live.cuts == {"history": 1}


def test_a_column_is_cut_where_the_next_answer_would_not_fit() -> None:
    live = conversation(most=14)
    ask(live, "a")
    answer(live, B, B, B, EOS, text="b")
    assert len(ask(live, "a", "b", "c")) == 10
    assert live.cuts == {"length": 1}
    assert len(column(live).turns) == 1
    with pytest.raises(ValueError, match="18 tokens and an answer of up to 4 do not fit into 14"):
        ask(live, "a", "b", "c", "b", "a b c")


def test_a_refused_prompt_leaves_the_conversation_as_it_was() -> None:
    live = conversation(most=16)
    ask(live, "a")
    answer(live, B, EOS)
    with pytest.raises(ValueError, match="do not fit into 16"):
        ask(live, "a", "b", "a a a a a a a a")
    ask(live, "a", "b", "c")
    assert not live.take()
    assert live.cuts.total() == 0


def test_a_column_is_cut_before_its_oldest_token_is_too_old() -> None:
    live = conversation(lag=2)
    ask(live, "a", update=3)
    answer(live, B, EOS, update=3)
    ask(live, "a", "b", "c", update=5)
    answer(live, B, EOS, update=5)
    assert not live.take()
    ask(live, "a", "b", "c", "b", "a", update=6)
    made = column(live)
    assert live.cuts == {"age": 1}
    assert [turn.version for turn in made.turns] == [4, 6]
