"""A task for thoughts of one's own: who is the boss of the boss of …? One step needs no thought.

Everybody reports to the next in a circle. From this folder, with the lengths of bosses.toml over a copy of
penstock/recipes/thoughts-tiny.toml:

    PYTHONPATH=. penstock train bosses.toml --run-dir runs/bosses
"""

from collections.abc import Sequence

import numpy as np

from penstock.workloads.thoughts.tasks import Continuation, Example

NAMES = ("ann", "ben", "eva", "jim", "kim", "pia", "tom", "ulf")


class Bosses:
    """The level is how many times the boss is asked for; the thought names those on the way."""

    symbols = NAMES
    words = (*NAMES, *(f"{one}:{boss}" for one in NAMES for boss in NAMES), "1", "2", "3", "4")
    most_gain = None  # nats that an honest thought gains at most, where you know it

    def __init__(self, levels: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        self.levels = levels

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Draw a question of a level with its thought and its answer."""
        people = random.permutation(NAMES)
        lines = [f"{one}:{boss}" for one, boss in zip(people, (*people[1:], people[0]), strict=True)]
        random.shuffle(lines)
        question = (*lines, str(random.choice(NAMES)), str(level))
        whole = self.resume(question, ())
        assert whole is not None
        # What is trained on and what is tested never share an identity.
        identity = " ".join(sorted(lines))
        return Example(
            question=question, answer=whole.answer, steps=whole.steps, level=level, identity=identity
        )

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """Return what follows a thought; None where nothing does."""
        *lines, start, level = question
        bosses = dict(line.split(":") for line in lines)
        left = int(level) - len(thought)
        if left < 1 or not set(thought) <= set(NAMES):
            return None
        way = [thought[-1] if thought else start]
        for _ in range(left):
            way.append(bosses[way[-1]])
        return Continuation(tuple(way[1:-1]), tuple(way[-1:]))


def chains() -> Bosses:
    """A boss of up to four steps: thoughts help."""
    return Bosses()


def single() -> Bosses:
    """The boss alone: there is nothing to think about, and thoughts are theatre."""
    return Bosses(levels=(1,))
