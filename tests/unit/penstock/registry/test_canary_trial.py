"""A canary that is worse is withdrawn, one that is as good is not, and the trial never stops looking."""

import json
import random
from dataclasses import replace

import pytest

from penstock.config.sections import CanarySection
from penstock.registry.canary import (
    BURN_IN,
    MAX_PART,
    SHARES,
    Cause,
    ClientReturn,
    Seen,
    TrialState,
    Verdict,
    Window,
    from_json,
    observe,
    observe_all,
    to_json,
)
from tests.unit.penstock.registry.trials import Population, judged

BOUNDS = CanarySection()
GOOD = Window(answers=100, slower=0.0)


def earned(
    value: float, *, canary: bool = False, part: float = 0.5, level: int = 0, rated: float | None = None
) -> ClientReturn:
    """A client's return, or of how many conversations they said anything."""
    return ClientReturn(client="", level=level, canary=canary, part=part, value=value, rated=rated)


def after(*seen: Seen) -> TrialState:
    """The state after all of it."""
    return observe_all(TrialState(), BOUNDS, seen)


def rounds_until(verdict: Verdict, state: TrialState, *seen: Seen, most: int = 1000) -> int:
    """How often all of it must be seen again."""
    for count in range(1, most + 1):
        state = observe_all(state, BOUNDS, seen)
        if state.verdict is verdict:
            return count
    raise AssertionError(f"not {verdict} after {most}: {state.explain()}")


# ---------------------------------------------------------------- returns


@pytest.mark.promise("canary-equals-active-version")
@pytest.mark.parametrize("part", [0.001, 0.1, 0.5, MAX_PART])
def test_every_bet_on_a_client_is_fair(part: float) -> None:
    draw = random.Random(7)
    state = TrialState()
    for _ in range(200):
        value, rated = draw.choice([draw.gauss(0, 1), draw.gauss(0, 100), 0.0]), float(draw.random() < 0.3)
        sides = [
            observe(state, BOUNDS, earned(value, canary=arm, part=part, rated=rated)) for arm in (True, False)
        ]
        for question in ("lower", "higher", "rated_less", "rated_more"):
            on_canary, on_active, before = (
                getattr(each.levels[0], question).value for each in (*sides, state)
            )
            assert part * on_canary + (1 - part) * on_active == pytest.approx(before, rel=1e-12)
        state = replace(sides[draw.random() >= part], verdict=Verdict.GO_ON, cause=None)


@pytest.mark.promise("canary-equals-active-version")
@pytest.mark.parametrize("between", [0.0, 1.0, 2.0])
def test_clients_that_differ_raise_no_false_alarms(between: float) -> None:
    trials = [
        judged(BOUNDS, Population(clients=clients, between=between), (0.1, 0.5)[seed % 2], seed)
        for clients, count in ((20, 60), (50, 40), (200, 10))
        for seed in range(count)
    ]
    false = sum(state.verdict in (Verdict.WITHDRAW, Verdict.BETTER) for state in trials)
    assert false / len(trials) <= 0.05 + 2.33 * (0.05 * 0.95 / len(trials)) ** 0.5


@pytest.mark.promise("canary-worse-withdrawn-share")
@pytest.mark.parametrize(
    ("part", "drop", "most"),
    [(0.01, 2.0, 30), (0.1, 1.0, 60), (0.5, 1.0, 80), (MAX_PART, 1.0, 200), (0.1, 2.0, 30), (0.5, 0.5, 250)],
)
def test_a_real_drop_is_found_at_every_share(part: float, drop: float, most: int) -> None:
    population = Population(clients=round(most / part), drop=drop)
    found = [judged(BOUNDS, population, part, seed, levels=1) for seed in range(20)]
    caught = [state for state in found if state.cause is Cause.LOWER_RETURN]
    assert len(caught) >= 19, [state.explain() for state in found]


