"""A tokenizer that is learned from texts: it knows every text, and a conversation's ids say who speaks.

And the training of a model that is made on the spot.
"""

import pytest
import torch

from penstock.runtime.retry import Interrupted
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.prompt import Message
from tests.support.language.thread_watch import ThreadWatch, two_threads


def test_every_text_comes_back_as_it_was() -> None:
    tokenizer = tiny_models.learn_tokenizer(["I'm well, thanks. And you?"] * 3, size=300, max_tokens=64)
    for text in ("I'm well, thanks. And you?", "Zürich: 雪 – 3 × 4!", "  ends are cut  "):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.strip()


def test_questions_and_answers_have_ends_of_their_own() -> None:
    tokenizer = tiny_models.learn_tokenizer(["a b c"], size=300, max_tokens=64)
    encoder = ChatEncoder(tokenizer)
    asked, answer = [Message("user", "a b")], Message("assistant", "c")
    ask = tokenizer.convert_tokens_to_ids("<ask>")
    begun = encoder.begin(asked)
    assert (begun[0], begun[-1]) == (tokenizer.bos_token_id, ask)
    sampled = [*tokenizer("c", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    more = encoder.follow(asked, sampled[-1], [Message("user", "a")])
    assert [*begun, *sampled, *more] == encoder.begin([*asked, answer, Message("user", "a")])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_tiny_model_learns_in_one_thread_and_leaves_the_others_as_they_were(is_stopped: bool) -> None:
    tokenizer = tiny_models.build_tokenizer(["a", "b"])
    model, stop = tiny_models.build_model(tokenizer, seed=0), ThreadWatch()
    with two_threads():
        if is_stopped:
            stop.set()
            with pytest.raises(Interrupted):
                tiny_models.pretrain(model, tokenizer, [("a", "b")], steps=1, seed=0, stop=stop)
        else:
            tiny_models.pretrain(model, tokenizer, [("a", "b")], steps=1, seed=0, stop=stop)
        assert stop.threads == {1}
        assert torch.get_num_threads() == 2
