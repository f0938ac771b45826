"""Canaries that never were: how often the test is wrong, and how soon it is right.

Outcomes are drawn with a seed and given to `safety.observe` one by one, and the verdict is looked at after each:
what is counted is the first one, however often one looks.

    .venv/bin/python -m tests.unit.registry.simulation [--simulations 5000]
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.registry.bounds import Bounds, Outcome
from penstock.registry.safety import Cause, State, Verdict, observe

Draw = Callable[[np.random.Generator], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Two arms; `canary_share` of the episodes are the canary's."""

    name: str
    bounds: Bounds
    active: Draw
    canary: Draw
    canary_share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a scenario went."""

    name: str
    shares: dict[Verdict, float]
    causes: dict[Cause, int]
    episodes: list[int]
    """Of the canary until the verdict, sorted."""

    @property
    def wrong(self) -> float:
        """Share of simulations with a verdict for or against, where the arms are the same."""
        return self.shares.get(Verdict.WITHDRAW, 0.0) + self.shares.get(Verdict.PROMOTE, 0.0)


def returns(mean: float, std: float, *, errors: float = 0.0, slow: float = 0.0, answers: int = 20) -> Draw:
    """Normal returns; each answer fails, or is slow, with the given chance."""

    def draw(random: np.random.Generator) -> Outcome:
        return Outcome(
            total_return=float(random.normal(mean, std)),
            answers=answers,
            errors=int(random.binomial(answers, errors)) if errors else 0,
            slow=int(random.binomial(answers, slow)) if slow else 0,
        )

    return draw


def wins(chance: float) -> Draw:
    """Returns of 0 or 1: as wide as a range can be."""
    return lambda random: Outcome(total_return=float(random.random() < chance), answers=1)


def rare(value: float, chance: float) -> Draw:
    """Mostly 0, now and then a lot: as skewed as returns are."""
    return lambda random: Outcome(total_return=value * float(random.random() < chance), answers=1)


def episodes(scenario: Scenario, random: np.random.Generator) -> Iterator[tuple[Outcome, bool]]:
    """Episodes without end, and whether each is the canary's."""
    while True:
        canary = bool(random.random() < scenario.canary_share)
        yield (scenario.canary if canary else scenario.active)(random), canary


def decide(scenario: Scenario, random: np.random.Generator) -> State:
    """The test until its verdict."""
    state = State()
    for outcome, canary in episodes(scenario, random):
        state = observe(state, scenario.bounds, outcome, canary=canary)
        if state.verdict is not Verdict.GO_ON:
            break
    return state


def simulate(scenario: Scenario, simulations: int, seed: int = 7) -> Result:
    """All verdicts of as many tests."""
    states = [decide(scenario, np.random.default_rng((seed, number))) for number in range(simulations)]
    verdicts = Counter(state.verdict for state in states)
    return Result(
        name=scenario.name,
        shares={verdict: count / simulations for verdict, count in verdicts.items()},
        causes=dict(Counter(state.cause for state in states if state.cause is not None)),
        episodes=sorted(state.canary_episodes for state in states),
    )


_UNIT = Bounds(low=0.0, high=1.0)
_WIDE = Bounds(low=0.0, high=200.0)
"""Mean 100, four deviations of 25 to either side: what `observed_range` makes of such an evaluation."""

SAME = (
    Scenario(name="normal, 50%", bounds=_WIDE, active=returns(100, 25), canary=returns(100, 25)),
    Scenario(
        name="normal, errors and slow answers, 10%, against 9",
        bounds=replace(_WIDE, active_per_canary=8),
        active=returns(100, 25, errors=0.02, slow=0.05),
        canary=returns(100, 25, errors=0.02, slow=0.05),
        canary_share=0.1,
    ),
    Scenario(name="win or lose, 50%", bounds=_UNIT, active=wins(0.5), canary=wins(0.5)),
    Scenario(name="rare and large, 50%", bounds=_UNIT, active=rare(1, 0.05), canary=rare(1, 0.05)),
    Scenario(
        name="win or lose, 2,000 episodes",
        bounds=replace(_UNIT, horizon=2000),
        active=wins(0.5),
        canary=wins(0.5),
    ),
)
"""Where every verdict but UNDECIDED is wrong."""

WORSE = (
    Scenario(name="return -20%, 50%", bounds=_WIDE, active=returns(100, 25), canary=returns(80, 25)),
    Scenario(
        name="return -20%, 10%",
        bounds=_WIDE,
        active=returns(100, 25),
        canary=returns(80, 25),
        canary_share=0.1,
    ),
    Scenario(
        name="return -20%, 10%, against 8",
        bounds=replace(_WIDE, active_per_canary=8),
        active=returns(100, 25),
        canary=returns(80, 25),
        canary_share=0.1,
    ),
    Scenario(
        name="CartPole at 475 of 500, -20%",
        bounds=Bounds(low=0.0, high=500.0),
        active=returns(475, 50),
        canary=returns(380, 50),
    ),
    Scenario(name="wins 90% instead of 50%, reversed", bounds=_UNIT, active=wins(0.9), canary=wins(0.5)),
    Scenario(
        name="errors 20% instead of 1%",
        bounds=_WIDE,
        active=returns(100, 25, errors=0.01),
        canary=returns(100, 25, errors=0.2),
    ),
    Scenario(
        name="slow answers 25% instead of 5%",
        bounds=_WIDE,
        active=returns(100, 25, slow=0.05),
        canary=returns(100, 25, slow=0.25),
    ),
)
"""Where WITHDRAW is right."""

BETTER = (Scenario(name="return +20%, 50%", bounds=_WIDE, active=returns(100, 25), canary=returns(120, 25)),)
"""Where PROMOTE is right."""


def report(result: Result) -> str:
    """A line of the table."""
    quantiles = [result.episodes[int(len(result.episodes) * part)] for part in (0.5, 0.95)]
    shares = "  ".join(f"{verdict.value} {100 * share:.2f}%" for verdict, share in result.shares.items())
    return f"{result.name:48} {shares}; episodes p50 {quantiles[0]}, p95 {quantiles[1]}"


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=5000)
    simulations = parser.parse_args().simulations
    for scenario in itertools.chain(SAME, WORSE, BETTER):
        print(report(simulate(scenario, simulations)), flush=True)


if __name__ == "__main__":
    main()
