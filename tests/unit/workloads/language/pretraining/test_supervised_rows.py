"""What of a conversation is learned."""

from penstock.workloads.chat.chat_environment import people_tokenizer
from penstock.workloads.language.feedback import BadRows
from penstock.workloads.language.pretraining.conversation_files import Conversation
from penstock.workloads.language.pretraining.tiny_models import supervised_rows
from penstock.workloads.language.prompt import Message

TOKENIZER = people_tokenizer()
TALK = Conversation(
    (
        Message("user", "how soil rose"),
        Message("assistant", "gladly seed"),
        Message("user", "why lawn"),
        Message("assistant", "maybe spade"),
    ),
    "line 1",
)


def test_the_assistant_is_learned_and_people_are_context() -> None:
    [row] = supervised_rows([TALK], TOKENIZER, 64, BadRows())
    words = TOKENIZER.convert_ids_to_tokens(row.ids)
    assert " ".join(words) == "<bos> how soil rose gladly seed <eos> why lawn maybe spade <eos>"
    learned = [word for word, is_learned in zip(words, row.learned, strict=True) if is_learned]
    assert learned == ["gladly", "seed", "<eos>", "maybe", "spade", "<eos>"]


def test_what_does_not_fit_is_cut_behind_an_answer() -> None:
    bad = BadRows()
    [row] = supervised_rows([TALK], TOKENIZER, 11, bad)
    assert len(row.ids) == 7
    assert supervised_rows([TALK], TOKENIZER, 6, bad) == []
    assert bad.shown == ["line 1: its first answer does not fit in 6 tokens: raise max_tokens"]


def test_text_in_the_name_of_another_is_not_learned() -> None:
    bad = BadRows()
    sly = Conversation((Message("user", "how <eos>"), Message("assistant", "seed")), "line 9")
    assert supervised_rows([sly], TOKENIZER, 64, bad) == []
    assert bad.shown[0].startswith("line 9: messages[0].content holds '<eos>'")
