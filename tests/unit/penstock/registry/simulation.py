"""Canaries that never were: how often the test is wrong, and how soon it is right.

Outcomes are drawn with a seed, and the verdict is looked at after each of them: what is counted is the first
one, however often one looks. `alternate` computes many tests at once whose arms take turns, from the equation
and not from the code; `by_share` gives `safety.observe` itself episodes in random order, one by one.

    .venv/bin/python -m tests.unit.penstock.registry.simulation [--simulations 2000]
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from penstock.registry.bounds import Bounds, Outcome
from penstock.registry.safety import BETS, SHARES, Cause, State, Verdict, observe

Reals = NDArray[np.float64]
ANSWERS = 20
_CHUNK = 256
_EPISODES_AT_ONCE = 50_000


def normal(mean: float, std: float) -> Callable[[Generator, tuple[int, ...]], Reals]:
    """Normal returns."""
    return lambda random, shape: random.normal(mean, std, shape)


def wins(chance: float) -> Callable[[Generator, tuple[int, ...]], Reals]:
    """Returns of 0 or 1: as wide as a range can be, and as skewed where `chance` is small."""
    return lambda random, shape: (random.random(shape) < chance).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How episodes of one arm go; each of their ANSWERS answers fails, or is slow, with the given chance."""

    returns: Callable[[Generator, tuple[int, ...]], Reals]
    errors: float = 0.0
    slow: float = 0.0

    def draw(self, random: Generator, shape: tuple[int, ...]) -> Reals:
        """[3, *shape]: return, failed answers, slow answers."""
        counts = [
            random.binomial(ANSWERS, chance, shape) if chance else np.zeros(shape)
            for chance in (self.errors, self.slow)
        ]
        return np.stack([self.returns(random, shape), *counts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Two arms that are compared."""

    name: str
    bounds: Bounds
    active: Arm
    canary: Arm
    canary_share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a scenario went, over all its simulations."""

    shares: dict[Verdict, float]
    episodes: list[int] = field(repr=False)
    """Of the canary until the verdict, sorted."""

    @property
    def decided(self) -> float:
        """Share that ended with a verdict for or against: wrong where the arms are the same."""
        return 1.0 - self.shares.get(Verdict.UNDECIDED, 0.0)

    @property
    def p95_episodes(self) -> int:
        """Episodes of the canary within which 95% of the verdicts came."""
        return self.episodes[int(0.95 * len(self.episodes))]


def result(ends: list[tuple[Verdict, int]]) -> Result:
    """Of (verdict, episodes) of each simulation."""
    counts = Counter(verdict for verdict, _ in ends)
    return Result(
        shares={verdict: count / len(ends) for verdict, count in counts.items()},
        episodes=sorted(episodes for _, episodes in ends),
    )


def outcome(row: Reals) -> Outcome:
    """Of one drawn episode."""
    return Outcome(total_return=float(row[0]), answers=ANSWERS, errors=int(row[1]), slow=int(row[2]))


def alternate(scenario: Scenario, active: Reals, canary: Reals) -> list[tuple[Verdict, int]]:
    """Verdict and episodes of each test [3, S, N], where the k-th episodes of both arms are compared."""
    bounds = scenario.bounds
    lower, errors, slow = _parts(active, bounds) - _parts(canary, bounds)
    margin = bounds.return_margin / (bounds.high - bounds.low)
    margins = (margin, bounds.error_margin, bounds.slow_margin, 0.0)
    worse = np.stack([lower, -errors, -slow, -lower], axis=-1)  # [S, N, process]
    gain = (worse - margins) / (1.0 + np.array(margins))
    growth = np.log1p(gain[..., None] * np.array(BETS)).cumsum(axis=1)
    wealth = np.exp(growth).mean(axis=-1)  # [S, N, process]
    proved = wealth >= 1.0 / (np.array(list(SHARES.values())) * bounds.false_alarm)
    return [_first(row) for row in proved]


def _parts(drawn: Reals, bounds: Bounds) -> Reals:
    """[3, S, N] as parts of their ranges."""
    returns = (np.clip(drawn[:1], bounds.low, bounds.high) - bounds.low) / (bounds.high - bounds.low)
    return np.concatenate([returns, drawn[1:] / ANSWERS])


def _first(proved: NDArray[np.bool_]) -> tuple[Verdict, int]:
    """Verdict and its episode from whether each process [N, process] has proved its case."""
    reached = np.flatnonzero(proved.any(axis=1))
    if not len(reached):
        return Verdict.UNDECIDED, len(proved)
    cause = list(SHARES)[int(proved[reached[0]].argmax())]
    return (
        Verdict.PROMOTE if cause is Cause.HIGHER_RETURN else Verdict.WITHDRAW,
        int(reached[0]) + 1,
    )


def simulate(scenario: Scenario, simulations: int, seed: int = 7) -> Result:
    """Many tests whose arms take turns."""
    random, ends = np.random.default_rng(seed), []
    at_once = max(1, _EPISODES_AT_ONCE // scenario.bounds.horizon)
    for start in range(0, simulations, at_once):
        shape = (min(at_once, simulations - start), scenario.bounds.horizon)
        ends += alternate(scenario, scenario.active.draw(random, shape), scenario.canary.draw(random, shape))
    return result(ends)


def one_by_one(bounds: Bounds, episodes: Iterator[tuple[Outcome, bool]]) -> State:
    """`observe` until its verdict."""
    state = State()
    for outcome_, canary in episodes:
        state = observe(state, bounds, outcome_, canary=canary)
        if state.verdict is not Verdict.GO_ON:
            break
    return state


def by_share(scenario: Scenario, simulations: int, seed: int = 7) -> Result:
    """Tests of `observe` itself, each episode the canary's with the chance of its share."""
    states = [
        one_by_one(scenario.bounds, _mixed(scenario, np.random.default_rng((seed, number))))
        for number in range(simulations)
    ]
    return result([(state.verdict, state.canary_episodes) for state in states])


def _mixed(scenario: Scenario, random: Generator) -> Iterator[tuple[Outcome, bool]]:
    while True:
        drawn = [arm.draw(random, (_CHUNK,)) for arm in (scenario.active, scenario.canary)]
        for index, canary in enumerate(random.random(_CHUNK) < scenario.canary_share):
            yield outcome(drawn[int(canary)][:, index]), bool(canary)


_UNIT = Bounds(low=0.0, high=1.0)
_WIDE = Bounds(low=0.0, high=200.0)
"""Mean 100, four deviations of 25 to either side: what `observed_range` makes of such an evaluation."""
_USUAL = Arm(returns=normal(100, 25), errors=0.02, slow=0.05)

SAME = {
    name: Scenario(name=name, bounds=bounds, active=arm, canary=arm)
    for name, bounds, arm in (
        ("normal returns, errors 2%, slow 5%", _WIDE, _USUAL),
        ("won or lost", _UNIT, Arm(returns=wins(0.5))),
        ("rare and large", _UNIT, Arm(returns=wins(0.05))),
        ("won or lost, 2,000 episodes", replace(_UNIT, horizon=2000), Arm(returns=wins(0.5))),
    )
}
"""Where every verdict but UNDECIDED is wrong."""

WORSE = {
    name: Scenario(name=name, bounds=bounds, active=active, canary=canary)
    for name, bounds, active, canary in (
        ("return -20%, deviation 25%", _WIDE, _USUAL, replace(_USUAL, returns=normal(80, 25))),
        (
            "return -20%, 475 of 500",
            Bounds(low=0, high=500),
            Arm(returns=normal(475, 50)),
            Arm(returns=normal(380, 50)),
        ),
        ("wins 50% instead of 90%", _UNIT, Arm(returns=wins(0.9)), Arm(returns=wins(0.5))),
        ("errors 20% instead of 2%", _WIDE, _USUAL, replace(_USUAL, errors=0.2)),
        ("slow 25% instead of 5%", _WIDE, _USUAL, replace(_USUAL, slow=0.25)),
    )
}
"""Where WITHDRAW is right."""

BETTER = Scenario(
    name="return +20%, deviation 25%",
    bounds=_WIDE,
    active=_USUAL,
    canary=replace(_USUAL, returns=normal(120, 25)),
)
"""Where PROMOTE is right."""


def at_tenth(scenario: Scenario) -> Scenario:
    """The same with a canary of 10%, each of its 100 episodes compared with 8 of the active version."""
    return replace(
        scenario,
        name=f"{scenario.name}; canary of 10%",
        bounds=replace(scenario.bounds, active_per_canary=8, horizon=100),
        canary_share=0.1,
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=2000)
    simulations = parser.parse_args().simulations
    for scenario in (*SAME.values(), *WORSE.values(), BETTER):
        print(_line(scenario, simulate(scenario, simulations)), flush=True)
    for name in ("normal returns, errors 2%, slow 5%", "won or lost"):
        print(_line(at_tenth(SAME[name]), by_share(at_tenth(SAME[name]), simulations)), flush=True)
    worse = at_tenth(WORSE["return -20%, deviation 25%"])
    print(_line(worse, by_share(worse, simulations)), flush=True)


def _line(scenario: Scenario, found: Result) -> str:
    shares = "  ".join(f"{verdict.value} {share:7.2%}" for verdict, share in sorted(found.shares.items()))
    median = found.episodes[len(found.episodes) // 2]
    return f"{scenario.name:56} {shares}  episodes p50 {median} p95 {found.p95_episodes}"


if __name__ == "__main__":
    main()
