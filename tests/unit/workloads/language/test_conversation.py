import numpy as np
import pytest
from tokenizers import normalizers

from penstock.actor.rollout.generator import HeaderFields
from penstock.config.settings import ConfigurationError
from penstock.learner.algorithms.responses import Grid, read_responses
from penstock.learner.batch import check_meaning
from penstock.protocol.fragment import Fragment, WeightSpan, check
from penstock.protocol.messages import Publication
from penstock.protocol.schema import TensorRule, fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.conversation import (
    ChatEncoder,
    Column,
    ColumnFragments,
    LiveConversation,
    NotContinued,
    Sampled,
    column_tensors,
    weight_spans,
)
from penstock.workloads.language.pretraining.tiny_models import build_tokenizer
from penstock.workloads.language.prompt import Message, ToolCall
from penstock.workloads.language.tokenizer import Encoder
from tests.support.experience.token_experience import batch_of
from tests.support.language.tiny_models import CUT, FORGETTING_TEMPLATE, NONE, TWO, chat_tokenizer

EOS, USER, ASSISTANT, TOOL = 2, 5, 6, 7
A, B, C, ADD = 8, 9, 10, 11


def encoder(**kwargs: str) -> ChatEncoder:
    return ChatEncoder(chat_tokenizer("a", "b", "c", "add", **kwargs))


def test_a_prompt_ends_where_the_assistant_begins() -> None:
    ask = [Message("user", "a b")]
    assert encoder().begin(ask) == [USER, A, B, EOS, ASSISTANT]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert encoder().begin(ask, tools) == [4, ADD, EOS, USER, A, B, EOS, ASSISTANT]


@pytest.mark.parametrize(("last", "first"), [(EOS, []), (C, [EOS])])
def test_the_next_prompt_begins_after_the_sampled_end(last: int, first: list[int]) -> None:
    follow = encoder().follow([Message("user", "a")], last, [Message("user", "b")])
    assert follow == [*first, USER, B, EOS, ASSISTANT]


def test_prompt_answer_and_later_turns_equal_the_rendering_of_all() -> None:
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
    said = [Message("user", "a")]
    with pytest.raises(ValueError, match=r"tools\[0\] holds '<assistant>'"):
        encoder().begin(said, [tool])
    with pytest.raises(ValueError, match=r"tools\[0\] holds '<assistant>'"):
        encoder().follow(said, EOS, said, [tool])


ROLES = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
PARTS = ROLES.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }} {% endfor %}")


def test_words_and_blanks_that_are_tokens_of_their_own_are_text() -> None:
    tokenizer = chat_tokenizer("a", "b", "c", "add")
    tokenizer.add_tokens(["\n\n", "    ", "COVID-19", "==", "<b>", "user", "<|end|>", "<think>", "</think>"])
    tokenizer.chat_template = ROLES.replace("<eos>", "<|end|>")
    made = ChatEncoder(tokenizer)
    for text in ("a\n\nb", "a\n    b", "what is COVID-19?", "a == b", "<b>a</b>", "a user"):
        ids = made.begin([Message("user", text)])
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids[1:-1]
    for text in ("a <|end|>", "<think>", "<user>"):
        with pytest.raises(ValueError, match="is a control token"):
            made.begin([Message("user", text)])
    answered = Message("assistant", "<think>a</think> b")
    assert made.begin([Message("user", "a"), answered, Message("user", "b")])
    with pytest.raises(ValueError, match="is a control token"):
        made.begin([Message("user", "a"), Message("assistant", "a <|end|>"), Message("user", "b")])


def test_a_word_that_ends_answers_is_text_where_others_say_it() -> None:
    tokenizer = chat_tokenizer("a", "b", "c")
    tokenizer.named_ends = [B]
    assert ChatEncoder(tokenizer).begin([Message("user", "a b")]) == [USER, A, B, EOS, ASSISTANT]


def test_content_is_given_as_parts_to_a_template_that_reads_them() -> None:
    asked = [Message("system", "c"), Message("user", "a b"), Message("assistant", "b"), Message("user", "a")]
    read = [ChatEncoder(chat_tokenizer("a", "b", "c", template=one)).begin(asked) for one in (ROLES, PARTS)]
    assert read[0] == read[1]
    prompts = [Encoder(chat_tokenizer("a", "b", "c", template=one), 64) for one in (ROLES, PARTS)]
    assert prompts[0].prompt_ids(tuple(asked)) == prompts[1].prompt_ids(tuple(asked)) == read[0]


