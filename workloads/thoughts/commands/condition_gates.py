"""What must hold of the seven conditions, seed by seed: bounds for six hops on eleven symbols.

A smaller task is answered by guesses, a larger one by a start that errs more often: there the bounds are
something to read a figure beside, and what the conditions 3 and 7 are called is all that must hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from workloads.thoughts.validation.interval import interval

Found = Mapping[int, Mapping[str, Any]]
"""By condition, as `conditions.run_seed` returns it."""
Results = Mapping[int, Found]
"""By seed."""

_MUST_FAIL: Final = (3, 7)
_WITHOUT: Final = (1, 2, 3, 4)
_START: Final = 4
_TRAINED: Final = 5
_LEAST_RIGHT: Final = 0.9
_MOST_WITHOUT: Final = 0.2
_LEAST_GAIN: Final = 1.2
_LEAST_CHAINS: Final = 0.8
_LEAST_DIFFERENCE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One thing that must hold in a seed.

    bound, found: as people read them. is_verdict: it is about what a condition must be called.
    """

    seed: int
    name: str
    bound: str
    found: str
    holds: bool
    is_verdict: bool = False


def gates(results: Results) -> list[Gate]:
    """Return the gates of all seeds, of the conditions that were made."""
    return [gate for seed, found in results.items() for gate in _of_seed(seed, found)]


def hold(found: list[Gate], *, all_of_them: bool) -> bool:
    """Return whether conditions that must fail are called theatre; all_of_them: and all other gates hold."""
    return all(gate.holds for gate in found if all_of_them or gate.is_verdict)


def _of_seed(seed: int, found: Found) -> Iterator[Gate]:
    trained, others = found.get(_TRAINED), [number for number in _WITHOUT if number in found]
    if trained is not None:
        yield _least(seed, "condition 5 answers right", trained["accuracy"], _LEAST_RIGHT)
    for number in others:
        yield _most(seed, f"condition {number} answers right", found[number]["accuracy"], _MOST_WITHOUT)
    if _START in found:
        likeliest = "condition 4 answers right behind its likeliest thoughts"
        yield _most(seed, likeliest, found[_START]["greedy"], _MOST_WITHOUT)
    if trained is not None:
        judged = trained["validation"]
        yield _least(seed, "condition 5 gains, in nats", judged["gain"], _LEAST_GAIN)
        yield _least(seed, "condition 5 has legal chains", judged["chains"], _LEAST_CHAINS)
        if others:
            yield _difference(seed, found, others)
    for number in _MUST_FAIL:
        if number in found:
            verdict = str(found[number]["validation"]["verdict"])
            yield Gate(
                seed=seed,
                name=f"condition {number} is called",
                bound="theatre",
                found=verdict,
                holds=verdict == "theatre",
                is_verdict=True,
            )


def _difference(seed: int, found: Found, others: list[int]) -> Gate:
    """Compare question by question with the best condition that has no trained thoughts."""
    best = max(others, key=lambda number: found[number]["accuracy"])
    ours, theirs = (np.array(found[number]["right"]) for number in (_TRAINED, best))
    more = interval(ours - theirs)
    return Gate(
        seed=seed,
        name=f"condition 5 less condition {best}, the best of 1 to 4: lower end of the paired 95% interval",
        bound=f"≥ {_LEAST_DIFFERENCE}",
        found=f"{more.low:.3f} (mean {more.value:.3f})",
        holds=more.low >= _LEAST_DIFFERENCE,
    )


def _least(seed: int, name: str, value: float, bound: float) -> Gate:
    return Gate(seed=seed, name=name, bound=f"≥ {bound}", found=f"{value:.3f}", holds=value >= bound)


def _most(seed: int, name: str, value: float, bound: float) -> Gate:
    return Gate(seed=seed, name=name, bound=f"≤ {bound}", found=f"{value:.3f}", holds=value <= bound)
