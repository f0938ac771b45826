"""The seven categories of prompts, and a classifier that says which one a prompt is of.

It counts words that are typical for a category; a prompt without any is a general question. Only the body is
read, so that what mutations add to a prompt does not change its category.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final

from penstock.workloads.prompts.prompt_text import take_apart


class Category(StrEnum):
    """A kind of task that a prompt sets."""

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
"""Words and what they count for; those that begin the prompt of a question count little by themselves."""
_PATTERNS: Final = {
    category: [
        (re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE), points) for words, points in typical.items()
    ]
    for category, typical in _TYPICAL.items()
}
_CACHED_BODIES: Final = 128
_READ_CHARACTERS: Final = 4_000
"""How much of a long body is read: what is wanted is said early."""


def scores(prompt: str) -> dict[Category, int]:
    """Return how typical a prompt is of each category, in points.

    prompt: what `read_prompt` returned.
    """
    return dict(_scores(take_apart(prompt).body[:_READ_CHARACTERS]))


@lru_cache(_CACHED_BODIES)
def _scores(body: str) -> Mapping[Category, int]:
    return {
        category: sum(points * min(2, len(pattern.findall(body))) for pattern, points in patterns)
        for category, patterns in _PATTERNS.items()
    }


def classify(prompt: str) -> Category:
    """Return the category of a prompt: the one with most points, else a general question.

    prompt: what `read_prompt` returned.
    """
    points = scores(prompt)
    best = max(points, key=lambda category: points[category])
    return best if points[best] > points[Category.GENERAL_QA] else Category.GENERAL_QA