def test_few_clients_are_told_apart_by_their_means() -> None:
    robots = Population(clients=40, drop=1.0)
    found = [judged(BOUNDS, robots, 0.5, seed) for seed in range(20)]
    assert sum(state.cause is Cause.LOWER_RETURN for state in found) >= 19


def test_a_canary_that_is_better_is_called_so_and_judged_on() -> None:
    better = judged(BOUNDS, Population(clients=300, drop=-2.0), 0.5, 3, levels=1)
    assert (better.verdict, better.cause) == (Verdict.BETTER, Cause.HIGHER_RETURN)
    assert better.explain().startswith("better for higher_return after ")
    assert '"verdict": "promote"' in to_json(better), "registries of earlier releases hold this word"
    assert from_json(to_json(better)) == better
    assert rounds_until(Verdict.WITHDRAW, better, Window(answers=100, failed=100)) < 10


def opinions(
    seed: int, rates: tuple[float, float], clients: int = 800, likes: tuple[float, float] = (0.5, 0.5)
) -> TrialState:
    """The state at the first verdict on people who rate some answers and like some of those.

    rates: how often they rate the active version, and the canary. likes: how often they like what they rate.
    """
    draw, state = random.Random(seed), TrialState()
    for _ in range(clients):
        canary = draw.random() < 0.5
        rated = draw.random() < rates[canary]
        seen = earned(float(rated and draw.random() < likes[canary]), canary=canary, rated=float(rated))
        state = observe(state, BOUNDS, seen)
        if state.verdict in (Verdict.WITHDRAW, Verdict.BETTER):
            break
    return state


def test_a_drop_in_thumbs_is_found() -> None:
    found = [opinions(seed, (1.0, 1.0), 320, likes=(0.7, 0.4)) for seed in range(40)]
    assert sum(state.cause is Cause.LOWER_RETURN for state in found) >= 36, [one.explain() for one in found]


@pytest.mark.promise("canary-chat-judged-thumbs")
def test_a_canary_that_people_rate_more_often_is_not_called_better() -> None:
    found = [opinions(seed, (0.4, 0.8)) for seed in range(20)]
    assert sum(state.verdict is Verdict.BETTER for state in found) <= 2
    assert sum(state.cause is Cause.RATING_RATE for state in found) >= 15


def test_rates_that_are_alike_are_seldom_told_apart() -> None:
    differ = sum(opinions(seed, (0.5, 0.5), 300).rates_differ for seed in range(60))
    assert differ / 60 <= 0.1 + 2.33 * (0.1 * 0.9 / 60) ** 0.5


def test_a_trial_of_an_earlier_release_goes_on() -> None:
    state = opinions(0, (0.5, 0.5), 50)
    fields = json.loads(to_json(state))
    for level in fields["levels"]:
        for name in ("recent_rated", "rated_less", "rated_more"):
            del level[name]
    found = from_json(json.dumps(fields))
    assert found.levels[0].lower == state.levels[0].lower
    assert found.levels[0].rated_more.value == 1.0


def test_returns_that_are_nonsense_neither_withdraw_nor_blind() -> None:
    draw = random.Random(5)
    state = TrialState()
    for number in range(400):
        canary = draw.random() < 0.5
        value = draw.gauss(0, 1) - 1.5 * canary
        lie = draw.choice([1.7e308, -1.7e308])
        state = observe(state, BOUNDS, earned(lie if number % 10 == 0 else value, canary=canary))
        if state.verdict is Verdict.WITHDRAW:
            break
    assert state.cause is Cause.LOWER_RETURN


def test_the_first_clients_are_a_reference_and_no_bet() -> None:
    state = after(*[earned(float(number), canary=number % 2 == 0) for number in range(BURN_IN)])
    assert state.levels[0].lower.value == 1.0
    assert not state.compares_returns
    assert observe(state, BOUNDS, earned(3.0)).compares_returns


def test_arms_that_are_alike_are_undecided_at_the_horizon_and_judged_on() -> None:
    alike = [earned(1.0, canary=number % 2 == 0) for number in range(2 * BOUNDS.horizon)]
    state = after(*alike)
    assert (state.verdict, state.cause) == (Verdict.UNDECIDED, Cause.HORIZON)
    worse = (earned(1.0), earned(0.0, canary=True))
    assert rounds_until(Verdict.WITHDRAW, state, *worse) < 30


