"""How much simulated people like answers, as a source of rewards, −1 to 1; and one that says nothing."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.workloads.chat.people import USUAL, read_profile
from penstock.workloads.language.prompt import Prompt

LIKED: Final = "tests.support.chat.liked_answers:liked"
OF_OTHERS: Final = "tests.support.chat.liked_answers:of_others"


def liked(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return the exact chance of a thumb up by somebody, moved to −1 … 1."""
    features = [read_profile(_asked(prompt), one) for prompt, one in zip(prompts, responses, strict=True)]
    rewards: list[float] = (2 * USUAL.thumb_chance(np.array(features, np.float64)) - 1).tolist()
    return rewards


def of_others(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return the rewards of one another's answers."""
    rewards = liked(prompts, responses)
    return [*rewards[1:], rewards[0]]


def _asked(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1].content
