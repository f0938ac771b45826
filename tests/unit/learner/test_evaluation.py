import json
import math
import threading
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from penstock.broker.log.replies import ReportEntry
from penstock.config.settings import ConfigurationError, EvaluationSection
from penstock.config.workload import find
from penstock.learner.evaluation import (
    LEAST_STARTS,
    MISSED_EPISODES,
    RECENT_EPISODES,
    WINDOW,
    BaseComparison,
    Candidate,
    Episodes,
    Evaluation,
    Key,
    Patience,
    Score,
    check_base,
    check_patience,
    compare,
    scores_json,
)
from penstock.protocol.messages import Episode, Report
from penstock.runtime import metrics


def played(returns: list[float], starts: list[int] | None = None, length: int = 4) -> dict[Key, Episode]:
    """Episodes of these returns, each with a start of its own unless starts say otherwise."""
    found: dict[Key, Episode] = {}
    for start, value in zip(starts or range(len(returns)), returns, strict=True):
        number = sum(key[0] == start for key in found)
        found[start, number] = episode(start, number, value, length)
    return found


def episode(slot: int, number: int, value: float, length: int, version: int = 1) -> Episode:
    return Episode(
        slot_id=slot, episode_id=number, episode_return=value, length=length, terminated=True, version=version
    )


T = TypeVar("T")


def known(value: T | None) -> T:
    assert value is not None
    return value


def compared(version: dict[Key, Episode], base: dict[Key, Episode]) -> BaseComparison:
    return known(compare(version, base))


def test_the_difference_and_its_interval_are_over_pairs() -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(0.0, 5.0, 40)
    version = base + generator.normal(0.3, 0.5, 40)
    found = compared(played(version.tolist(), length=7), played(base.tolist()))
    centre, error = (version - base).mean(), (version - base).std(ddof=1) / math.sqrt(40)
    assert (found.difference, found.standard_error) == pytest.approx((centre, error))
    interval = (centre - 2.0227 * error, centre + 2.0227 * error)
    assert (found.low, found.high) == pytest.approx(interval, rel=1e-3)
    assert (found.mean, found.std) == pytest.approx((base.mean(), base.std()))
    assert (found.episodes, found.starts, found.length, found.version_length) == (40, 40, 4.0, 7.0)
    assert found.verdict == "better"


@pytest.mark.promise("summary-compares-language-model")
def test_the_order_of_the_comparison_decides_the_sign() -> None:
    version, base = played([1.0, 2.0, 3.0, 2.0, 1.0, 2.5]), played([0.0, 1.1, 2.0, 0.9, 0.2, 1.0])
    one, other = compared(version, base), compared(base, version)
    assert one.difference == pytest.approx(-other.difference)
    assert one.difference > 0
    assert (one.verdict, other.verdict) == ("better", "worse")
    assert one.mean == pytest.approx(5.2 / 6)


def test_episodes_with_the_same_start_are_not_independent() -> None:
    version, base = [1.0, 0.0, 2.0, 1.0, -1.0, 1.5, 0.5, 1.0], [0.0] * 8
    once = compared(played(version), played(base))
    starts = [start for start in range(8) for _ in range(4)]
    often = compared(
        played([value for value in version for _ in range(4)], starts), played([0.0] * 32, starts)
    )
    assert (often.episodes, often.starts) == (32, 8)
    assert often.difference == pytest.approx(once.difference)
    assert often.standard_error == pytest.approx(once.standard_error)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_a_few_starts_are_no_evidence_even_where_all_agree() -> None:
    for count in range(1, LEAST_STARTS):
        found = compared(played([1.0] * count), played([0.0] * count))
        assert (found.difference, found.verdict) == (1.0, "chance")
        assert (found.standard_error, found.low, found.high) == (None, None, None)
    assert compared(played([1.0] * LEAST_STARTS), played([0.0] * LEAST_STARTS)).verdict == "better"


def test_only_paired_episodes_count() -> None:
    found = compared(played([1.0, 2.0, 50.0]), played([0.0, 0.0]))
    assert (found.episodes, found.difference) == (2, 1.5)
    assert compare(played([1.0]), {}) is None


