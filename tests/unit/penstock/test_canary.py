import itertools
import json
import math
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.config.sections import CanarySection
from penstock.registry import traffic
from penstock.registry.canary import (
    BETS,
    BURN_IN,
    LEVEL_FACTOR,
    LEVELS,
    MAX_PART,
    NONE,
    SHARES,
    Cause,
    ClientReturn,
    Evidence,
    Seen,
    Trial,
    TrialState,
    Verdict,
    Window,
    from_json,
    observe,
    observe_all,
    to_json,
)
from penstock.registry.records import NewVersion, NotAllowed, Origin, Status, Traffic, UnknownVersion
from penstock.registry.registry import Registry
from penstock.registry.routing import Arm, Arms, Route, assign, exactly, follow, position, route
from tests.support.storage.postgresql_server import with_registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """clients: how many.   between: their deviation, where that of one episode is 1.

    drop: what each loses on the canary, in deviations of one episode.
    """

    clients: int
    between: float = 0.0
    drop: float = 0.0

    def returns(self, part: float, draw: random.Random, levels: int = LEVELS) -> Iterator[ClientReturn]:
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


BOUNDS = CanarySection()
GOOD = Window(answers=100, slower=0.0)


def earned(
    value: float, *, canary: bool = False, part: float = 0.5, level: int = 0, rated: float | None = None
) -> ClientReturn:
    return ClientReturn(client="", level=level, canary=canary, part=part, value=value, rated=rated)


def after(*seen: Seen) -> TrialState:
    return observe_all(TrialState(), BOUNDS, seen)


def rounds_until(verdict: Verdict, state: TrialState, *seen: Seen, most: int = 1000) -> int:
    for count in range(1, most + 1):
        state = observe_all(state, BOUNDS, seen)
        if state.verdict is verdict:
            return count
    raise AssertionError(f"not {verdict} after {most}: {state.explain()}")


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


def test_few_clients_are_distinguished_by_their_means() -> None:
    robots = Population(clients=40, drop=1.0)
    found = [judged(BOUNDS, robots, 0.5, seed) for seed in range(20)]
    assert sum(state.cause is Cause.LOWER_RETURN for state in found) >= 19


def test_a_better_canary_is_called_better_and_the_trial_continues() -> None:
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
def test_more_ratings_alone_do_not_make_a_canary_better() -> None:
    found = [opinions(seed, (0.4, 0.8)) for seed in range(20)]
    assert sum(state.verdict is Verdict.BETTER for state in found) <= 2
    assert sum(state.cause is Cause.RATING_RATE for state in found) >= 15


def test_rates_that_are_alike_are_seldom_distinguished() -> None:
    differ = sum(opinions(seed, (0.5, 0.5), 300).rates_differ for seed in range(60))
    assert differ / 60 <= 0.1 + 2.33 * (0.1 * 0.9 / 60) ** 0.5


def test_a_trial_of_an_earlier_release_continues() -> None:
    state = opinions(0, (0.5, 0.5), 50)
    fields = json.loads(to_json(state))
    for level in fields["levels"]:
        for name in ("recent_rated", "rated_less", "rated_more"):
            del level[name]
    found = from_json(json.dumps(fields))
    assert found.levels[0].lower == state.levels[0].lower
    assert found.levels[0].rated_more.value == 1.0


def test_absurd_returns_neither_withdraw_a_canary_nor_hide_a_drop() -> None:
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


def test_the_first_clients_are_only_a_reference() -> None:
    state = after(*[earned(float(number), canary=number % 2 == 0) for number in range(BURN_IN)])
    assert state.levels[0].lower.value == 1.0
    assert not state.compares_returns
    assert observe(state, BOUNDS, earned(3.0)).compares_returns


def test_equal_arms_are_undecided_at_the_horizon_and_the_trial_continues() -> None:
    alike = [earned(1.0, canary=number % 2 == 0) for number in range(2 * BOUNDS.horizon)]
    state = after(*alike)
    assert (state.verdict, state.cause) == (Verdict.UNDECIDED, Cause.HORIZON)
    worse = (earned(1.0), earned(0.0, canary=True))
    assert rounds_until(Verdict.WITHDRAW, state, *worse) < 30


