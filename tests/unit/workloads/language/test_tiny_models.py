"""A tokenizer that is learned from texts: it knows every text, and a conversation's ids say who speaks."""

from workloads.language import tiny_models
from workloads.language.conversation.chat_encoder import ChatEncoder
from workloads.language.prompt import Message


def test_every_text_comes_back_as_it_was() -> None:
    """Also what it has never seen, in any script."""
    tokenizer = tiny_models.learn_tokenizer(["I'm well, thanks. And you?"] * 3, size=300, max_tokens=64)
    for text in ("I'm well, thanks. And you?", "Zürich: 雪 – 3 × 4!", "  ends are cut  "):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.strip()


def test_questions_and_answers_have_ends_of_their_own() -> None:
    """What somebody asks ends with one token, an answer with the end token, and a conversation goes on."""
    tokenizer = tiny_models.learn_tokenizer(["a b c"], size=300, max_tokens=64)
    encoder = ChatEncoder(tokenizer)
    asked, answer = [Message("user", "a b")], Message("assistant", "c")
    ask = tokenizer.convert_tokens_to_ids("<ask>")
    begun = encoder.begin(asked)
    assert (begun[0], begun[-1]) == (tokenizer.bos_token_id, ask)
    sampled = [*tokenizer("c", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    more = encoder.follow(asked, sampled[-1], [Message("user", "a")])
    assert [*begun, *sampled, *more] == encoder.begin([*asked, answer, Message("user", "a")])