@pytest.mark.parametrize(
    ("starts", "expected"), [(6, 2.5706), (7, 2.4469), (10, 2.2622), (30, 2.0452), (400, 1.9659)]
)
def test_the_interval_is_that_of_students_t(starts: int, expected: float) -> None:
    values = np.random.default_rng(2).normal(size=starts)
    found = compared(played(values.tolist()), played([0.0] * starts))
    quantile = (known(found.high) - found.difference) / known(found.standard_error)
    assert quantile == pytest.approx(expected, rel=2e-3)


def test_a_policy_without_initial_weights_has_no_base() -> None:
    check_base(EvaluationSection(), find("control"))
    check_base(EvaluationSection(base=True), find("rlhf"))
    with pytest.raises(ConfigurationError, match=r"evaluation\.base=true: .*'control' act once they have"):
        check_base(EvaluationSection(base=True), find("control"))


def test_a_comparison_with_the_base_survives_a_checkpoint() -> None:
    found = compared(played([1.0] * 6), played([0.0] * 6))
    told = found.to_json()
    assert told["verdict"] == "better"
    assert BaseComparison.from_json(told) == found
    assert BaseComparison.from_json(told | {"verdict": "worse"}).verdict == "better"
    assert replace(found, low=-1.0).verdict == "chance"


GOOD = [100.0] * RECENT_EPISODES


def evaluation(target: float | None = 90.0, *, stop: bool = True, interval: int | None = None) -> Evaluation:
    return Evaluation(EvaluationSection(episodes=3, interval_steps=interval), target, stop_at_target=stop)


def restored(it: Evaluation, into: Evaluation) -> Evaluation:
    """The state of an evaluation, by way of a checkpoint, in another one."""
    state, blob = it.state()
    into.restore(json.loads(json.dumps(state)), blob)
    return into


def measured(**section: Any) -> Evaluation:
    return Evaluation(EvaluationSection(episodes=3, **section), None, stop_at_target=False)


def play(it: Evaluation, version: int, mean: float) -> None:
    it.note_published(candidate(version, update=version))
    assert it.collect(report(version, [mean - 1, mean, mean + 1])) is not None


def candidate(version: int, update: int = 1) -> Candidate:
    return Candidate(version=version, update=update, env_steps=update * 100, at_s=1.0, blob=b"w")


def report(version: int, returns: list[float], *, first: int = 0, deterministic: bool = True) -> Report:
    episodes = tuple(episode(slot, 0, value, 1, version) for slot, value in enumerate(returns, first))
    return Report(session=1, sequence=1, evaluation=True, deterministic=deterministic, episodes=episodes)


def test_a_run_without_evaluations_requests_none() -> None:
    it = Evaluation(EvaluationSection(episodes=0, interval_steps=1), 90.0, stop_at_target=True)
    assert not it.wanted(GOOD, update=1, env_steps=100)
    assert not it.request(1)
    assert not it.pending


@pytest.mark.promise("run-solved-whose-environments")
def test_a_silent_curve_requests_an_evaluation_too() -> None:
    it, missed = evaluation(), 50 * MISSED_EPISODES
    low: dict[str, Any] = {"recent": [50.0] * RECENT_EPISODES, "length": 50.0}
    assert not it.wanted(update=1, env_steps=10**6, ended=419, **low)
    assert not it.wanted(update=2, env_steps=10**6 + missed, ended=419, **low)
    assert not it.wanted(update=3, env_steps=10**6 + missed + 1, ended=420, **low)
    assert it.wanted(update=4, env_steps=10**6 + 2 * missed + 2, ended=420, **low)
    it.note_published(Candidate(version=5, update=4, env_steps=10**6 + 2 * missed + 2, at_s=1.0, blob=b"w"))
    assert it.collect(report(5, [50.0] * 3)) is not None
    assert not it.wanted(update=5, env_steps=10**6 + 3 * missed, ended=420, **low)
    assert it.wanted(update=6, env_steps=10**6 + 3 * missed + 3, ended=420, **low)
    assert not evaluation(None).wanted(update=9, env_steps=10**9, ended=0, **low)


