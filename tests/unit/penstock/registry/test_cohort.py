import heapq
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.registry.bounds import Bounds, Outcome
from penstock.registry.cohort import Cohort
from penstock.registry.safety import Verdict
from tests.unit.penstock.registry import simulation


def of(value: float) -> Outcome:
    """An outcome with this return."""
    return Outcome(total_return=value, answers=1)


def test_outcomes_come_in_the_order_in_which_episodes_began() -> None:
    """Whatever the order in which they end; each once."""
    cohort = Cohort()
    tickets = [cohort.begin() for _ in range(4)]
    assert [] == cohort.end(tickets[2], of(2))
    assert [] == cohort.end(tickets[1], None)
    assert [of(0), of(2)] == cohort.end(tickets[0], of(0))
    assert [] == cohort.end(tickets[0], of(9))
    assert [of(3)] == cohort.end(tickets[3], of(3))
    assert 0 == cohort.held


def test_an_episode_without_end_holds_up_a_bounded_number() -> None:
    """It is given up, counted, and ignored when it ends after all."""
    cohort = Cohort(limit=3)
    endless = cohort.begin()
    released = [outcome for value in range(10) for outcome in cohort.end(cohort.begin(), of(value))]
    assert [of(value) for value in range(10)] == released
    assert (cohort.given_up, cohort.held) == (1, 0)
    assert [] == cohort.end(endless, of(99))


def test_a_ticket_that_was_never_given_is_refused() -> None:
    """It would be an outcome of nothing."""
    with pytest.raises(ValueError, match="ticket=0"):
        Cohort().end(0, None)


def long_is_good(seed: int, *, ordered: bool) -> Iterator[tuple[Outcome, bool]]:
    """The same policy twice, 60 clients each, whose episodes return how long they last.

    The canary comes later.
    """
    random, cohorts = np.random.default_rng(seed), {True: Cohort(), False: Cohort()}
    running: list[tuple[float, int, bool, int, float]] = []

    def begin(now: float, client: int, canary: bool) -> None:
        lasts = float(random.integers(1, 500))
        heapq.heappush(running, (now + lasts, client, canary, cohorts[canary].begin(), lasts))

    for client in range(120):
        begin(600.0 * (client % 2), client, client % 2 == 1)
    while True:
        now, client, canary, ticket, lasts = heapq.heappop(running)
        for outcome in cohorts[canary].end(ticket, of(lasts)) if ordered else (of(lasts),):
            yield outcome, canary
        begin(now, client, canary)


@pytest.mark.parametrize("ordered", [True, False])
def test_in_the_order_of_their_ends_a_new_canary_looks_worse_than_it_is(ordered: bool) -> None:
    """A/A where long episodes are good ones: the canary's first to end are its worst."""
    bounds = Bounds(low=0.0, high=500.0, horizon=60)
    verdicts = [
        simulation.one_by_one(bounds, long_is_good(seed, ordered=ordered)).verdict for seed in range(40)
    ]
    wrong = sum(verdict is not Verdict.UNDECIDED for verdict in verdicts) / len(verdicts)
    assert wrong <= 0.05 if ordered else wrong > 0.5
