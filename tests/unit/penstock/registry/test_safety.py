import json
import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.registry.bounds import MAX_WAITING, Bounds, Outcome, observed_range
from penstock.registry.records import Evaluation
from penstock.registry.safety import SHARES, Cause, State, Verdict, from_json, observe, to_json
from tests.unit.penstock.registry import simulation
from tests.unit.penstock.registry.simulation import BETTER, SAME, WORSE, Scenario, at_tenth

BOUNDS = Bounds(low=0.0, high=100.0)
GOOD = Outcome(total_return=90.0, answers=10)
BAD = Outcome(total_return=10.0, answers=10)


def judge(canary: Outcome, active: Outcome = GOOD, bounds: Bounds = BOUNDS) -> State:
    """The verdict on arms whose episodes are all alike."""
    turns = ((outcome, turn) for _ in range(1000) for outcome, turn in ((active, False), (canary, True)))
    return simulation.one_by_one(bounds, turns)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=name, marks=[pytest.mark.slow] if scenario.bounds.horizon > 200 else [])
        for name, scenario in SAME.items()
    ],
)
def test_a_canary_that_equals_the_active_version_is_hardly_ever_withdrawn_or_promoted(
    scenario: Scenario,
) -> None:
    """At most 5% of 4,000 tests looked at after each episode; the bound is Ville's and leaves room."""
    assert simulation.simulate(scenario, 4000).decided <= 0.05


@pytest.mark.parametrize("scenario", WORSE.values(), ids=WORSE)
def test_a_real_drop_is_caught_within_the_horizon(scenario: Scenario) -> None:
    """In at least 95% of 2,000 tests, within 200 episodes of the canary: in truth within 120."""
    found = simulation.simulate(scenario, 2000)
    assert found.shares[Verdict.WITHDRAW] >= 0.95
    assert found.p95_episodes <= 120


def test_a_canary_that_is_better_is_promoted() -> None:
    """In at least 95% of 2,000 tests."""
    assert simulation.simulate(BETTER, 2000).shares[Verdict.PROMOTE] >= 0.95


@pytest.mark.parametrize("name", ["normal returns, errors 2%, slow 5%", "won or lost"])
@pytest.mark.slow
def test_no_false_verdict_on_a_canary_of_a_tenth(name: str) -> None:
    """The same of `observe` itself, with episodes in random order, each compared with eight."""
    assert simulation.by_share(at_tenth(SAME[name]), 2000).decided <= 0.05


@pytest.mark.slow
def test_a_real_drop_of_a_tenth_is_caught() -> None:
    """A return lower by 20% at a share of 10%, within 100 episodes in at least 95% of 500 tests."""
    found = simulation.by_share(at_tenth(WORSE["return -20%, deviation 25%"]), 500)
    assert found.shares[Verdict.WITHDRAW] >= 0.95


@pytest.mark.parametrize("scenario", [*WORSE.values(), BETTER, SAME["won or lost"]], ids=lambda s: s.name)
def test_the_code_computes_what_the_equation_says(scenario: Scenario) -> None:
    """Verdict and episode of `observe` are those of the products, computed at once in logarithms."""
    random, horizon = np.random.default_rng(3), scenario.bounds.horizon
    active, canary = (arm.draw(random, (5, horizon)) for arm in (scenario.active, scenario.canary))
    for number, expected in enumerate(simulation.alternate(scenario, active, canary)):
        turns = (
            (simulation.outcome(rows[:, number, step]), turn)
            for step in range(horizon)
            for rows, turn in ((active, False), (canary, True))
        )
        state = simulation.one_by_one(scenario.bounds, turns)
        assert (state.verdict, state.canary_episodes) == expected


@pytest.mark.parametrize(
    ("canary", "cause"),
    [
        (BAD, Cause.LOWER_RETURN),
        (replace(GOOD, errors=5), Cause.ERRORS),
        (replace(GOOD, slow=5), Cause.LATENCY),
        (replace(GOOD, not_finite=1), Cause.NOT_FINITE),
    ],
)
def test_each_bound_withdraws_under_its_name(canary: Outcome, cause: Cause) -> None:
    """Return, errors, latency and answers that are not finite."""
    state = judge(canary)
    assert (state.verdict, state.cause) == (Verdict.WITHDRAW, cause)
    assert f"withdraw for {cause.value} after {state.canary_episodes} episodes" in state.explain()


def test_an_answer_that_is_not_finite_withdraws_at_once() -> None:
    """It is no matter of chance; as many as the bound forgives do not."""
    one = replace(GOOD, not_finite=1)
    assert 1 == judge(one).canary_episodes
    assert 3 == judge(one, bounds=replace(BOUNDS, max_not_finite=2)).canary_episodes