def test_a_good_curve_requests_an_evaluation_and_only_its_result_solves() -> None:
    it = evaluation()
    assert not it.wanted(GOOD[1:], update=1, env_steps=10)
    assert it.wanted(GOOD, update=1, env_steps=10)
    assert not it.wanted(GOOD, update=2, env_steps=20)
    it.note_published(candidate(5))
    it.collect(report(5, [1.0, 2.0, 3.0]))
    assert it.solved is None
    assert not it.wanted(GOOD, update=1, env_steps=10), "no update has been made since"
    assert it.wanted(GOOD, update=2, env_steps=20)
    it.note_published(candidate(6, update=2))
    assert it.collect(report(6, [80.0, 90.0])) is None
    result = known(it.collect(report(6, [100.0], first=2)))
    assert result.mean == pytest.approx(90.0)
    assert it.solved is result


def test_repeated_episodes_and_those_of_a_replaced_candidate_do_not_count() -> None:
    it = evaluation()
    assert it.note_published(candidate(4)) is None
    assert known(it.note_published(candidate(5))).version == 4
    it.collect(report(5, [1.0, 1.0]))
    assert it.collect(report(5, [100.0, 100.0])) is None
    assert it.collect(report(4, [100.0] * 3)) is None
    assert it.collect(report(5, [100.0] * 3, deterministic=False)) is None
    assert known(it.collect(report(5, [100.0], first=2))).mean == pytest.approx(100.0)


def test_an_interval_requests_evaluations_without_a_target() -> None:
    it = evaluation(None, interval=100)
    assert not it.wanted([], update=1, env_steps=99)
    assert it.wanted([], update=1, env_steps=100)
    it.note_published(candidate(5, update=1))
    it.collect(report(5, [1.0] * 3))
    assert not it.wanted([], update=2, env_steps=199)
    assert it.wanted([], update=2, env_steps=200)


def test_an_answer_without_an_outcome_is_abandoned() -> None:
    it = evaluation()
    assert it.request(3)
    it.note_published(candidate(5, update=3))
    assert known(it.abandon()).version == 5
    assert it.abandon() is None
    assert not it.pending
    assert not it.request(3)
    assert it.request(4)


def test_sampled_and_deterministic_episodes_make_one_result() -> None:
    it = measured(both=True)
    it.note_published(candidate(5))
    assert it.collect(report(5, [1.0, 2.0, 3.0], deterministic=False)) is None
    assert it.collect(report(5, [10.0, 20.0])) is None
    result = known(it.collect(report(5, [30.0], first=2)))
    # Of 10, 20, 30 and of 1, 2, 3, over all of them and not over one less.
    assert result.scores == {
        "deterministic": Score.of([10.0, 20.0, 30.0]),
        "sampled": Score.of([1.0, 2.0, 3.0]),
    }
    assert result.counted.std == pytest.approx((200 / 3) ** 0.5)
    assert (result.mean, result.counted.episodes) == (20.0, 3)
    deviation = pytest.approx((2 / 3) ** 0.5)
    assert scores_json(result)["sampled"] == {"mean": 2.0, "std": deviation, "episodes": 3}
    assert it.figures() == {
        "evaluation_deterministic": 20.0,
        "evaluation_sampled": 2.0,
        "evaluation_version": 5,
        "evaluation_best": 20.0,
        "evaluations_without_improvement": 0,
    }


@pytest.mark.parametrize("both", [False, True])
def test_the_sampled_return_may_decide(*, both: bool) -> None:
    it = Evaluation(EvaluationSection(episodes=1, both=both, deterministic=False), 5.0, stop_at_target=True)
    it.note_published(candidate(5))
    it.collect(report(5, [9.0]))
    it.collect(report(5, [1.0], deterministic=False))
    assert (known(it.best).mean, it.solved) == (1.0, None)


COURSE = [10.0, 12.0, 12.4, 12.5, 12.6, 14.0, 13.0, float("nan"), 14.5]
WITHOUT = [0, 0, 1, 2, 0, 0, 1, 2, 3]
"""Evaluations since an improvement by more than half a unit: 12.5 is none over 12.0, 12.6 is."""


def test_patience_counts_evaluations_without_an_improvement() -> None:
    patience = Patience(EvaluationSection(patience=3, min_improvement=0.5, interval_steps=1))
    for mean, without in zip(COURSE, WITHOUT, strict=True):
        assert not patience.exhausted
        patience.judge(mean)
        assert patience.without == without
    assert patience.exhausted


