"""The window that the curve is drawn from."""

import threading
from typing import Any

import pytest

from penstock.broker.log.replies import ReportEntry
from penstock.config.settings import EvaluationSection
from penstock.learner.evaluation import WINDOW, Episodes, Evaluation
from penstock.protocol.messages import Episode, Report
from penstock.runtime import metrics


def episodes() -> Episodes:
    """Told of reports by the test: nothing here reads a log."""
    absent: Any = None
    evaluation = Evaluation(EvaluationSection(), None, stop_at_target=False)
    return Episodes(absent, absent, evaluation, threading.Event(), lambda _result: None)


def tell(it: Episodes, number: int, returns: list[float]) -> None:
    """A report of training episodes, as long as ten times their return."""
    played = tuple(
        Episode(
            slot_id=0,
            episode_id=index,
            episode_return=value,
            length=int(10 * value),
            terminated=True,
            version=1,
        )
        for index, value in enumerate(returns)
    )
    report = Report(session=1, sequence=number, episodes=played)
    it._take(ReportEntry(number=number, actor_id="actor-0", report=report))


def test_the_moving_average_is_that_of_the_last_100_episodes() -> None:
    it = episodes()
    assert it.means() == (None, None)
    tell(it, 1, [1.0, 2.0, 6.0])
    assert it.means() == (3.0, 30.0)
    tell(it, 2, [float(value) for value in range(4, 151)])
    assert WINDOW == 100
    assert it.count == 150
    assert it.means() == pytest.approx((100.5, 1005.0))
    assert "penstock_mean_return 100.5" in metrics.exposition("learner").decode()


def test_the_window_goes_on_after_a_checkpoint() -> None:
    it = episodes()
    tell(it, 7, [float(value) for value in range(1, 151)])
    again = episodes()
    again.restore(it.state())
    assert again.means() == it.means()
    tell(again, 8, [151.0])
    assert again.means()[0] == pytest.approx(101.5)
    assert (again.count, again.state()["after"]) == (151, 8)
