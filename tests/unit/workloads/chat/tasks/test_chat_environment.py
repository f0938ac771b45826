"""A conversation as Gymnasium has it: tokens in, a reward and the next message at the end of an answer."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.chat_environment import ChatEnvironment, people_tokenizer
from penstock.workloads.chat.people import USUAL, read_profile
from penstock.workloads.language.pretraining.tiny_models import build_tokenizer
from tests.support.chat.opinions import FEATURES, PROFILES

TOKENIZER = people_tokenizer()


def say(environment: ChatEnvironment, answer: str) -> list[tuple[float, bool, bool]]:
    """Give an answer token by token; reward, terminated, truncated of each."""
    ids = [*TOKENIZER(answer, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    return [environment.step(np.int64(one))[1:4] for one in ids]


@pytest.mark.parametrize("reward", ["chance", "thumb"])
def test_it_is_what_gymnasium_expects(reward: str) -> None:
    made = gymnasium.make(
        "penstock.workloads.chat.tasks:Chat-v0", reward=reward, max_length=64, render_mode="ansi"
    )
    check_env(made.unwrapped)


def test_an_answer_earns_at_its_end_and_then_the_next_message_comes() -> None:
    environment = ChatEnvironment(max_length=64, render_mode="ansi")
    _, info = environment.reset(seed=1)
    answer = "gladly seed three"
    for turn in range(3):
        asked = info["messages"][-1]
        assert asked["role"] == "user"
        *before, (reward, terminated, truncated) = say(environment, answer)
        assert before == [(0.0, False, False)] * 3
        liked = USUAL.thumb_chance(FEATURES)[PROFILES.index(read_profile(asked["content"], answer))]
        assert reward == pytest.approx(liked)
        assert (terminated, truncated) == (turn == 2, False)
        info = environment._info()
    assert [one["role"] for one in info["messages"]] == ["user", "assistant"] * 3
    shown = environment.render()
    assert shown is not None
    assert shown.count(f"assistant: {answer}\n") == 3


def test_the_observation_is_the_whole_conversation() -> None:
    environment = ChatEnvironment(max_length=64)
    first, info = environment.reset(seed=2)
    say(environment, "maybe")
    seen = environment._observe()
    used = seen[seen != TOKENIZER.pad_token_id]
    words = TOKENIZER.decode(used)
    asked, answered, follows = (one["content"] for one in environment._info()["messages"])
    assert words == f"<bos> {asked} {answered} <eos> {follows}"
    assert (seen[: (first != TOKENIZER.pad_token_id).sum()] == first[first != TOKENIZER.pad_token_id]).all()
    assert info["messages"][0]["content"] == asked


def test_an_answer_that_does_not_end_is_cut() -> None:
    environment = ChatEnvironment(max_length=64, turn_tokens=4, turns=1)
    environment.reset(seed=3)
    the = TOKENIZER.convert_tokens_to_ids("the")
    told = [environment.step(np.int64(the)) for _ in range(4)]
    assert [one[2] for one in told] == [False, False, False, True]
    assert told[-1][4]["response"] == "the the the the"


def test_a_conversation_without_room_is_truncated() -> None:
    environment = ChatEnvironment(max_length=7)
    environment.reset(seed=4)
    the = np.int64(TOKENIZER.convert_tokens_to_ids("the"))
    told = [environment.step(the) for _ in range(3)]
    assert [one[3] for one in told] == [False, False, True]
    environment = ChatEnvironment(max_length=8)
    environment.reset(seed=4)
    assert say(environment, "the")[-1][1:] == (False, True)
    with pytest.raises(ConfigurationError, match="max_length=4: the first message has 4 tokens"):
        ChatEnvironment(max_length=4).reset()


def test_a_function_may_give_the_reward() -> None:
    made = ChatEnvironment(reward="penstock.workloads.rlhf.sentiment:true_rewards", max_length=64, turns=1)
    made.reset(seed=5)
    assert say(made, "seed")[-1] == (0.0, True, False)
    made.close()


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="taste='sour'"):
        ChatEnvironment(taste="sour")
    with pytest.raises(ConfigurationError, match="turns=0: must be at least 1"):
        ChatEnvironment(turns=0)
    with pytest.raises(ConfigurationError, match="the tokenizer has no chat template"):
        ChatEnvironment(tokenizer=build_tokenizer(["a"]))
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        ChatEnvironment(model="./nowhere")
