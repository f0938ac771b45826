"""The judgement of what sets the pace, and the figures that it is made from."""

from dataclasses import replace
from typing import Any, cast

import pytest

from penstock.launch.inspection.flow import (
    Bound,
    Figures,
    comparable,
    figures_between,
    flow_between,
    judge,
    role_rows,
)
from penstock.launch.inspection.processes import Learnt, Observation, ProcessSnapshot, Sample
from penstock.protocol.messages import RunState
from penstock.v1 import control_pb2

WORKING = Figures(
    actors=2,
    updates=10,
    since_update_s=0.1,
    learner_wait_share=0.1,
    credit_wait_share=0.1,
    ack_wait_share=0.0,
    ack_s=0.003,
)


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        ({"learner_wait_share": 0.7, "credit_wait_share": 0.0}, Bound.ACTOR),
        ({"learner_wait_share": 0.02, "credit_wait_share": 0.6}, Bound.LEARNER),
        ({"learner_wait_share": 0.5, "ack_wait_share": 0.4}, Bound.BROKER),
        ({"credit_wait_share": 0.5, "ack_wait_share": 0.3}, Bound.LEARNER),
        ({"learner_wait_share": 0.4, "credit_wait_share": 0.5}, Bound.PACING),
        ({"learner_wait_share": 0.9, "credit_wait_share": 0.3}, Bound.ACTOR),
        ({"learner_wait_share": 0.3, "credit_wait_share": 0.9}, Bound.LEARNER),
        ({}, Bound.BALANCED),
        ({"learner_wait_share": 0.7, "credit_wait_share": None, "ack_wait_share": None}, Bound.ACTOR),
    ],
)
def test_a_process_that_waits_points_at_the_one_waited_for(
    shares: dict[str, float | None], bound: Bound
) -> None:
    verdict = judge(replace(WORKING, **shares))  # type: ignore[arg-type]
    assert verdict.bound is bound
    for share in shares.values():
        assert share is None or f"{share:.0%}" in verdict.line


def test_the_figures_are_in_the_line() -> None:
    assert judge(replace(WORKING, credit_wait_share=0.63)).line == (
        "learner-bound: the learner waits 10% of its time for experience, actors wait 63% of their time for "
        "credit, 0% for acknowledgements, an acknowledgement takes 3.0 ms"
    )


@pytest.mark.parametrize(
    ("problem", "bound"),
    [
        ({"learner_problem": "learner stands still: stopped by a signal"}, Bound.LEARNER),
        ({"broker_problem": "redis has ended"}, Bound.BROKER),
        ({"broker_problem": "redis has ended", "learner_problem": "learner has ended"}, Bound.BROKER),
        ({"actor_problem": "actor-0 has ended"}, Bound.ACTOR),
    ],
)
def test_a_process_that_does_not_move_goes_before_all_shares(problem: dict[str, str], bound: Bound) -> None:
    figures = replace(WORKING, updates=0, since_update_s=12.3, starved=2, **problem)  # type: ignore[arg-type]
    verdict = judge(figures)
    assert verdict.bound is bound
    assert next(iter(problem.values())) in verdict.reason
    assert "no update for 12 s; 2 of 2 actors wait for credit" in verdict.reason


def test_a_learner_that_makes_no_update_while_all_actors_wait_is_the_bottleneck() -> None:
    verdict = judge(replace(WORKING, updates=0, since_update_s=7.0, starved=2))
    assert verdict.line == "learner-bound: no update for 7 s; 2 of 2 actors wait for credit"


def test_actors_that_fill_no_batch_yet_are_the_bottleneck() -> None:
    verdict = judge(replace(WORKING, updates=0, since_update_s=None))
    assert verdict.line == "actor-bound: no update yet; actors have credit and fill no batch yet"


