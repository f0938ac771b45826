"""What the mutations of a prompt can earn, exactly: over the at most 32 texts that it becomes.

Everything is computed by dynamic programming, backwards from the last step. Nothing here learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.prompts.categories import PromptReward
from penstock.workloads.prompts.features import MUTATION_TYPES, mutate, read_prompt


@dataclass(frozen=True, slots=True, eq=False)
class TextGraph:
    """The texts that a prompt becomes, and what leads from one to the next.

    texts: n of them, at most 32, the prompt itself first. after: int64 [n, 5], the text that each mutation
    makes of each. reward: float64 [n, 5], what that earns.
    """

    texts: tuple[str, ...]
    after: NDArray[np.int64]
    reward: NDArray[np.float64]

    def optimum(self, steps: int) -> float:
        """Return the most that so many steps earn."""
        value = np.zeros(len(self.texts))
        for _ in range(steps):
            value = (self.reward + value[self.after]).max(1)
        return float(value[0])

    def expected(self, steps: int, policy: NDArray[np.float64] | None = None) -> float:
        """Return what so many steps earn on average.

        policy: float64 [n, 5], the probability of each mutation of each text; None: all are as likely.
        """
        likely = np.full(self.reward.shape, 1 / len(MUTATION_TYPES)) if policy is None else policy
        value = np.zeros(len(self.texts))
        for _ in range(steps):
            value = (likely * (self.reward + value[self.after])).sum(1)
        return float(value[0])

    def followed(self, actions: Sequence[int]) -> float:
        """Return what these mutations earn, one after another."""
        place, total = 0, 0.0
        for action in actions:
            total += float(self.reward[place, action])
            place = int(self.after[place, action])
        return total


def text_graph(prompt: str, reward: PromptReward) -> TextGraph:
    """Return the graph of a prompt under a reward; raises PromptError for a text that is no prompt."""
    start = read_prompt(prompt)
    texts, after, earned = [start], [], []
    for text in texts:  # grows while it is walked
        reached = [mutate(text, action) for action in range(len(MUTATION_TYPES))]
        texts += [one for one in dict.fromkeys(reached) if one not in texts]
        after.append([texts.index(one) for one in reached])
        earned.append([reward.of(start, text, one) for one in reached])
    return TextGraph(tuple(texts), np.array(after, np.int64), np.array(earned, np.float64))
