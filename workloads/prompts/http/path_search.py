"""The best prompt within so many mutations: the policy's likeliest ones, as far as they pay."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from workloads.prompts.mutations import MUTATION_TYPES, mutate

Choose = Callable[[str], Awaitable[tuple[int, list[float], int]]]
"""(prompt) → likeliest mutation, how likely each is, and the version that says so."""
Score = Callable[[str, int, str], float]
"""(prompt, mutation, what it makes of the prompt) → reward of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One mutation on a path."""

    action: int
    prompt: str
    reward: float
    probabilities: list[float]

    @property
    def mutation_type(self) -> str:
        """Return the mutation's name."""
        return MUTATION_TYPES[self.action]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPath:
    """The best prompt that was seen, with the moves that lead to it and the sum of their rewards."""

    prompt: str
    moves: tuple[Move, ...]
    reward: float
    version: int


async def search(prompt: str, steps: int, choose: Choose, score: Score) -> BestPath:
    """Follow the policy for at most `steps` mutations, and return the best place on the way.

    A mutation that changes nothing ends the way: the policy would choose it again. Raises what `choose` and
    `score` raise.
    """
    moves = list[Move]()
    total, best, kept, version = 0.0, 0.0, 0, 0
    here = prompt
    for _ in range(steps):
        action, probabilities, version = await choose(here)
        mutated = mutate(here, action)
        reward = score(here, action, mutated)
        moves.append(Move(action=action, prompt=mutated, reward=reward, probabilities=probabilities))
        total += reward
        if total > best:
            best, kept = total, len(moves)
        if mutated == here:
            break
        here = mutated
    found = moves[kept - 1].prompt if kept else prompt
    return BestPath(prompt=found, moves=tuple(moves[:kept]), reward=best, version=version)