@pytest.mark.parametrize("figures", [Figures(), Figures(halted="paused by an operator", updates=0, actors=2)])
def test_what_was_not_measured_is_not_judged(figures: Figures) -> None:
    verdict = judge(figures)
    assert verdict.bound is Bound.UNKNOWN
    assert verdict.reason in ("nothing has been measured yet", "paused by an operator")


# ---------------------------------------------------------------- from two observations


def snapshot(name: str, at_s: float, problem: str = "", pid: int = 1, **values: float) -> ProcessSnapshot:
    """A process; its values are named as the metrics are, with `__cause_leave` for a label."""
    samples: list[Sample] = []
    for key, value in values.items():
        metric, _, label = key.partition("__")
        labels = dict([label.split("_", 1)]) if label else {}
        samples.append((f"penstock_{metric}", labels, value))
    role = name.partition("-")[0]
    return ProcessSnapshot(name=name, role=role, pid=pid, at_s=at_s, problem=problem, samples=tuple(samples))


def session(actor_id: str, sequence: int, begin_through: int) -> control_pb2.SessionStatus:
    """An open session of a rollout worker that acts with version 4."""
    return control_pb2.SessionStatus(
        actor_id=actor_id, role="rollout", sequence=sequence, begin_through=begin_through, applied_version=4
    )


def seen(
    at_s: float, *sights: ProcessSnapshot, sessions: tuple[control_pb2.SessionStatus, ...] = ()
) -> Observation:
    """A moment of a run that goes on."""
    status = control_pb2.StatusReply(run="r", desired=cast("Any", RunState.RUNNING), sessions=sessions)
    status.latest.version, status.log_head, status.settled = 5, 30, 20
    learnt = Learnt(row={"updates": 3}, update_at=1000.0)
    return Observation(at_s=at_s, wall_s=1000.0 + at_s, sights=sights, status=status, learnt=learnt)


def learner(at_s: float, updates: float, wait: float, compute: float, problem: str = "") -> ProcessSnapshot:
    """A learner with its counters."""
    return snapshot(
        "learner",
        at_s,
        problem,
        updates_total=updates,
        trained_steps_total=updates * 1024,
        update_seconds_sum__phase_wait=wait,
        update_seconds_sum__phase_compute=compute,
    )


def actor(name: str, at_s: float, steps: float, credit_s: float, pid: int = 1) -> ProcessSnapshot:
    """An actor with its counters."""
    return snapshot(
        name,
        at_s,
        pid=pid,
        environment_steps_total=steps,
        actor_wait_seconds_total__cause_leave=credit_s,
        actor_wait_seconds_total__cause_outbox=0.0,
        ack_latency_seconds_sum=steps / 1000,
        ack_latency_seconds_count=steps / 100,
    )


def test_rates_are_differences_of_counters_by_time() -> None:
    before = seen(0, actor("actor-0", 0, 100, 0), actor("actor-1", 0, 0, 0), learner(0, 1, 0, 0))
    after = seen(2, actor("actor-0", 2, 300, 1), actor("actor-1", 2, 400, 2), learner(2, 5, 0.5, 1.5))
    flow = flow_between(before, after)
    assert (flow["environment_steps"], flow["trained_steps"], flow["updates"]) == (300, 2048, 2)
    assert flow["ack_s"] == pytest.approx(0.1)
    assert (flow["waiting_fragments"], flow["version"]) == (10, 5)
    figures = figures_between(before, after)
    assert figures.learner_wait_share == 0.25
    assert figures.credit_wait_share == 0.75
    assert judge(figures).bound is Bound.LEARNER


def test_the_oldest_look_at_which_all_answered_is_compared_with() -> None:
    silent = seen(0, learner(0, 1, 0, 0), snapshot("actor-0", 0, "stands still: stopped by a signal"))
    starting, now = seen(1, learner(1, 2, 0, 1)), seen(4, learner(4, 5, 0, 4), actor("actor-0", 4, 9, 0))
    whole = seen(2, learner(2, 3, 0, 2), actor("actor-0", 2, 5, 0))
    assert comparable([silent, starting, whole, now]) is whole
    assert comparable([silent, starting, now]) is silent
    assert comparable([now]) is now


