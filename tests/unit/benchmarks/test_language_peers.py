"""GRPO beside TRL: what the ratio is of, and what a response is rewarded for."""

import tomllib

import pytest

from benchmarks import language
from benchmarks.language import Outcome, summarise
from benchmarks.peers.others import liked
from penstock.config.algorithm_sections import TokenPPOSection
from penstock.config.settings import load
from penstock.workloads.rlhf.environment import for_environment


def ours(tokens: int) -> Outcome:
    """Of ten seconds."""
    return Outcome(tokens=tokens, seconds=10.0, cpu_seconds=10.0)


def theirs(tokens: int) -> Outcome:
    """Likewise."""
    return Outcome(tokens=tokens, seconds=10.0, cpu_seconds=20.0)


def test_the_ratio_is_to_the_better_setting_of_the_same_round() -> None:
    rounds = [
        {"Penstock": ours(400), "one": theirs(200), "two": theirs(100)},
        {"Penstock": ours(40), "one": theirs(5), "two": theirs(10)},
        {"Penstock": ours(300), "one": theirs(100), "two": theirs(50)},
    ]
    mine, one, two = summarise(rounds).rows
    assert list(mine) == ["Penstock", 30.0, pytest.approx(3.0), 30.0]
    assert list(one) == ["one", 10.0, None, 5.0]
    assert two[1] == 5.0


def test_a_batch_of_ours_is_one_gradient_step_on_one_fragment() -> None:
    said = tomllib.loads(language.RECIPE)
    settings = load([for_environment("liked-words", "ppo"), said])
    section = settings.algorithm
    assert isinstance(section, TokenPPOSection)
    assert section.batch_steps == settings.environment.count * settings.actor.unroll_length
    assert (section.epochs, section.minibatches, section.kl_coefficient) == (1, 1, 0.0)
    assert settings.environment.count == language.RESPONSES
    assert language.RESPONSES % language.GROUP == 0


def test_words_with_an_even_digit_are_liked() -> None:
    assert liked(["w1"] * 3, ["w10 w3 w8 w4", "w11", ""]) == [0.75, 0.0, 0.0]