def test_the_active_versions_own_faults_do_not_withdraw_the_canary() -> None:
    """Not-finite answers, errors and slow answers of the active version never count against the canary."""
    broken = Outcome(total_return=90.0, answers=10, errors=9, slow=9, not_finite=9)
    assert Verdict.UNDECIDED is judge(GOOD, active=broken).verdict


def test_arms_that_are_alike_stay_undecided_until_the_horizon() -> None:
    """A verdict comes within the stated number of episodes, also when nothing can be proved."""
    state = judge(GOOD, bounds=replace(BOUNDS, horizon=50))
    assert (state.verdict, state.cause, state.canary_episodes) == (Verdict.UNDECIDED, Cause.HORIZON, 50)


def test_a_canary_without_anybody_to_compare_ends_undecided() -> None:
    """A canary of all traffic is never withdrawn by comparison, and its state stays small."""
    turns = ((BAD, True) for _ in range(1000))
    state = simulation.one_by_one(BOUNDS, turns)
    assert (state.verdict, state.pairs) == (Verdict.UNDECIDED, 0)
    assert MAX_WAITING == len(state.waiting_canary)


def test_what_the_margin_forgives_does_not_withdraw() -> None:
    """A return lower by less than the margin."""
    slightly = replace(GOOD, total_return=80.0)
    assert Verdict.WITHDRAW is judge(slightly).verdict
    assert Verdict.UNDECIDED is judge(slightly, bounds=replace(BOUNDS, return_margin=15.0)).verdict


def test_a_verdict_is_final() -> None:
    """What comes after it changes nothing."""
    state = judge(BAD)
    assert state is observe(state, BOUNDS, GOOD, canary=True)


def test_episodes_without_rewards_are_judged_by_their_answers() -> None:
    """A client that sends no rewards says nothing about return."""
    silent = replace(GOOD, total_return=None)
    assert Verdict.UNDECIDED is judge(silent, active=silent).verdict
    assert Cause.ERRORS is judge(replace(silent, errors=5), active=silent).cause


def test_the_state_survives_a_store() -> None:
    """Through JSON and back, with waiting episodes and without, and goes on to the same verdict."""
    state = State()
    for outcome, canary in ((BAD, True), (replace(GOOD, total_return=None), False), (BAD, True)):
        state = observe(state, BOUNDS, outcome, canary=canary)
        assert state == from_json(to_json(state))
    assert judge(BAD) == from_json(to_json(judge(BAD)))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", to_json(State()).replace("1.0", '"x"'), json.dumps({"wealth": [[1.0]]})]
)
def test_a_state_that_cannot_be_read_is_refused(text: str) -> None:
    """Never half of it."""
    with pytest.raises(ValueError, match="start the test anew"):
        from_json(text)


def test_a_state_of_other_bets_is_refused() -> None:
    """A program with other bets cannot go on where this one stopped."""
    state = State(wealth=((1.0,),) * len(SHARES))
    with pytest.raises(ValueError, match="has other bets"):
        from_json(to_json(state))


def test_the_shares_of_the_false_alarm_rate_are_all_of_it() -> None:
    """The union bound over the four processes."""
    assert 1.0 == pytest.approx(sum(SHARES.values()))


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        (Evaluation(mean=100.0, std=25.0, episodes=20), (0.0, 200.0)),
        (Evaluation(mean=500.0, std=0.0, episodes=20), (400.0, 600.0)),
        (Evaluation(mean=-160.0, std=60.0, episodes=20), (-400.0, 80.0)),
    ],
)
def test_a_range_is_observed_in_an_evaluation(evaluation: Evaluation, expected: tuple[float, float]) -> None:
    """Four deviations to either side, and never nothing."""
    assert expected == pytest.approx(observed_range(evaluation))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": 1.0, "high": 1.0}, "low below high"),
        ({"low": -math.inf}, "both finite"),
        ({"false_alarm": 0.0}, "false_alarm=0.0"),
        ({"error_margin": 1.0}, "error_margin=1.0"),
        ({"return_margin": -1.0}, "return_margin=-1.0"),
        ({"horizon": 0}, "horizon=0"),
        ({"active_per_canary": 0}, "active_per_canary=0"),
    ],
)
def test_bounds_that_bound_nothing_are_refused(change: dict[str, float], message: str) -> None:
    """Each names its field."""
    with pytest.raises(ValueError, match=message):
        replace(BOUNDS, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"total_return": math.nan}, {"errors": 11}, {"slow": -1}])
def test_an_outcome_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    """A reward that is not finite is the client's fault, and no return."""
    with pytest.raises(ValueError, match="must be"):
        replace(GOOD, **change)  # type: ignore[arg-type]
