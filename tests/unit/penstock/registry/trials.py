"""Trials of canaries in the abstract: clients that differ, and what they earn on the arm that they drew."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config.sections import CanarySection
from penstock.registry.canary import LEVEL_FACTOR, LEVELS, ClientReturn, TrialState, Verdict, observe


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """clients: how many.   between: their deviation, where that of one episode is 1.

    drop: what each loses on the canary, in deviations of one episode.
    """

    clients: int
    between: float = 0.0
    drop: float = 0.0

    def returns(self, part: float, draw: random.Random, levels: int = LEVELS) -> Iterator[ClientReturn]:
        """What is seen of one trial: of each client an episode, the mean of 8 and that of 64."""
        means = [draw.gauss(0.0, self.between) for _ in range(self.clients)]
        arms = [draw.random() < part for _ in range(self.clients)]
        for level in range(levels):
            within = LEVEL_FACTOR ** (-level / 2)
            order = list(range(self.clients))
            draw.shuffle(order)
            for client in order:
                value = means[client] + draw.gauss(0.0, within) - self.drop * arms[client]
                yield ClientReturn(
                    client=str(client), level=level, canary=arms[client], part=part, value=value
                )


def judged(
    bounds: CanarySection, population: Population, part: float, seed: int, levels: int = LEVELS
) -> TrialState:
    """The state at the first verdict that a canary is worse, looked for after every client; else the last."""
    state = TrialState()
    for one in population.returns(part, random.Random(seed), levels):
        state = observe(state, bounds, one)
        if state.verdict is Verdict.WITHDRAW:
            break
    return state