def test_an_actor_that_was_started_again_counts_from_its_second_look_on() -> None:
    before = seen(0, actor("actor-0", 0, 5000, 0), actor("actor-1", 0, 0, 0))
    after = seen(1, actor("actor-0", 1, 20, 0, pid=2), actor("actor-1", 1, 7, 0))
    assert flow_between(before, after)["environment_steps"] == 7


def test_a_wait_that_has_not_ended_counts_as_the_whole_window() -> None:
    before = seen(0, actor("actor-0", 0, 100, 3), learner(0, 3, 1, 1))
    after = seen(2, actor("actor-0", 2, 100, 3), learner(2, 3, 1, 1), sessions=(session("actor-0", 7, 7),))
    figures = figures_between(before, after)
    assert (figures.credit_wait_share, figures.learner_wait_share, figures.starved) == (1.0, 0.0, 1)
    assert judge(figures).line == "learner-bound: no update for 2 s; 1 of 1 actors wait for credit"


def test_one_look_alone_measures_nothing() -> None:
    only = seen(3, actor("actor-0", 3, 100, 3), learner(3, 3, 1, 1), sessions=(session("actor-0", 7, 7),))
    assert judge(figures_between(only, only)).line == "not measured: nothing has been measured yet"
    assert flow_between(only, only)["environment_steps"] is None


def test_a_learner_that_was_stopped_is_named() -> None:
    before = seen(0, actor("actor-0", 0, 100, 3), learner(0, 3, 1, 1))
    stopped = snapshot("learner", 9, "stands still: stopped by a signal")
    after = seen(9, actor("actor-0", 9, 100, 3), stopped, sessions=(session("actor-0", 7, 7),))
    assert judge(figures_between(before, after)).line == (
        "learner-bound: learner stands still: stopped by a signal; no update for 9 s; 1 of 1 actors wait "
        "for credit"
    )


def test_one_dead_actor_of_two_is_no_bottleneck_by_itself() -> None:
    dead = snapshot("actor-1", 2, "has ended")
    after = seen(2, actor("actor-0", 2, 100, 0), dead, learner(2, 3, 1, 1))
    assert figures_between(after, after).actor_problem == ""
    assert figures_between(seen(0), seen(2, dead)).actor_problem == "actor-1 has ended"


def test_a_paused_run_and_one_that_is_starting_are_not_judged() -> None:
    paused = seen(1, learner(1, 1, 0, 0))
    assert paused.status is not None
    paused.status.desired = cast("Any", RunState.PAUSED)
    assert figures_between(paused, paused).halted == "paused by an operator"
    starting = Observation(at_s=1, wall_s=1, sights=(), status=None, silence="no broker has come up yet")
    assert figures_between(starting, starting).halted == "no broker has come up yet"


def test_a_role_has_one_row_with_rate_lag_version_restarts_and_health() -> None:
    launcher = snapshot("launcher", 2, restarts_total__role_actor=3)
    sights = [actor("actor-0", 2, 300, 0), snapshot("actor-1", 2, "has ended"), launcher]
    after = seen(2, *sights, learner(2, 5, 0, 1), sessions=(session("actor-0", 1, 2),))
    before = seen(0, actor("actor-0", 0, 100, 0), learner(0, 1, 0, 0))
    rows = role_rows(after, flow_between(before, after))
    assert [row.role for row in rows] == ["actor", "learner", "launcher"]
    actors = rows[0]
    assert (actors.healthy, actors.of, actors.restarts) == (1, 2, 3)
    assert (actors.rate, actors.lag, actors.version) == ("100 steps/s", "1 version behind", "4")
    assert actors.problems == ("actor-1 has ended",)
    assert rows[1].rate == "2.0 updates/s"
