"""What a prompt is worth, by its category and its features, and what a step from one to the next earns.

Quality = Σ weights of the features that are there + Σ weights of pairs of them; both depend on the category:
bounds help code and hurt a poem, and examples are worth something behind steps. A step earns the difference
in quality, less a price per token that it adds. Some pairs are worth more than their parts cost, so a
search that looks one step ahead does not find them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.workloads.prompts.categories import Category, classify
from penstock.workloads.prompts.features import Features, features_of, token_count

TOKEN_PRICE: Final = 0.005
"""Reward that each token more takes away."""


class PromptReward(Protocol):
    """What a step from one text to the next earns."""

    def of(self, start: str, before: str, after: str) -> float:
        """Return the reward of a step.

        start: the prompt that the episode began with. before, after: texts of `read_prompt`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What features are worth for one category, in the order of the mutations.

    pairs: what two features are worth together, beside what each is worth, by their numbers.
    """

    features: tuple[float, float, float, float, float]
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def quality(self, features: Features) -> float:
        """Return the sum over the features that are there and over their pairs."""
        there = features.there()
        alone = sum(weight for weight, is_there in zip(self.features, there, strict=True) if is_there)
        return alone + sum(
            weight for (one, other), weight in self.pairs.items() if there[one] and there[other]
        )


_FALLBACK, _LEAN, _EXAMPLES, _CONSTRAINTS, _STEPS = range(5)
BY_CATEGORY: Final[dict[Category, Weights]] = {
    Category.CODE_GENERATION: Weights(
        features=(0.3, 0.3, -0.3, 0.6, -0.3), pairs={(_EXAMPLES, _STEPS): 1.5}
    ),
    Category.CODE_REVIEW: Weights(
        features=(-0.3, 0.2, -0.4, 0.5, 0.6),
        pairs={(_FALLBACK, _EXAMPLES): 1.6, (_CONSTRAINTS, _STEPS): -0.8},
    ),
    Category.CONTENT_WRITING: Weights(
        features=(-0.5, 0.2, 0.5, -0.3, -0.3), pairs={(_CONSTRAINTS, _STEPS): 1.5}
    ),
    Category.MARKETING_COPY: Weights(
        features=(-0.6, 0.3, -0.4, 0.5, -0.3), pairs={(_EXAMPLES, _STEPS): 1.4, (_LEAN, _CONSTRAINTS): 0.2}
    ),
    Category.DATA_ANALYSIS: Weights(
        features=(0.3, 0.2, -0.3, -0.3, 0.5), pairs={(_EXAMPLES, _CONSTRAINTS): 1.5}
    ),
    Category.GENERAL_QA: Weights(
        features=(0.6, 0.3, 0.3, -0.6, -0.6), pairs={(_FALLBACK, _EXAMPLES): -0.7}
    ),
    Category.CREATIVE_WRITING: Weights(
        features=(-0.5, -0.4, 0.7, -0.8, -0.6), pairs={(_EXAMPLES, _STEPS): -0.4}
    ),
}  # fmt: skip


class QualityReward:
    """The reward that comes with the workload: difference in quality, less the price of tokens."""

    def __init__(self, *, token_price: float = TOKEN_PRICE) -> None:
        """token_price: reward that a token takes away."""
        self._token_price = token_price

    def of(self, start: str, before: str, after: str) -> float:
        """Return the reward of a step; 0 where the text stays."""
        if before == after:
            return 0.0
        weights = BY_CATEGORY[classify(start)]
        gained = weights.quality(features_of(after)) - weights.quality(features_of(before))
        return gained - self._token_price * (token_count(after) - token_count(before))
