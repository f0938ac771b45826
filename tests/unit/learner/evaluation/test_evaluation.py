"""When an evaluation is asked for, what counts as solved, and when it is time to end."""

import json
from typing import Any

import pytest

from penstock.config.settings import ConfigurationError, EvaluationSection
from penstock.learner.evaluation import (
    MISSED_EPISODES,
    RECENT_EPISODES,
    Candidate,
    Evaluation,
    Patience,
    Score,
    check_patience,
    scores_json,
)
from penstock.protocol.messages import Episode, Report

GOOD = [100.0] * RECENT_EPISODES


def evaluation(target: float | None = 90.0, *, stop: bool = True, interval: int | None = None) -> Evaluation:
    """Of three episodes."""
    return Evaluation(EvaluationSection(episodes=3, interval_steps=interval), target, stop_at_target=stop)


def measured(**section: Any) -> Evaluation:
    """Of three episodes, without a target."""
    return Evaluation(EvaluationSection(episodes=3, **section), None, stop_at_target=False)


def play(it: Evaluation, version: int, mean: float) -> None:
    """A whole evaluation with that mean."""
    it.note_published(candidate(version, update=version))
    assert it.collect(report(version, [mean - 1, mean, mean + 1])) is not None


def candidate(version: int, update: int = 1) -> Candidate:
    """Weights that were sent to be evaluated."""
    return Candidate(version=version, update=update, env_steps=update * 100, at_s=1.0, blob=b"w")


def report(version: int, returns: list[float], *, first: int = 0, deterministic: bool = True) -> Report:
    """Results of consecutive episodes from `first` on."""
    episodes = tuple(
        Episode(slot_id=first + i, episode_id=0, episode_return=r, length=1, terminated=True, version=version)
        for i, r in enumerate(returns)
    )
    return Report(session=1, sequence=1, evaluation=True, deterministic=deterministic, episodes=episodes)


def test_a_run_without_evaluations_asks_for_none() -> None:
    it = Evaluation(EvaluationSection(episodes=0, interval_steps=1), 90.0, stop_at_target=True)
    assert not it.wanted(GOOD, update=1, env_steps=100)
    assert not it.request(1)
    assert not it.pending


@pytest.mark.promise("run-solved-whose-environments")
def test_a_curve_that_says_nothing_any_more_asks_too() -> None:
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


def test_the_curve_asks_and_only_the_result_solves() -> None:
    it = evaluation()
    assert not it.wanted(GOOD[1:], update=1, env_steps=10)
    assert it.wanted(GOOD, update=1, env_steps=10)
    assert not it.wanted(GOOD, update=2, env_steps=20)
    it.note_published(candidate(5))
    assert it.solved is None
    assert it.collect(report(5, [80.0, 90.0])) is None
    result = it.collect(report(5, [100.0], first=2))
    assert result is not None
    assert result.mean == pytest.approx(90.0)
    assert it.solved is result


def test_a_result_below_the_target_lets_training_go_on_and_ask_again() -> None:
    it = evaluation()
    assert it.wanted(GOOD, update=1, env_steps=10)
    it.note_published(candidate(5, update=1))
    it.collect(report(5, [1.0, 2.0, 3.0]))
    assert it.solved is None
    assert not it.wanted(GOOD, update=1, env_steps=10)
    assert it.wanted(GOOD, update=2, env_steps=20)


def test_sampled_episodes_count_where_the_run_is_measured_by_them() -> None:
    it = Evaluation(EvaluationSection(episodes=3, deterministic=False), 90.0, stop_at_target=True)
    it.note_published(candidate(5))
    assert it.collect(report(5, [80.0, 90.0, 100.0])) is None
    assert it.collect(report(5, [80.0, 90.0, 100.0], deterministic=False)) is not None


def test_repeated_foreign_and_sampled_episodes_do_not_count() -> None:
    it = evaluation()
    it.note_published(candidate(5))
    it.collect(report(5, [1.0, 1.0]))
    assert it.collect(report(5, [100.0, 100.0])) is None
    assert it.collect(report(4, [100.0] * 3)) is None
    assert it.collect(report(5, [100.0] * 3, deterministic=False)) is None
    result = it.collect(report(5, [100.0], first=2))
    assert result is not None
    assert result.mean == pytest.approx(100.0)


def test_the_best_version_may_solve_when_the_last_does_not() -> None:
    it = evaluation(stop=False)
    for version, mean in ((5, 95.0), (6, 10.0)):
        it.note_published(candidate(version, update=version))
        it.collect(report(version, [mean] * 3))
    assert it.solved is it.best
    assert it.last is not it.best


def test_a_candidate_that_replaces_another_names_it() -> None:
    it = evaluation()
    assert it.note_published(candidate(5)) is None
    replaced = it.note_published(candidate(6))
    assert replaced is not None
    assert replaced.version == 5


def test_an_interval_asks_without_a_target() -> None:
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
    abandoned = it.abandon()
    assert abandoned is not None
    assert abandoned.version == 5
    assert it.abandon() is None
    assert not it.pending
    assert not it.request(3)
    assert it.request(4)


