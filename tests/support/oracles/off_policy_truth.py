"""Off-policy evaluation where the truth is known: two small worlds and estimators in plain Python.

It imports nothing of the project, so that it cannot share a mistake with it.
"""

import math
import random
from dataclasses import dataclass

CONTEXTS = (0.5, 0.3, 0.2)
"""Probability of each context of the bandit."""
SUCCESS = ((0.9, 0.2, 0.4), (0.3, 0.7, 0.1), (0.2, 0.3, 0.8))
"""Probability of success, by context and action; a success earns 1."""
LOGGING = ((0.2, 0.5, 0.3), (0.4, 0.3, 0.3), (0.5, 0.3, 0.2))
TARGET = ((0.7, 0.1, 0.2), (0.1, 0.8, 0.1), (0.2, 0.1, 0.7))
"""Probability of each action, by context, under the policy that acted and under the one that is judged."""


@dataclass(frozen=True)
class Event:
    """One decision. logged, target: probabilities of the action that was taken."""

    context: int
    action: int
    reward: float
    logged: float
    target: float


def bandit_value(policy: tuple[tuple[float, ...], ...]) -> float:
    """The mean reward of a policy of the bandit: Σ_x p(x) Σ_a π(a|x) P(success|x, a)."""
    return sum(
        weight
        * sum(chance * success for chance, success in zip(policy[context], SUCCESS[context], strict=True))
        for context, weight in enumerate(CONTEXTS)
    )


def bandit_log(seed: int, count: int) -> list[Event]:
    draw = random.Random(seed)
    events = []
    for _ in range(count):
        context = draw.choices(range(3), CONTEXTS)[0]
        action = draw.choices(range(3), LOGGING[context])[0]
        reward = float(draw.random() < SUCCESS[context][action])
        events.append(Event(context, action, reward, LOGGING[context][action], TARGET[context][action]))
    return events


DISCOUNT = 0.9
_MOVES = (0.2, 0.8)
"""Of the chain: state 0 or 1; action 1 leads to state 1 with 0.8, action 0 with 0.2; being in state 1 after a
step earns 1. It ends after each step with probability 0.2, and after five steps at the latest."""
CHAIN_LOGGING = ((0.6, 0.4), (0.5, 0.5))
CHAIN_TARGET = ((0.3, 0.7), (0.4, 0.6))
_LENGTH = 5
_ENDS = 0.2


def chain_value(policy: tuple[tuple[float, ...], ...]) -> float:
    """The mean discounted return from state 0, by dynamic programming."""
    value = [0.0, 0.0]
    for step in range(_LENGTH):
        goes_on = 0.0 if step == 0 else 1 - _ENDS
        after = value
        value = [
            sum(
                chance
                * (move * (1 + goes_on * DISCOUNT * after[1]) + (1 - move) * goes_on * DISCOUNT * after[0])
                for chance, move in zip(policy[state], _MOVES, strict=True)
            )
            for state in (0, 1)
        ]
    return value[0]


def chain_log(seed: int, count: int) -> list[list[Event]]:
    draw = random.Random(seed)
    episodes = []
    for _ in range(count):
        state, episode = 0, []
        for _ in range(_LENGTH):
            action = draw.choices((0, 1), CHAIN_LOGGING[state])[0]
            logged, target = CHAIN_LOGGING[state][action], CHAIN_TARGET[state][action]
            after = int(draw.random() < _MOVES[action])
            episode.append(Event(state, action, float(after), logged, target))
            state = after
            if draw.random() < _ENDS:
                break
        episodes.append(episode)
    return episodes


def importance_sampling(episodes: list[list[Event]], discount: float) -> tuple[float, float]:
    """Per-decision importance sampling, one episode at a time: the estimate and its standard error."""
    values = []
    for episode in episodes:
        weight, value = 1.0, 0.0
        for step, event in enumerate(episode):
            weight *= event.target / event.logged
            value += discount**step * weight * event.reward
        values.append(value)
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def self_normalised(episodes: list[list[Event]], discount: float) -> float:
    """Weighted per-decision importance sampling; an episode that has ended keeps its weight and earns 0."""
    total = 0.0
    for step in range(max(len(episode) for episode in episodes)):
        weights, earned = 0.0, 0.0
        for episode in episodes:
            weight = math.prod(event.target / event.logged for event in episode[: step + 1])
            weights += weight
            earned += weight * (episode[step].reward if step < len(episode) else 0.0)
        total += discount**step * earned / weights
    return total
