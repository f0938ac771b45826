"""The seven categories of prompts, a classifier by words of the body, and the built-in reward."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final, Protocol

from penstock.workloads.prompts.features import features_of, take_apart, token_count


class Category(StrEnum):
    """A category of prompts."""

    CODE_GENERATION = "CODE_GENERATION"
    CODE_REVIEW = "CODE_REVIEW"
    CONTENT_WRITING = "CONTENT_WRITING"
    MARKETING_COPY = "MARKETING_COPY"
    DATA_ANALYSIS = "DATA_ANALYSIS"
    GENERAL_QA = "GENERAL_QA"
    CREATIVE_WRITING = "CREATIVE_WRITING"


_MAKE: Final = "(?:write|create|implement|build|generate|program|draft|outline|compose|tell|invent) (?:me )?"
_WHICH: Final = r"(?:an? |the |some )?(?:\w+ ){0,2}"
_TYPICAL: Final[dict[Category, dict[str, int]]] = {
    Category.CODE_GENERATION: {
        f"{_MAKE}{_WHICH}(?:function|script|program|class|code|component|endpoint|query|parser|tests?)": 4,
        "implement|refactor": 2,
        "function|script|program|code|class|algorithm|compiler|api|sql|html|css|regex": 1,
        "python|javascript|typescript|java|rust": 1,
    },
    Category.CODE_REVIEW: {
        r"(?:review|debug|audit|fix|inspect) (?:\w+ ){0,3}(?:code|function|bug|diff|patch|script|error)": 5,
        "code review|pull request|stack trace|what is wrong with (?:this|my) (?:code|function)": 5,
        "review|debug|bugs?|vulnerability|vulnerabilities|lint|diff|patch": 2,
    },
    Category.CONTENT_WRITING: {
        f"{_MAKE}{_WHICH}(?:article|blog post|essay|post|guide|report|summary|newsletter|tutorial)": 4,
        "article|blog|essay|newsletter|guide|tutorial|editorial|paragraph|headline": 2,
    },
    Category.MARKETING_COPY: {
        "ad copy|product description|landing page|call to action|press release": 5,
        "sales (?:pitch|page|letter)": 5,
        "slogan|tagline|advert|advertisement|campaign|marketing|brand|customers?|promote|sell": 3,
    },
    Category.DATA_ANALYSIS: {
        r"(?:analy[sz]e|plot|visuali[sz]e|summari[sz]e) (?:\w+ ){0,3}(?:data|dataset|table|survey|csv)": 5,
        "dataset|spreadsheet|csv|correlation|regression|statistics|outliers?|trends?|average|chart": 2,
        "analy[sz]e": 2,
        "data|table|numbers|survey": 1,
    },
    Category.GENERAL_QA: {
        r"(?<!.)\W*(?:explain|answer|what|who|when|where|why|which|how|is|are|do|does|did|can|could)": 1,
        "explain|answer this|tell me what|what would you say": 4,
    },
    Category.CREATIVE_WRITING: {
        f"{_MAKE}{_WHICH}(?:poem|story|song|haiku|sonnet|tale|novel|scene|limerick|dialogue|fable)": 5,
        "poem|poetry|story|haiku|sonnet|limerick|fairy tale|fable|lyrics|fiction|character|verse|rhyme": 3,
    },
}
"""Patterns of words and their points; question words alone have few."""
_PATTERNS: Final = {
    category: [
        (re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE), points) for words, points in typical.items()
    ]
    for category, typical in _TYPICAL.items()
}
_CACHED_BODIES: Final = 128
_READ_CHARACTERS: Final = 4_000
"""Characters of a body that are read: the task stands at its beginning."""


def scores(prompt: str) -> dict[Category, int]:
    """Return the points of a prompt of `read_prompt` in each category."""
    return dict(_scores(take_apart(prompt).body[:_READ_CHARACTERS]))


@lru_cache(_CACHED_BODIES)
def _scores(body: str) -> Mapping[Category, int]:
    return {
        category: sum(points * min(2, len(pattern.findall(body))) for pattern, points in patterns)
        for category, patterns in _PATTERNS.items()
    }


def classify(prompt: str) -> Category:
    """Return the category with most points, else a general question."""
    points = scores(prompt)
    best = max(points, key=lambda category: points[category])
    return best if points[best] > points[Category.GENERAL_QA] else Category.GENERAL_QA


# ---- Subjects of the built-in prompts by category, for runs without a corpus.

SUBJECTS: Final[dict[Category, tuple[str, ...]]] = {
    Category.CODE_GENERATION: (
        "parses dates in several formats", "merges two sorted lists", "validates an email address",
        "counts words in a file", "reads settings from a file", "retries a failed download",
        "rotates log files", "converts Roman numerals", "finds duplicates in a folder",
        "caches results for an hour", "sends a reminder every Monday", "sorts invoices by due date",
    ),
    Category.CODE_REVIEW: (
        "the login times out after a minute", "the printer queue never empties", "totals differ by a cent",
        "the menu is empty after an update", "uploads stop at two gigabytes", "the cache grows all night",
        "users are logged out at midnight", "the search ignores accents", "the clock is an hour late",
        "two orders get one number", "the second page is blank", "passwords are written to the log",
    ),
    Category.CONTENT_WRITING: (
        "the history of lighthouses", "saving water at home", "how cities plant trees", "the first railways",
        "learning a language at sixty", "why bees matter", "the rules of a good meeting",
        "old houses and their heating", "the life of a glacier", "reading to children",
        "what libraries lend today", "the return of the night train",
    ),
    Category.MARKETING_COPY: (
        "a bicycle for carrying children", "a bakery that opens at five", "a water filter without plastic",
        "a repair shop for radios", "a language course by post", "a raincoat made of old sails",
        "a coffee from one farm", "a museum of clocks", "a lamp that reads the weather",
        "a tea for long evenings", "a garden in a box", "a hotel without screens",
    ),
    Category.DATA_ANALYSIS: (
        "ticket sales of a theatre by weekday", "rainfall over forty years", "delays of a bus line",
        "complaints by product and month", "power use of three schools", "heights of a class over a year",
        "loans of a library by age", "prices of bread in ten cities", "visits to a page by hour",
        "yield of an orchard by variety", "defects by machine and shift", "answers of a survey on noise",
    ),
    Category.GENERAL_QA: (
        "the sky is blue", "ships float", "the moon has phases", "bread rises", "cats purr",
        "leap years exist",        "metal feels colder than wood", "onions make people cry",
        "magnets have two poles",
        "glass is transparent", "planes leave trails", "the sea is salty",
    ),
    Category.CREATIVE_WRITING: (
        "a lighthouse keeper and a whale", "the last tram of the night", "a clock that runs backwards",
        "two rivers that meet", "a letter that came too late", "a fox in the city", "the colour of rain",
        "a violin without strings", "the sleep of mountains", "a key without a door",
        "a grandmother who was a pilot", "snow in July",
    ),
}  # fmt: skip


# ---- The quality of a prompt by its category and features, and the reward of a step.

TOKEN_PRICE: Final = 0.005
"""Cost of each added token."""


def token_cost(before: str, after: str) -> float:
    return TOKEN_PRICE * (token_count(after) - token_count(before))


class PromptReward(Protocol):
    """The reward of a step from one text to the next."""

    def of(self, start: str, before: str, after: str) -> float:
        """Return the reward of a step. start: the episode's first prompt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The value of features in one category. pairs: the added value of two features, by their indices."""

    features: tuple[float, float, float, float, float]
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def quality(self, there: Sequence[bool]) -> float:
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
    """The built-in reward: the difference in quality, less the cost of tokens."""

    def of(self, start: str, before: str, after: str) -> float:
        if before == after:
            return 0.0
        weights = BY_CATEGORY[classify(start)]
        gained = weights.quality(features_of(after)) - weights.quality(features_of(before))
        return gained - token_cost(before, after)
