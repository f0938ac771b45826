"""How near an answer is to those of the packaged conversations: a measure, where people have said nothing.

Of two texts it is the share of words that they have in common (F1, each word as often as it stands in both);
of an answer, that of the nearest one that is known to its question, 0 … 1. It says whether a model still
speaks as the one that training began with, and nothing of whether anybody likes it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

from penstock.workloads.language.pretraining.packaged_conversations import packaged_conversations
from penstock.workloads.language.prompt import Prompt


def closeness(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return the measure of each response, as a source of rewards; 0 where the question is not known.

    Raises ConfigurationError where the package is not installed.
    """
    return [
        _nearest(_question(prompt), response) for prompt, response in zip(prompts, responses, strict=True)
    ]


def _question(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1].content


def _nearest(question: str, response: str) -> float:
    said = _words(response)
    return max((_common(said, _words(one)) for one in _known().get(question, ())), default=0.0)


def _common(first: Counter[str], second: Counter[str]) -> float:
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 0.0


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


@cache
def _known() -> dict[str, tuple[str, ...]]:
    """Return the answers by question."""
    found: dict[str, tuple[str, ...]] = {}
    for one in packaged_conversations():
        for asked, answer in zip(one.messages[::2], one.messages[1::2], strict=True):
            found[asked.content] = (*found.get(asked.content, ()), answer.content)
    return found