def test_a_template_that_leaves_out_what_somebody_says_is_refused() -> None:
    silent = ROLES.replace("{{ m.content }}", "{{ m.text }}")
    with pytest.raises(ValueError, match="the chat template leaves out what users say"):
        ChatEncoder(chat_tokenizer("a", template=silent))
    deaf = "{% for m in messages if m.role != 'system' %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
    made = ChatEncoder(chat_tokenizer("a", "b", template=deaf))
    assert made.begin([Message("user", "a")])
    with pytest.raises(ValueError, match=r"messages\[0\]\.content: .* leaves out what a system says"):
        made.begin([Message("system", "a"), Message("user", "b")])


THOUGHTLESS = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %} <eos> {% endfor %}"
)


def test_a_thought_that_the_template_takes_out_later_cannot_be_continued() -> None:
    made = ChatEncoder(chat_tokenizer("a", "b", template=THOUGHTLESS))
    before, new = [Message("user", "a")], [Message("user", "b")]
    assert made.follow(before, EOS, new, said="b") == [USER, A + 1, EOS]
    with pytest.raises(NotContinued, match="changes earlier messages"):
        made.follow(before, EOS, new, said="<think>a</think>b")


def test_what_a_user_writes_is_no_mark() -> None:
    made, said = encoder(), [Message("user", "a")]
    plain = made.follow(said, EOS, [Message("user", "b")])
    assert made.follow([Message("user", "⟦answer⟧")], EOS, [Message("user", "b")]) == plain
    assert made.follow(said, EOS, [Message("user", "⟦answer⟧")]) == [USER, 3, EOS, ASSISTANT]


CALLS = ROLES.replace("{{ m.content }}", "{{ m.content }} {{ (m.tool_calls or []) | tojson }}")


@pytest.mark.parametrize(
    "arguments",
    [r'{"x": "\u003ceos\u003e"}', r'{"\u003ceos>": 1}', r'[["<\u0065os>"]]', r'"\u003ceos\u003e"'],
)
def test_control_tokens_made_of_escapes_are_refused(arguments: str) -> None:
    made = ChatEncoder(chat_tokenizer("a", "b", template=CALLS))
    called = Message("assistant", "", (ToolCall("call-0", "add", arguments),))
    with pytest.raises(ValueError, match="become '<eos>' in the prompt"):
        made.begin([Message("user", "a"), called, Message("tool", "b", tool_call_id="call-0")])


def test_a_control_token_that_the_template_makes_of_a_text_is_refused() -> None:
    cut = ROLES.replace("{{ m.content }}", "{{ m.content | replace('~', '') }}")
    made = ChatEncoder(chat_tokenizer("a", "b", template=cut))
    for ask in (made.begin, lambda new: made.follow([Message("user", "a")], EOS, new)):
        assert ask([Message("user", "a ~ b")])
        with pytest.raises(ValueError, match="become '<eos>' in the prompt"):
            ask([Message("user", "a <e~os> b")])


def test_a_control_token_that_the_tokenizer_normalises_from_a_text_is_refused() -> None:
    tokenizer = chat_tokenizer("a", "b", "c", "x", template=ROLES.replace("<eos>", "<|end|>"))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens(["<|end|>"])
    made = ChatEncoder(tokenizer)
    assert made.begin([Message("user", "a - <> unknown ²")])
    with pytest.raises(ValueError, match=r"become '<\|end\|>' in the prompt"):
        made.begin([Message("user", "a \uff1c|end|\uff1e b")])


def test_the_next_prompt_begins_after_whichever_end_was_sampled() -> None:
    tokenizer = chat_tokenizer("a", "b", "c", template=ROLES.replace("<eos>", "<|end|>"))
    tokenizer.add_tokens(["<|end|>"])
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    made, said, new = ChatEncoder(tokenizer), [Message("user", "a")], [Message("user", "b")]
    assert made.follow(said, end, new) == [USER, B, end]
    assert made.follow(said, EOS, new) == made.follow(said, C, new) == [end, USER, B, end]


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set tokenizer\.chat_template"):
        ChatEncoder(build_tokenizer(["a"]))


def test_messages_that_cannot_be_rendered_are_refused_with_the_reason() -> None:
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
    called = Message("assistant", "", (ToolCall("call-0", "add", "[" * 100_000),))
    assert encoder().begin([Message("user", "a"), called, Message("tool", "b", tool_call_id="call-0")])


def test_a_model_of_some_words_refuses_other_words() -> None:
    made = ChatEncoder(chat_tokenizer("a", "b", "c", "add"), words=("a", "b"))
    assert made.begin([Message("user", " a\n b ")]) == [USER, A, B, EOS, ASSISTANT]
    with pytest.raises(ValueError, match=r"messages\[1\].content: 'c' is none of the 2 words of the model"):
        made.begin([Message("user", "a"), Message("user", "b c d")])
    with pytest.raises(ValueError, match="'x{40}' is none of"):
        made.begin([Message("user", "x" * 1_000)])