def test_answers_that_are_not_finite_withdraw_at_once_however_late_and_for_good() -> None:
    state = after(*[GOOD] * 5000, Window(answers=100, failed=1, not_finite=1))
    assert (state.verdict, state.cause) == (Verdict.WITHDRAW, Cause.NOT_FINITE)
    assert observe_all(state, BOUNDS, [GOOD, earned(1.0)]) == state


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


def test_a_slow_machine_withdraws_no_canary() -> None:
    withdrawn = 0
    for seed in range(40):
        draw = random.Random(seed)
        state = TrialState()
        for _ in range(200):
            canary, active = (sum(draw.random() < 0.5 for _ in range(count)) / count for count in (4, 36))
            state = observe(state, BOUNDS, Window(answers=10, slower=canary - active))
        withdrawn += state.verdict is Verdict.WITHDRAW
    assert withdrawn / 40 <= 0.05 + 2.33 * (0.05 * 0.95 / 40) ** 0.5


def test_the_parts_of_the_false_alarm_rate_add_up_to_it() -> None:
    assert sum(SHARES.values()) == pytest.approx(1.0)
    state = TrialState()
    for cause, share in SHARES.items():
        levels = 3 if cause in (Cause.LOWER_RETURN, Cause.HIGHER_RETURN) else 1
        assert state.progress(cause, 0.05) == pytest.approx(share * 0.05 / levels)


def test_the_state_is_read_back_from_a_store() -> None:
    draw = random.Random(2)
    seen: list[Seen] = [
        earned(draw.gauss(0, 1), canary=number % 3 == 0, level=number % 2) for number in range(100)
    ]
    state = after(*seen, GOOD, Window(answers=7, failed=2, slower=0.1))
    assert from_json(to_json(state)) == state
    assert len(to_json(state)) < 16_000


