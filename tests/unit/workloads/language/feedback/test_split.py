"""Which examples are not trained on."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback import Scored, split


def examples(prompts: list[int]) -> list[Scored]:
    """One for each."""
    return [
        Scored(prompt=f"p{prompt}", response=f"r{index}", score=0.0, where=f"row {index}")
        for index, prompt in enumerate(prompts)
    ]


@given(st.lists(st.integers(0, 20), min_size=2), st.integers(0, 3))
def test_no_prompt_is_on_both_sides_and_nothing_is_lost(prompts: list[int], seed: int) -> None:
    given_examples = examples(prompts)
    if len(set(prompts)) < 2:
        with pytest.raises(ConfigurationError, match="all examples are of one prompt"):
            split(given_examples, share=0.2, seed=seed)
        return
    sides = split(given_examples, share=0.2, seed=seed)
    assert sides.train
    assert sides.validation
    assert not {one.prompt for one in sides.train} & {one.prompt for one in sides.validation}
    assert sorted(one.where for one in given_examples) == sorted(one.where for side in sides for one in side)


def test_the_share_is_kept_to_within_a_prompt() -> None:
    sides = split(examples([index // 2 for index in range(1000)]), share=0.2, seed=0)
    assert 200 <= len(sides.validation) <= 201


def test_the_order_of_the_file_does_not_matter_and_the_seed_does() -> None:
    rows = examples(list(range(100)))
    shuffled = random.Random(1).sample(rows, len(rows))
    first, again, other = (
        {one.prompt for one in split(some, share=0.2, seed=seed).validation}
        for some, seed in ((rows, 0), (shuffled, 0), (rows, 1))
    )
    assert first == again
    assert first != other


def test_a_share_of_nothing_validates_on_nothing() -> None:
    sides = split(examples([1, 1]), share=0.0, seed=0)
    assert (2, 0) == (len(sides.train), len(sides.validation))