def test_a_column_holds_what_the_assistant_said_rewards_at_each_turn_and_one_end() -> None:
    made = column_tensors([TWO, CUT, NONE], 0)
    np.testing.assert_array_equal(made["observation"][:, 0], TWO.ids)
    np.testing.assert_array_equal(made["observation"][:, 1], [5, 6, 9, *[0] * 6])
    np.testing.assert_array_equal(made["action"], made["observation"][1:])
    np.testing.assert_array_equal(made["valid"][:, 0], np.array([0, 0, 1, 1, 0, 0, 0, 1], bool))
    np.testing.assert_array_equal(made["log_prob"][:, 0], [0, 0, -1, -2, 0, 0, 0, -3])
    np.testing.assert_array_equal(made["reward"][:, 0], [0, 0, 0, 0.5, 0, 0, 0, 1])
    assert not made["valid"][:, 2].any()
    assert np.argwhere(made["terminated"]).tolist() == [[7, 0]]
    assert np.argwhere(made["truncated"]).tolist() == [[1, 1]]
    assert list(zip(made["final/step"], made["final/slot"], strict=True)) == [(1, 1), (7, 0)]
    np.testing.assert_array_equal(made["final/observation"], [9, 11])


def test_each_turn_keeps_the_version_that_sampled_it() -> None:
    assert weight_spans([TWO, NONE], 8) == (WeightSpan(0, 0, 8, 3, 2),)
    assert weight_spans([TWO, CUT], 8) == (
        WeightSpan(0, 2, 2, 3, 2), WeightSpan(0, 7, 1, 3, 2), WeightSpan(1, 1, 1, 4, 3),
    )  # fmt: skip
    with pytest.raises(ValueError, match="none has a sampled token"):
        weight_spans([NONE], 1)


SCHEMA = fragment_schema(Discrete(12), Discrete(12))
FIELDS = HeaderFields(
    run="r", session=1, sequence=1, weights=Publication(version=4, update=3, sha256="", size=0), round=0
)


def cut(*columns: Column) -> Fragment:
    made, _ = ColumnFragments(SCHEMA, len(columns), 0).cut(columns, FIELDS)
    check(made, SCHEMA, "r")
    check_meaning(made.header, made.arrays())
    return made


def test_a_conversation_is_one_row_of_the_learner() -> None:
    found = read_responses(batch_of(cut(TWO, CUT, NONE)))
    assert found is not None
    assert found.action.tolist() == [9, 2, 11, 9]
    assert found.reward.tolist() == [0.0, 0.5, 1.0, -1.0]
    assert found.turn_ends.tolist() == [False, True, False, False]
    assert found.cut_short.tolist() == [False, True]
    assert Grid(found).spread(found.reward).tolist() == [[0.0, -1.0], [0.5, 0.0], [1.0, 0.0]]


@pytest.mark.promise("trained-conversation-sampled-later")
def test_the_header_names_the_version_of_each_turn() -> None:
    assert {(span.slot, span.version) for span in cut(TWO, CUT).header.weights} == {(0, 3), (1, 4)}
    assert cut(TWO, CUT).header.oldest_update == 2
    assert [span.version for span in cut(NONE).header.weights] == [4]


def test_episodes_are_reported_with_all_that_they_earned() -> None:
    _, episodes = ColumnFragments(SCHEMA, 3, 0).cut([TWO, CUT, NONE], FIELDS)
    told = sorted((one.slot_id, one.episode_return, one.length, one.terminated) for one in episodes)
    np.testing.assert_equal(told, [(0, 1.5, 3, True), (1, -1.0, 1, False)])


def test_an_unknown_tensor_of_columns_is_refused() -> None:
    extra = fragment_schema(Discrete(12), Discrete(12), (TensorRule(name="extra/other", dtype="float32"),))
    with pytest.raises(ConfigurationError, match=r"tensors \['extra/other'\]"):
        ColumnFragments(extra, 1, 0)


def conversation(most: int = 64, lag: int | None = None, **kwargs: str) -> LiveConversation:
    return LiveConversation(
        ChatEncoder(chat_tokenizer("a", "b", "c", **kwargs)), most_tokens=most, most_lag=lag
    )


def said(*texts: str) -> list[Message]:
    return [Message(("user", "assistant")[index % 2], text) for index, text in enumerate(texts)]


def ask(live: LiveConversation, *texts: str, update: int = 0) -> tuple[int, ...]:
    return live.ask(said(*texts), answer_tokens=4, update=update)


def answer(live: LiveConversation, *ids: int, text: str = "b", update: int = 0) -> int:
    sampled = Sampled(ids, tuple(-0.5 - n for n in range(len(ids))), update + 1, update)
    return live.answer(sampled, Message("assistant", text))


def column(live: LiveConversation) -> Column:
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


def test_a_template_that_cannot_continue_cuts_every_turn() -> None:
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


def test_a_refused_prompt_leaves_the_conversation_unchanged() -> None:
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
