"""When an evaluation is asked for, and what counts as solved."""

import pytest

from learner.evaluation import RECENT_EPISODES, Candidate, Evaluation
from penstock.runtime.settings import EvaluationSection
from penstock.wire.messages import Episode, Report

GOOD = [100.0] * RECENT_EPISODES


def evaluation(target: float | None = 90.0, *, stop: bool = True, interval: int | None = None) -> Evaluation:
    """Of three episodes."""
    return Evaluation(EvaluationSection(episodes=3, interval_steps=interval), target, stop_at_target=stop)


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


def test_the_curve_asks_and_only_the_result_solves() -> None:
    """Once, until the result is there."""
    it = evaluation()
    assert not it.wanted(GOOD[1:], update=1, env_steps=10)
    assert it.wanted(GOOD, update=1, env_steps=10)
    assert not it.wanted(GOOD, update=2, env_steps=20)
    it.requested(candidate(5))
    assert it.solved is None
    assert it.collect(report(5, [80.0, 90.0])) is None
    result = it.collect(report(5, [100.0], first=2))
    assert result is not None
    assert result.mean == pytest.approx(90.0)
    assert it.solved is result


def test_a_result_below_the_target_lets_training_go_on_and_ask_again() -> None:
    """With newer weights only."""
    it = evaluation()
    assert it.wanted(GOOD, update=1, env_steps=10)
    it.requested(candidate(5, update=1))
    it.collect(report(5, [1.0, 2.0, 3.0]))
    assert it.solved is None
    assert not it.wanted(GOOD, update=1, env_steps=10)
    assert it.wanted(GOOD, update=2, env_steps=20)


def test_sampled_episodes_count_where_the_run_is_measured_by_them() -> None:
    """And deterministic ones then do not."""
    it = Evaluation(EvaluationSection(episodes=3, deterministic=False), 90.0, stop_at_target=True)
    it.requested(candidate(5))
    assert it.collect(report(5, [80.0, 90.0, 100.0])) is None
    assert it.collect(report(5, [80.0, 90.0, 100.0], deterministic=False)) is not None


def test_repeated_foreign_and_sampled_episodes_do_not_count() -> None:
    """An evaluation actor that began again reports the same slots."""
    it = evaluation()
    it.requested(candidate(5))
    it.collect(report(5, [1.0, 1.0]))
    assert it.collect(report(5, [100.0, 100.0])) is None
    assert it.collect(report(4, [100.0] * 3)) is None
    assert it.collect(report(5, [100.0] * 3, deterministic=False)) is None
    result = it.collect(report(5, [100.0], first=2))
    assert result is not None
    assert result.mean == pytest.approx(100.0)


def test_the_best_version_may_solve_when_the_last_does_not() -> None:
    """Both are remembered."""
    it = evaluation(stop=False)
    for version, mean in ((5, 95.0), (6, 10.0)):
        it.requested(candidate(version, update=version))
        it.collect(report(version, [mean] * 3))
    assert it.solved is it.best
    assert it.last is not it.best


def test_a_candidate_that_replaces_another_names_it() -> None:
    """Its pinned weights are kept for nobody."""
    it = evaluation()
    assert it.requested(candidate(5)) is None
    replaced = it.requested(candidate(6))
    assert replaced is not None
    assert replaced.version == 5


def test_an_interval_asks_without_a_target() -> None:
    """Every so many steps."""
    it = evaluation(None, interval=100)
    assert not it.wanted([], update=1, env_steps=99)
    assert it.wanted([], update=1, env_steps=100)
    it.requested(candidate(5, update=1))
    it.collect(report(5, [1.0] * 3))
    assert not it.wanted([], update=2, env_steps=199)
    assert it.wanted([], update=2, env_steps=200)


def test_what_nobody_answers_is_abandoned() -> None:
    """And may be asked again with newer weights."""
    it = evaluation()
    assert it.ask(3)
    it.requested(candidate(5, update=3))
    abandoned = it.abandon()
    assert abandoned is not None
    assert abandoned.version == 5
    assert it.abandon() is None
    assert not it.pending
    assert not it.ask(3)
    assert it.ask(4)