# ---------------------------------------------------------------- answers


def test_answers_that_are_not_finite_withdraw_at_once_however_late() -> None:
    state = after(*[GOOD] * 5000, Window(answers=100, failed=1, not_finite=1))
    assert (state.verdict, state.cause) == (Verdict.WITHDRAW, Cause.NOT_FINITE)


@pytest.mark.promise("judgement-canary-never-ends")
@pytest.mark.parametrize(("failed", "most"), [(100, 6), (10, 10), (3, 20), (1, 60)])
def test_failed_answers_withdraw_however_late(failed: int, most: int) -> None:
    for before in (0, 5000):
        windows = rounds_until(
            Verdict.WITHDRAW, after(*[GOOD] * before), Window(answers=100, failed=failed, slower=0.0)
        )
        assert windows <= most


@pytest.mark.promise("judgement-canary-never-ends")
@pytest.mark.parametrize(("slower", "most"), [(1.0, 40), (0.3, 120)])
def test_slow_answers_withdraw_however_late(slower: float, most: int) -> None:
    for before in (0, 5000):
        windows = rounds_until(Verdict.WITHDRAW, after(*[GOOD] * before), Window(answers=100, slower=slower))
        assert windows <= most


def test_a_machine_that_stumbles_withdraws_no_canary() -> None:
    withdrawn = 0
    for seed in range(40):
        draw = random.Random(seed)
        state = TrialState()
        for _ in range(200):
            canary, active = (sum(draw.random() < 0.5 for _ in range(count)) / count for count in (4, 36))
            state = observe(state, BOUNDS, Window(answers=10, slower=canary - active))
        withdrawn += state.verdict is Verdict.WITHDRAW
    assert withdrawn / 40 <= 0.05 + 2.33 * (0.05 * 0.95 / 40) ** 0.5


def test_a_verdict_of_withdrawal_is_final() -> None:
    state = after(Window(answers=1, failed=1, not_finite=1))
    assert observe_all(state, BOUNDS, [GOOD, earned(1.0)]) == state


# ---------------------------------------------------------------- the state


def test_the_parts_of_the_false_alarm_rate_are_all_of_it() -> None:
    assert sum(SHARES.values()) == pytest.approx(1.0)
    state = TrialState()
    for cause, share in SHARES.items():
        levels = 3 if cause in (Cause.LOWER_RETURN, Cause.HIGHER_RETURN) else 1
        assert state.progress(cause, 0.05) == pytest.approx(share * 0.05 / levels)


def test_the_state_survives_a_store() -> None:
    draw = random.Random(2)
    seen: list[Seen] = [
        earned(draw.gauss(0, 1), canary=number % 3 == 0, level=number % 2) for number in range(100)
    ]
    state = after(*seen, GOOD, Window(answers=7, failed=2, slower=0.1))
    assert from_json(to_json(state)) == state
    assert len(to_json(state)) < 16_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"levels"', '{"of_a_newer_release": 1, "levels"'),
        ('"lower"', '"of_a_newer_release": 1, "lower"'),
        ('"verdict"', '"was_verdict"'),
        ('"count"', '"was_count"'),
    ],
)
def test_a_state_of_other_fields_is_refused(old: str, new: str) -> None:
    text = to_json(after(GOOD))
    assert from_json(text) == after(GOOD)
    assert old in text
    with pytest.raises(ValueError, match="start the trial anew"):
        from_json(text.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"levels": []}', "null"])
def test_a_state_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="start the trial anew"):
        from_json(text)


def test_a_state_of_other_bets_is_refused() -> None:
    fields = json.loads(to_json(TrialState()))
    fields["errors"]["capital"] = [0.0]
    with pytest.raises(ValueError, match="other bets"):
        from_json(json.dumps(fields))
