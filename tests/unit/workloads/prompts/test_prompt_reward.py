"""What a step earns, by hand."""

import pytest

from penstock.workloads.prompts.categories import TOKEN_PRICE, QualityReward
from penstock.workloads.prompts.features import mutate

REWARD = QualityReward()


def test_bounds_help_code_and_hurt_a_poem() -> None:
    for prompt, worth in (("Write a Python script.", 0.6), ("Write a poem.", -0.8)):
        earned = REWARD.of(prompt, prompt, mutate(prompt, 3))
        assert earned == pytest.approx(worth - 16 * TOKEN_PRICE)


def test_a_text_that_stays_earns_nothing() -> None:
    assert REWARD.of("Write a poem.", "Write a poem.", "Write a poem.") == 0.0


def test_steps_before_examples_pay_and_neither_does_alone() -> None:
    prompt = "Write a Python script."
    steps = mutate(prompt, 4)
    both = mutate(steps, 2)
    assert REWARD.of(prompt, prompt, steps) < 0
    assert REWARD.of(prompt, prompt, mutate(prompt, 2)) < 0
    assert REWARD.of(prompt, prompt, steps) + REWARD.of(prompt, steps, both) > 0.7


def test_the_sum_over_a_path_depends_on_its_ends_alone() -> None:
    prompt = "Please, review the code of this bug report."
    ways = [(0, 2, 1), (1, 2, 0)]
    sums = []
    for way in ways:
        text, total = prompt, 0.0
        for action in way:
            text, before = mutate(text, action), text
            total += REWARD.of(prompt, before, text)
        sums.append(total)
    assert sums[0] == pytest.approx(sums[1])
    assert sums[0] == pytest.approx(REWARD.of(prompt, prompt, text))
