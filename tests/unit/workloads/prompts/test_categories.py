"""The classifier of prompts."""

import numpy as np
import pytest

from penstock.workloads.prompts.categories import Category, classify
from penstock.workloads.prompts.features import mutate, read_prompt
from penstock.workloads.prompts.task_parts import PromptSource

OF_OTHERS = {
    "Write a Python function that reverses a linked list": Category.CODE_GENERATION,
    "Can you review this pull request and point out bugs?": Category.CODE_REVIEW,
    "Draft a blog post about remote work": Category.CONTENT_WRITING,
    "We need a catchy slogan for our new running shoes": Category.MARKETING_COPY,
    "Analyze the sales data and find trends by region": Category.DATA_ANALYSIS,
    "What is the capital of Australia?": Category.GENERAL_QA,
    "Compose a haiku about autumn leaves": Category.CREATIVE_WRITING,
    "日本の首都": Category.GENERAL_QA,
    "asdf": Category.GENERAL_QA,
}


@pytest.mark.parametrize("prompt", OF_OTHERS)
def test_prompts_as_people_write_them(prompt: str) -> None:
    assert classify(read_prompt(prompt)) is OF_OTHERS[prompt]


def test_prompts_of_templates_are_of_their_category_whatever_was_added() -> None:
    random, source = np.random.default_rng(3), PromptSource()
    for _ in range(500):
        prompt, category = source.draw(random)
        assert classify(prompt) is category
        for action in range(5):
            prompt = mutate(prompt, action)
        assert classify(prompt) is category