def test_patience_and_the_best_weights_survive_a_checkpoint() -> None:
    it = measured(patience=3, interval_steps=100)
    for version, mean in ((1, 5.0), (2, 7.0), (3, 6.0), (4, 6.5)):
        play(it, version, mean)
    it.note_published(candidate(6, update=6))
    again = restored(it, measured(patience=3, interval_steps=100))
    assert again.best == it.best
    assert known(again.best).candidate.blob == b"w"
    assert (again.without_improvement, again.is_out_of_patience) == (2, False)
    assert not again.wanted([], update=4, env_steps=10**6)
    assert not again.wanted([], update=6, env_steps=499)
    assert again.wanted([], update=6, env_steps=500)
    play(again, 7, 7.0)
    assert again.is_out_of_patience
    assert not again.wanted([], update=8, env_steps=10**6), "the run is about to end"


def test_the_last_result_survives_a_checkpoint() -> None:
    it = evaluation(6.0, stop=False)
    for version, mean in ((1, 7.0), (2, 8.0), (3, 5.5)):
        it.note_published(candidate(version, update=version))
        it.collect(report(version, [mean] * 3))
        again = restored(it, evaluation(6.0, stop=False))
        last = known(again.last)
        assert (last.candidate.version, last.mean) == (version, mean)
        assert again.solved == again.best == it.best
        assert again.figures() == it.figures()
        assert again.state() == it.state()


def test_a_result_is_compared_with_the_weights_that_training_began_with() -> None:
    section = EvaluationSection(episodes=6, base=True, both=True)
    it = Evaluation(section, None, stop_at_target=False)
    assert it.collect(report(0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])) is None
    it.collect(report(0, [50.0] * 6, deterministic=False))  # not the way that counts
    for one in (it, restored(it, Evaluation(section, None, stop_at_target=False))):
        one.note_published(candidate(5))
        one.collect(report(5, [9.0] * 6, deterministic=False))
        result = known(one.collect(report(5, [3.0, 4.0, 5.0, 6.0, 7.0, 9.0])))
        base = known(result.base)
        assert (base.mean, base.difference) == pytest.approx((3.5, 13 / 6))
        assert base.verdict == "better"
        assert restored(one, measured(base=True)).best == result


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_nothing_is_compared_with_a_base_that_is_not_known_or_not_asked_for(
    *, before: bool, after: bool
) -> None:
    it = measured(base=before)
    it.collect(report(0, [1.0, 2.0, 3.0]))
    if not before:
        play(it, 5, 2.0)
        assert known(it.last).base is None
    again = restored(it, measured(base=after))
    assert (again.best, again.figures()) == (it.best, it.figures())
    play(again, 6, 3.0)
    assert known(again.last).base is None


def test_a_patience_without_evaluations_is_refused() -> None:
    check_patience(EvaluationSection(patience=3, interval_steps=1))
    with pytest.raises(ConfigurationError, match=r"evaluation.patience=3: .*evaluation.interval_steps"):
        check_patience(EvaluationSection(patience=3))


def episodes() -> Episodes:
    absent: Any = None
    evaluation = Evaluation(EvaluationSection(), None, stop_at_target=False)
    return Episodes(absent, absent, evaluation, threading.Event(), lambda _result: None)


def tell(it: Episodes, number: int, returns: list[float]) -> None:
    played = tuple(episode(0, index, value, int(10 * value)) for index, value in enumerate(returns))
    report = Report(session=1, sequence=number, episodes=played)
    it._take(ReportEntry(number=number, actor_id="actor-0", report=report))


def test_the_moving_average_is_that_of_the_last_100_episodes_across_a_checkpoint() -> None:
    it = episodes()
    assert it.means() == (None, None)
    tell(it, 1, [1.0, 2.0, 6.0])
    assert it.means() == (3.0, 30.0)
    tell(it, 2, [float(value) for value in range(4, 151)])
    assert WINDOW == 100
    assert it.count == 150
    assert it.means() == pytest.approx((100.5, 1005.0))
    assert "penstock_mean_return 100.5" in metrics.exposition("learner").decode()
    again = episodes()
    again.restore(it.state())
    assert again.means() == it.means()
    tell(again, 8, [151.0])
    assert again.means()[0] == pytest.approx(101.5)
    assert (again.count, again.state()["after"]) == (151, 8)
