"""Prompts and responses as rows of token ids."""

from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, TooLong, load_tokenizer, pad

TEMPLATE = "{% for turn in messages %}{{ turn['role'] + ' ' + turn['content'] + ' ' }}{% endfor %}assistant"


def tokenizer() -> Tokenizer:
    """Whose ids are <pad> 0, <bos> 1, <eos> 2, <unk> 3, a 4, b 5, …, user 8, assistant 9."""
    return tiny_models.build_tokenizer(["a", "b", "c", "d", "user", "assistant"])


def test_a_row_is_prompt_response_and_end() -> None:
    assert [1, 4, 5, 6, 7, 2] == Encoder(tokenizer(), 16).encode("a b", "c d")
    assert [1, 2] == Encoder(tokenizer(), 16).encode("", "")


def test_a_long_prompt_loses_its_beginning_and_is_counted() -> None:
    encoder = Encoder(tokenizer(), 5)
    assert [1, 5, 6, 7, 2] == encoder.encode("a b c", "d")
    assert [1, 5, 4, 5, 2] == encoder.encode("a b", "a b")
    assert 2 == encoder.cut
    assert [1, 4, 5, 6, 2] == encoder.encode("", "a b c")
    assert 2 == encoder.cut


def test_a_response_is_never_cut() -> None:
    with pytest.raises(TooLong, match="the response has 5 tokens, 4 fit"):
        Encoder(tokenizer(), 4).encode("a", "a b c d")


def test_a_conversation_goes_through_the_chat_template() -> None:
    turns = (Message("user", "a"),)
    plain = tokenizer()
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(plain, 16).encode(turns, "b")
    plain.chat_template = TEMPLATE
    assert [8, 4, 9, 5, 2] == Encoder(plain, 16).encode(turns, "b")


def test_padding_is_on_the_right_and_masked() -> None:
    ids, mask = pad([[5], [4, 5, 6]], 0)
    assert [[5, 0, 0], [4, 5, 6]] == ids.tolist()
    assert [[1, 0, 0], [1, 1, 1]] == mask.tolist()


@pytest.mark.parametrize(
    ("pad_token", "message"), [("<eos>", "has the pad token of eos"), (None, "has no pad token")]
)
def test_a_tokenizer_without_a_pad_token_of_its_own_is_refused(
    tmp_path: Path, pad_token: str | None, message: str
) -> None:
    unfit = tokenizer()
    unfit.pad_token = pad_token
    unfit.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"model=.*no tokenizer"):
        load_tokenizer(str(tmp_path))
