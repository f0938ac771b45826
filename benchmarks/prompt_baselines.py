"""What stands beside a learned policy for prompts: five baselines, none of which sees the reward of a test.

fixed      the best sequence of five mutations for all prompts
table      the best sequence for each category, which is told
greedy     the mutation that earns most now; knows the reward exactly, and looks one step ahead
LinUCB     a bandit on the embedding (Li et al. 2010), trained on the reward of single steps
random     every mutation as likely as any other
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workloads.prompts.embeddings import WIDTH, Embedder
from workloads.prompts.mutations import MUTATION_TYPES
from workloads.prompts.text_graph import TextGraph

STEPS: Final = 5
_ACTIONS: Final = len(MUTATION_TYPES)
_PROJECTED: Final = 256
_RIDGE: Final = 0.01
_BREADTH: Final = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A prompt with its category and the texts that it becomes."""

    category: str
    graph: TextGraph


def sequences() -> list[tuple[int, ...]]:
    """Return every choice of five mutations, without regard to their order, which changes no sum."""
    return list(combinations_with_replacement(range(_ACTIONS), STEPS))


def best_fixed(cases: Sequence[Case]) -> tuple[int, ...]:
    """Return the sequence that earns most over the cases."""
    return max(sequences(), key=lambda way: sum(case.graph.followed(way) for case in cases))


def best_by_category(cases: Sequence[Case]) -> dict[str, tuple[int, ...]]:
    """Return the sequence that earns most over the cases of each category."""
    by_category = defaultdict(list)
    for case in cases:
        by_category[case.category].append(case)
    return {category: best_fixed(some) for category, some in by_category.items()}


def greedy(case: Case) -> float:
    """Return what somebody earns who takes the best step each time."""
    return case.graph.expected(STEPS, np.eye(_ACTIONS)[case.graph.reward.argmax(1)])


class LinUCB:
    """A linear bandit with a model for each mutation, on the embedding projected to 256 numbers."""

    def __init__(self, embedder: Embedder, seed: int) -> None:
        self._embedder, self._random = embedder, np.random.default_rng(seed)
        self._projection = self._random.normal(size=(WIDTH, _PROJECTED)) / np.sqrt(_PROJECTED)
        self._inverse = np.stack([np.eye(_PROJECTED) / _RIDGE] * _ACTIONS)
        self._moments = np.zeros((_ACTIONS, _PROJECTED))

    def train(self, cases: Sequence[Case], episodes: int) -> None:
        """Play episodes and learn from the reward of every step."""
        for _ in range(episodes):
            case = cases[int(self._random.integers(len(cases)))]
            seen, place = self._see(case), 0
            for _ in range(STEPS):
                row = seen[place]
                action = int(self._scores(row[None], _BREADTH)[0].argmax())
                self._learn(action, row, float(case.graph.reward[place, action]))
                place = int(case.graph.after[place, action])

    def earned(self, case: Case) -> float:
        """Return what its best guesses earn, without trying anything."""
        choices = self._scores(self._see(case), 0.0).argmax(1)
        return case.graph.expected(STEPS, np.eye(_ACTIONS)[choices])

    def _see(self, case: Case) -> NDArray[np.float64]:
        seen: NDArray[np.float64] = self._embedder.embed(case.graph.texts) @ self._projection
        return seen

    def _scores(self, rows: NDArray[np.float64], breadth: float) -> NDArray[np.float64]:
        models = np.einsum("aij,aj->ai", self._inverse, self._moments)
        scores: NDArray[np.float64] = rows @ models.T
        if breadth:
            scores = scores + breadth * np.sqrt(np.einsum("ni,aij,nj->na", rows, self._inverse, rows))
        return scores

    def _learn(self, action: int, row: NDArray[np.float64], reward: float) -> None:
        inverse = self._inverse[action]
        moved = inverse @ row
        inverse -= np.outer(moved, moved) / (1.0 + row @ moved)  # Sherman and Morrison
        self._moments[action] += reward * row
