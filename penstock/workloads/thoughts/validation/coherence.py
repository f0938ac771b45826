"""How well a thought is formed, and how far it is from what would have been said without it; pure functions.

    coherence = 0.4 · semantic + 0.3 · syntactic + 0.3 · predictive

semantic: share of its steps that legally follow those before. syntactic: share of its words that are symbols
of the task. predictive: geometric mean of the probabilities of its tokens. Each lies in 0 … 1.
"""

import math
from collections.abc import Sequence
from typing import Final

from penstock.workloads.thoughts.tasks.example import Task, follow

SEMANTIC: Final = 0.4
SYNTACTIC: Final = 0.3
PREDICTIVE: Final = 0.3


def coherence(task: Task, question: Sequence[str], words: Sequence[str], log_prob: Sequence[float]) -> float:
    """Return the coherence of a thought on a question.

    words: without the mark that ends it. log_prob: of each of its tokens, that mark among them, in nats. A
    thought without a word has none of the first two.
    """
    predictive = math.exp(sum(log_prob) / len(log_prob)) if len(log_prob) else 0.0
    if not words:
        return PREDICTIVE * predictive
    symbols = set(task.symbols)
    syntactic = sum(word in symbols for word in words) / len(words)
    semantic = legal_share(task, question, words)
    return SEMANTIC * semantic + SYNTACTIC * syntactic + PREDICTIVE * predictive


def legal_share(task: Task, question: Sequence[str], words: Sequence[str]) -> float:
    """Return the share of the words of a thought that legally follow those before; 0 for no word.

    A task is asked about thoughts of its symbols alone: nothing is legal behind another word.
    """
    symbols, legal = set(task.symbols), 0
    for place, word in enumerate(words):
        if place and words[place - 1] not in symbols:
            break
        left = follow(task, question, words[:place])
        legal += left is not None and left.steps[:1] == (word,)
    return legal / max(1, len(words))


def edit_distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return Levenshtein's distance over the longer length, in 0 … 1; 0 for two that are empty."""
    if not one and not other:
        return 0.0
    before = list(range(len(other) + 1))
    for row, left in enumerate(one, 1):
        now = [row]
        for column, right in enumerate(other, 1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (left != right)))
        before = now
    return before[-1] / max(len(one), len(other))