def test_both_ways_to_play_make_one_result() -> None:
    it = measured(both=True)
    it.note_published(candidate(5))
    assert it.collect(report(5, [1.0, 2.0, 3.0], deterministic=False)) is None
    assert it.collect(report(5, [10.0, 20.0])) is None
    result = it.collect(report(5, [30.0], first=2))
    assert result is not None
    # Of 10, 20, 30 and of 1, 2, 3, over all of them and not over one less.
    assert result.scores == {
        "deterministic": Score.of([10.0, 20.0, 30.0]),
        "sampled": Score.of([1.0, 2.0, 3.0]),
    }
    assert result.counted.std == pytest.approx((200 / 3) ** 0.5)
    assert (result.mean, result.counted.episodes) == (20.0, 3)
    assert scores_json(result)["sampled"] == {
        "mean": 2.0,
        "std": pytest.approx((2 / 3) ** 0.5),
        "episodes": 3,
    }
    assert it.figures() == {
        "evaluation_deterministic": 20.0,
        "evaluation_sampled": 2.0,
        "evaluation_version": 5,
        "evaluation_best": 20.0,
        "evaluations_without_improvement": 0,
    }


def test_what_counts_may_be_the_sampled_one_of_both() -> None:
    it = Evaluation(EvaluationSection(episodes=1, both=True, deterministic=False), 5.0, stop_at_target=True)
    it.note_published(candidate(5))
    it.collect(report(5, [9.0]))
    it.collect(report(5, [1.0], deterministic=False))
    assert it.best is not None
    assert it.best.mean == 1.0
    assert it.solved is None


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


def test_without_patience_nothing_is_hopeless() -> None:
    it = measured()
    for version in range(1, 30):
        play(it, version, 1.0)
    assert it.without_improvement == 28
    assert not it.is_out_of_patience


def test_patience_and_the_best_weights_survive_a_checkpoint() -> None:
    it = measured(patience=3, interval_steps=100)
    for version, mean in ((1, 5.0), (2, 7.0), (3, 6.0), (4, 6.5)):
        play(it, version, mean)
    it.note_published(candidate(6, update=6))
    state, blob = it.state()
    again = measured(patience=3, interval_steps=100)
    again.restore(json.loads(json.dumps(state)), blob)
    assert again.best == it.best
    assert again.best is not None
    assert again.best.candidate.blob == b"w"
    assert (again.without_improvement, again.is_out_of_patience) == (2, False)
    assert not again.wanted([], update=4, env_steps=10**6)
    assert not again.wanted([], update=6, env_steps=499)
    assert again.wanted([], update=6, env_steps=500)
    play(again, 7, 7.0)
    assert again.is_out_of_patience
    assert not again.wanted([], update=8, env_steps=10**6), "the run is about to end"


def test_the_last_result_survives_a_checkpoint() -> None:
    it = evaluation(6.0, stop=False)
    for version, mean in ((1, 7.0), (2, 8.0), (3, 6.5)):
        it.note_published(candidate(version, update=version))
        it.collect(report(version, [mean] * 3))
        state, blob = it.state()
        again = evaluation(6.0, stop=False)
        again.restore(json.loads(json.dumps(state)), blob)
        assert again.last is not None
        assert (again.last.candidate.version, again.last.mean) == (version, mean)
        assert again.solved == again.best == it.best
        assert again.figures() == it.figures()
        assert again.state() == it.state()


def test_a_result_says_how_it_compares_with_what_training_began_with() -> None:
    it = Evaluation(EvaluationSection(episodes=6, base=True, both=True), None, stop_at_target=False)
    assert it.collect(report(0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])) is None
    it.collect(report(0, [50.0] * 6, deterministic=False))  # not the way that counts
    state, blob = it.state()
    again = Evaluation(EvaluationSection(episodes=6, base=True, both=True), None, stop_at_target=False)
    again.restore(json.loads(json.dumps(state)), blob)
    for one in (it, again):
        one.note_published(candidate(5))
        one.collect(report(5, [9.0] * 6, deterministic=False))
        result = one.collect(report(5, [3.0, 4.0, 5.0, 6.0, 7.0, 9.0]))
        assert result is not None
        assert result.base is not None
        assert (result.base.mean, result.base.difference) == pytest.approx((3.5, 13 / 6))
        assert result.base.verdict == "better"
        told, weights = one.state()
        restored = Evaluation(EvaluationSection(base=True), None, stop_at_target=False)
        restored.restore(json.loads(json.dumps(told)), weights)
        assert restored.best == result


def test_without_the_base_nothing_is_compared() -> None:
    it = measured()
    it.collect(report(0, [1.0, 2.0, 3.0]))
    play(it, 5, 2.0)
    assert it.last is not None
    assert it.last.base is None
    state, blob = it.state()
    again = measured(base=True)
    again.restore(state, blob)
    assert again.best == it.best
    play(again, 6, 3.0)
    assert again.last is not None
    assert again.last.base is None


def test_a_run_that_goes_on_without_the_base_compares_nothing() -> None:
    it = measured(base=True)
    it.collect(report(0, [1.0, 2.0, 3.0]))
    again = measured()
    again.restore(*it.state())
    play(again, 5, 2.0)
    assert again.last is not None
    assert again.last.base is None


def test_before_the_first_result_there_is_little_to_keep() -> None:
    state, blob = measured().state()
    again = measured()
    again.restore(json.loads(json.dumps(state)), blob)
    assert (again.best, blob, again.figures()) == (None, b"", {})


def test_a_patience_that_is_never_tried_is_refused() -> None:
    check_patience(EvaluationSection(patience=3, interval_steps=1))
    with pytest.raises(ConfigurationError, match=r"evaluation.patience=3: .*evaluation.interval_steps"):
        check_patience(EvaluationSection(patience=3))