STORED = to_json(TrialState())
OTHER_BETS = json.loads(STORED)
OTHER_BETS["errors"]["capital"] = [0.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STORED.replace('{"levels"', '{"of_a_newer_release": 1, "levels"', 1), "start the trial anew"),
        (STORED.replace('"lower"', '"of_a_newer_release": 1, "lower"', 1), "start the trial anew"),
        (STORED.replace('"verdict"', '"was_verdict"', 1), "start the trial anew"),
        (STORED.replace('"count"', '"was_count"', 1), "start the trial anew"),
        (json.dumps(OTHER_BETS), "other bets"),
        *((text, "start the trial anew") for text in ("", "[]", "{}", '{"levels": []}', "null")),
    ],
)
def test_a_state_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    assert from_json(STORED) == TrialState()
    with pytest.raises(ValueError, match=said):
        from_json(text)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A registry in which version 2 is the canary of half of the clients, and version 1 active."""
    found = f"sqlite:///{tmp_path}/registry.sqlite"
    with Registry.open(with_registry(found), migrate=True) as registry:
        for version in (1, 2, 3):
            new = NewVersion(
                policy="default", version=version, run="r", update=version, sha256=f"{version:064x}",
                size_bytes=1, origin=Origin.PERIODIC,
            )  # fmt: skip
            registry.register(new, by="test")
        registry.promote("default", 1, "first", by="test")
        registry.promote("default", 2, "try", by="test", to=Status.CANARY, canary_share=0.5)
    return found


@pytest.fixture
def servers(url: str) -> Iterator[tuple[Registry, Registry]]:
    with Registry.open(url) as first, Registry.open(url) as second:
        yield first, second


def trial_of(registry: Registry) -> Trial:
    trial = Trial.of(registry.arms("default"))
    assert trial is not None
    return trial


def client(number: int, *, level: int = 0, drop: float = 0.0) -> ClientReturn:
    canary = number % 2 == 0
    value = number % 3 - drop * canary
    return ClientReturn(client=f"{number:016x}", level=level, canary=canary, part=0.5, value=value)


def judge(registry: Registry, *seen: Seen) -> TrialState:
    state = registry.judge("default", trial_of(registry), BOUNDS, seen)
    assert state is not None
    return state


@pytest.mark.promise("several-servers-restarts-make")
def test_two_servers_reach_one_judgement(servers: tuple[Registry, Registry]) -> None:
    for number in range(60):
        state = judge(servers[number % 2], client(number, drop=5.0))
        if state.verdict is Verdict.WITHDRAW:
            break
    assert 12 < number < 60
    assert judge(servers[0]) == judge(servers[1]) == state


@pytest.mark.promise("several-servers-restarts-make")
def test_a_client_counts_once_on_all_servers_and_after_restarts(
    url: str, servers: tuple[Registry, Registry]
) -> None:
    once = judge(servers[0], *map(client, range(20)))
    assert judge(servers[1], *map(client, range(20)), client(3), client(3)) == once
    with Registry.open(url) as restarted:
        assert judge(restarted, *map(client, range(20))) == once
        later = judge(restarted, client(3, level=1))
    assert later.levels[0] == once.levels[0]
    assert (later.levels[1].active, later.levels[1].canary) == (1, 0)
    before = once.levels[0].active
    for server in servers:  # without a key it is another one each time
        nameless = judge(server, replace(client(3), client=""))
    assert nameless.levels[0].active == before + 2


def test_servers_that_judge_at_once_lose_nothing(url: str) -> None:
    def serve(first: int) -> None:
        with Registry.open(url) as registry:
            for number in range(first, 40, 4):
                judge(registry, Window(answers=number + 1))

    threads = [threading.Thread(target=serve, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Registry.open(url) as registry:
        state = judge(registry)
    assert (state.answers, state.latency.count, state.errors.count) == (sum(range(1, 41)), 0, 40)


def test_another_trial_begins_anew_and_a_share_that_grows_does_not(
    servers: tuple[Registry, Registry],
) -> None:
    registry = servers[0]
    old = trial_of(registry)
    before = judge(registry, *map(client, range(10)))
    registry.set_traffic(replace(registry.traffic("default"), canary_share=0.6), "more", by="test")
    assert judge(registry) == before
    registry.set_traffic(replace(registry.traffic("default"), experiment="second"), "again", by="test")
    assert registry.judge("default", old, BOUNDS, [client(11)]) is None
    assert judge(registry).levels[0].active == 0
    assert judge(registry, client(1)).levels[0].active == 1
    registry.rollback("default", "enough", by="test")
    assert Trial.of(registry.arms("default")) is None
    registry.promote("default", 3, "next", by="test", to=Status.CANARY, canary_share=0.5)
    assert judge(registry) == TrialState()


def test_clients_beyond_the_bound_are_not_compared(
    servers: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "MAX_CLIENTS", 5)
    state = judge(servers[0], *map(client, range(20)))
    assert (state.levels[0].canary + state.levels[0].active, state.is_full) == (5, True)
    state = judge(servers[1], *map(client, range(20, 40)), Window(answers=3, failed=3, not_finite=1))
    assert state.levels[0].canary + state.levels[0].active == 5
    assert state.verdict is Verdict.WITHDRAW


def test_a_state_of_another_program_version_starts_again(
    servers: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_text: str) -> TrialState:
        raise ValueError("of another program")

    judge(servers[0], *map(client, range(10)))
    monkeypatch.setattr("penstock.registry.canary.from_json", unreadable)
    assert judge(servers[1], client(50)).levels[0].canary == 1


@pytest.mark.promise("canary-worse-withdrawn-share")
@pytest.mark.parametrize(("latest", "most"), [(0.0, 0.8), (0.5, 0.4)])
def test_a_share_that_leaves_no_client_to_compare_with_is_refused(
    servers: tuple[Registry, Registry], latest: float, most: float
) -> None:
    registry = servers[0]
    asked = replace(registry.traffic("default"), canary_share=most, latest_share=latest)
    allowed = registry.set_traffic(asked, "as much as may be", by="test")
    assert trial_of(registry).part_of(allowed.canary_share) == pytest.approx(0.8)
    with pytest.raises(NotAllowed, match=f"at most {most:g} with latest_share={latest}"):
        registry.set_traffic(replace(allowed, canary_share=most + 0.05), "more", by="test")
    registry.rollback("default", "enough", by="test")
    with pytest.raises(NotAllowed, match="too few clients of the active version"):
        registry.promote("default", 3, "all", by="test", to=Status.CANARY, canary_share=most + 0.05)


def by_equation(gains: list[float]) -> float:
    count = len(gains)
    started = sum(
        1 / (j * (j + 1)) * math.prod(1 + bet * gain for gain in gains[j - 1 :])
        for bet in BETS
        for j in range(1, count + 1)
    )
    return started / len(BETS) + 1 / (count + 1)


def test_the_code_computes_the_equation() -> None:
    gains = [0.5, -1.0, 0.25, 200.0, -0.1, 0.0, 1.0]
    for count in range(len(gains) + 1):
        assert math.isclose(
            reduce(Evidence.bet, gains[:count], NONE).value, by_equation(gains[:count]), rel_tol=1e-12
        )


@pytest.mark.promise("canary-equals-active-version")
@pytest.mark.parametrize(("win", "chance"), [(1.0, 0.5), (9.0, 0.1), (1 / 9, 0.9)])
def test_fair_bets_keep_the_mean_capital_at_one_and_rarely_large(win: float, chance: float) -> None:
    mean, largest = 0.0, {2.0: 0.0, 5.0: 0.0, 20.0: 0.0}
    for sequence in itertools.product((True, False), repeat=10):
        probability = math.prod(chance if won else 1 - chance for won in sequence)
        path = list(
            itertools.accumulate((win if won else -1.0 for won in sequence), Evidence.bet, initial=NONE)
        )
        mean += probability * path[-1].value
        for level in largest:
            largest[level] += probability * (max(each.value for each in path) >= level)
    # A loss of 1 and a gain of (1 - chance) / chance are fair.
    assert math.isclose(win * chance, 1 - chance)
    assert math.isclose(mean, 1.0, rel_tol=1e-9)
    assert all(share <= 1 / level for level, share in largest.items())


def test_a_late_drop_is_found() -> None:
    tired, fresh = NONE, NONE
    for _ in range(100_000):
        tired = tired.bet(-0.5)
    needed = {"tired": 0, "fresh": 0}
    while tired.value < 100.0:
        tired, needed["tired"] = tired.bet(1.0), needed["tired"] + 1
    while fresh.value < 100.0:
        fresh, needed["fresh"] = fresh.bet(1.0), needed["fresh"] + 1
    assert needed["fresh"] < 15
    assert needed["tired"] < needed["fresh"] + 50


def test_evidence_stays_finite_and_a_loss_beyond_the_stake_is_refused() -> None:
    assert math.isfinite(reduce(Evidence.bet, [1e200] * 5, NONE).value)
    for gain in (-1.01, math.nan):
        with pytest.raises(ValueError, match="gain="):
            NONE.bet(gain)


KEYS = [f"client-{number}" for number in range(20_000)]
TRAFFIC = Traffic(policy="default", canary_share=0.1, latest_share=0.3)
ARMS = Arms(traffic=TRAFFIC, active=5, canary=7, pinned=frozenset({3, 5, 7}))


LITTLE = [f"{'x' * 200}{number:08d}" for number in range(20_000)]
ADDRESSES = [f"10.0.{number // 256}.{number % 256}" for number in range(20_000)]


def chi_square(keys: list[str], experiment: str, cells: int = 100) -> float:
    counts = Counter(int(position(key, experiment) * cells) for key in keys)
    expected = len(keys) / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in range(cells))


@pytest.mark.parametrize(
    ("keys", "experiment"),
    [(KEYS, "default"), (KEYS, "canary-7"), (KEYS, "a"), (LITTLE, "default"), (ADDRESSES, "default")],
    ids=["numbered", "numbered-canary", "numbered-a", "long", "addresses"],
)
def test_clients_are_spread_evenly(keys: list[str], experiment: str) -> None:
    assert chi_square(keys, experiment) < 149


def test_experiments_assign_clients_independently() -> None:
    both = sum(position(key, "one") < 0.5 and position(key, "two") < 0.5 for key in KEYS)
    assert 0.25 == pytest.approx(both / len(KEYS), abs=0.0125)  # 4 deviations


def test_the_assignment_is_the_same_in_every_process_and_version() -> None:
    assert 0.28466622838490585 == position("client-1", "default")
    code = "from penstock.registry.routing import position; print(position('client-1', 'default'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == position("client-1", "default")


def test_shares_are_kept_none_and_all_exactly() -> None:
    found = Counter(assign(TRAFFIC, key) for key in KEYS)
    for arm, share in ((Arm.CANARY, 0.1), (Arm.LATEST, 0.3), (Arm.ACTIVE, 0.6)):
        assert share == pytest.approx(
            found[arm] / len(KEYS), abs=4 * (share * (1 - share) / len(KEYS)) ** 0.5
        )
    for canary, latest, arm in ((1.0, 0.0, Arm.CANARY), (0.0, 1.0, Arm.LATEST), (0.0, 0.0, Arm.ACTIVE)):
        only = Traffic(policy="default", canary_share=canary, latest_share=latest)
        assert {arm} == {assign(only, key) for key in KEYS}


def test_a_share_that_grows_moves_no_client_off_its_arm() -> None:
    steps = [replace(TRAFFIC, canary_share=share) for share in (0.0, 0.1, 0.4, 0.7)]
    for before, after in pairwise(steps):
        for key in KEYS[:2000]:
            was, is_now = assign(before, key), assign(after, key)
            assert was is is_now or (was, is_now) == (Arm.ACTIVE, Arm.CANARY)


def test_the_next_arm_answers_for_an_arm_without_a_version() -> None:
    assert Route(arm=Arm.CANARY, version=7) == follow(ARMS, Arm.CANARY)
    assert Route(arm=Arm.ACTIVE, version=5) == follow(replace(ARMS, canary=None), Arm.CANARY)
    assert Route(arm=Arm.LATEST, version=None) == follow(replace(ARMS, canary=None, active=None), Arm.CANARY)
    assert Route(arm=Arm.LATEST, version=None) == follow(ARMS, Arm.LATEST)


def test_a_version_that_is_held_is_what_a_pinned_client_and_a_request_get() -> None:
    key = next(key for key in KEYS if assign(TRAFFIC, key) is Arm.ACTIVE)
    pinned = replace(ARMS, traffic=replace(TRAFFIC, pins={key: 3}))
    assert Route(arm=Arm.PINNED, version=3) == route(pinned, key)
    assert Route(arm=Arm.ACTIVE, version=5) == route(replace(pinned, pinned=frozenset({5, 7})), key)
    assert Route(arm=Arm.PINNED, version=3) == exactly(ARMS, 3)
    with pytest.raises(UnknownVersion, match="version=4 of policy='default' is not held; held: 3, 5, 7"):
        exactly(ARMS, 4)


def test_the_shadow_computes_beside_every_version_but_itself() -> None:
    shadowed = replace(ARMS, traffic=replace(TRAFFIC, shadow=7))
    assert Route(arm=Arm.ACTIVE, version=5, shadow=7) == follow(shadowed, Arm.ACTIVE)
    assert Route(arm=Arm.LATEST, version=None, shadow=7) == follow(shadowed, Arm.LATEST)
    assert Route(arm=Arm.CANARY, version=7) == follow(shadowed, Arm.CANARY)
    assert follow(replace(shadowed, pinned=frozenset({5})), Arm.ACTIVE).shadow is None


def test_any_text_of_some_length_is_a_key() -> None:
    assert 0.0 <= position("ключ \ud800 🗝", "default") < 1.0
    for key in ("", "x" * 257):
        with pytest.raises(ValueError, match="client key"):
            route(ARMS, key)
