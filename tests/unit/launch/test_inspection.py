import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from matplotlib.image import imread
from rich.console import Console

from penstock.config.sections import LearnerSection
from penstock.launch.commands.plot import draw
from penstock.launch.inspection.curve import Curve, MetricsTail, Point, Progress, rates, shown
from penstock.launch.inspection.flow import (
    Bound,
    Figures,
    comparable,
    figures_between,
    flow_between,
    judge,
    role_rows,
)
from penstock.launch.inspection.live_view import LiveView, PlainView, limits_of, make_view
from penstock.launch.inspection.processes import (
    Learnt,
    Observation,
    ProcessSnapshot,
    Sample,
    is_alive,
    is_going_on,
    look,
    look_at_all,
    observe,
    read_learnt,
)
from penstock.protocol.messages import RunState
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Endpoint, Health, read_endpoint, serve_http
from penstock.v1 import control_pb2

# ---- The judgement of what sets the pace, and the figures that it is made from.


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
def test_a_waiting_process_points_at_the_process_that_it_waits_for(
    shares: dict[str, float | None], bound: Bound
) -> None:
    verdict = judge(replace(WORKING, **shares))  # type: ignore[arg-type]
    assert verdict.bound is bound
    for share in shares.values():
        assert share is None or f"{share:.0%}" in verdict.line


def test_the_status_line_holds_the_figures() -> None:
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
def test_a_process_without_progress_is_the_bottleneck_before_all_others(
    problem: dict[str, str], bound: Bound
) -> None:
    figures = replace(WORKING, updates=0, since_update_s=12.3, starved=2, **problem)  # type: ignore[arg-type]
    verdict = judge(figures)
    assert verdict.bound is bound
    assert next(iter(problem.values())) in verdict.reason
    assert "no update for 12 s; 2 of 2 actors wait for credit" in verdict.reason


def test_a_learner_that_makes_no_update_while_all_actors_wait_is_the_bottleneck() -> None:
    verdict = judge(replace(WORKING, updates=0, since_update_s=7.0, starved=2))
    assert verdict.line == "learner-bound: no update for 7 s; 2 of 2 actors wait for credit"


def test_actors_that_have_not_filled_a_batch_are_the_bottleneck() -> None:
    verdict = judge(replace(WORKING, updates=0, since_update_s=None))
    assert verdict.line == "actor-bound: no update yet; actors have credit and fill no batch yet"


@pytest.mark.parametrize("figures", [Figures(), Figures(halted="paused by an operator", updates=0, actors=2)])
def test_figures_that_were_not_measured_are_not_judged(figures: Figures) -> None:
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


def test_rates_are_relative_to_the_oldest_look_that_all_answered() -> None:
    silent = seen(0, learner(0, 1, 0, 0), snapshot("actor-0", 0, "stands still: stopped by a signal"))
    starting, now = seen(1, learner(1, 2, 0, 1)), seen(4, learner(4, 5, 0, 4), actor("actor-0", 4, 9, 0))
    whole = seen(2, learner(2, 3, 0, 2), actor("actor-0", 2, 5, 0))
    assert comparable([silent, starting, whole, now]) is whole
    assert comparable([silent, starting, now]) is silent
    assert comparable([now]) is now


def test_a_restarted_actor_counts_from_its_second_look() -> None:
    before = seen(0, actor("actor-0", 0, 5000, 0), actor("actor-1", 0, 0, 0))
    after = seen(1, actor("actor-0", 1, 20, 0, pid=2), actor("actor-1", 1, 7, 0))
    assert flow_between(before, after)["environment_steps"] == 7


def test_an_unfinished_wait_counts_as_the_whole_window() -> None:
    before = seen(0, actor("actor-0", 0, 100, 3), learner(0, 3, 1, 1))
    after = seen(2, actor("actor-0", 2, 100, 3), learner(2, 3, 1, 1), sessions=(session("actor-0", 7, 7),))
    figures = figures_between(before, after)
    assert (figures.credit_wait_share, figures.learner_wait_share, figures.starved) == (1.0, 0.0, 1)
    assert judge(figures).line == "learner-bound: no update for 2 s; 1 of 1 actors wait for credit"


def test_a_single_observation_measures_nothing() -> None:
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


def test_one_dead_actor_of_two_is_not_a_bottleneck() -> None:
    dead = snapshot("actor-1", 2, "has ended")
    after = seen(2, actor("actor-0", 2, 100, 0), dead, learner(2, 3, 1, 1))
    assert figures_between(after, after).actor_problem == ""
    assert figures_between(seen(0), seen(2, dead)).actor_problem == "actor-1 has ended"


def test_paused_and_starting_runs_have_no_bottleneck() -> None:
    paused = seen(1, learner(1, 1, 0, 0))
    assert paused.status is not None
    paused.status.desired = cast("Any", RunState.PAUSED)
    assert figures_between(paused, paused).halted == "paused by an operator"
    starting = Observation(at_s=1, wall_s=1, sights=(), status=None, silence="no broker has come up yet")
    assert figures_between(starting, starting).halted == "no broker has come up yet"


def test_each_role_has_a_row_with_rate_lag_version_restarts_and_health() -> None:
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


# ---- Runs as curves and as pictures.


def row(steps: int, value: float | None = None, seconds: float = 0.0) -> dict[str, object]:
    """A line of `metrics.jsonl`."""
    return {
        "env_steps": steps,
        "mean_return": value,
        "staleness_p50": 1,
        "updates": steps,
        "training_seconds": seconds,
    }


def write(path: Path, *rows: dict[str, object]) -> Path:
    """Add whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)
    return path


def returns(points: list[Point]) -> list[tuple[int, float | None]]:
    """Steps and return."""
    return [(point.env_steps, point.mean_return) for point in points]


def test_steps_that_a_resumed_learner_did_again_count_once(tmp_path: Path) -> None:
    rows = [row(1, 1.0), row(2, None), row(3, 3.0), row(4, 4.0), row(3, 3.5), row(5, 5.0)]
    curve = Curve(write(tmp_path / "metrics.jsonl", *rows))
    assert returns(curve.poll()) == [(1, 1.0), (2, None), (3, 3.5), (5, 5.0)]


def test_a_curve_grows_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curve = Curve(path)
    assert curve.poll() == []
    write(path, row(1, float("nan")))
    with path.open("a") as file:
        file.write('{"env_st\n{"env_steps": 2, "mean_re')
        file.flush()
        assert returns(curve.poll()) == [(1, None)]
        file.write('turn": 7.5}\n')
    assert returns(curve.poll()) == [(1, None), (2, 7.5)]


def test_a_file_that_starts_again_is_a_new_curve(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", row(1, 1.0), row(2, 2.0))
    curve = Curve(path)
    curve.poll()
    path.unlink()
    assert curve.poll() == []
    write(path, row(7, 7.0))
    assert returns(curve.poll()) == [(7, 7.0)]


@pytest.mark.parametrize("lines", [10, 11, 99, 1000])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_long_run_is_thinned_evenly_and_keeps_its_newest_line(
    tmp_path: Path, lines: int, chunk: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    curve = Curve(path, max_points=10)
    for begin in range(0, lines, chunk):
        write(path, *(row(step, float(step)) for step in range(begin, min(lines, begin + chunk))))
        points = curve.poll()
    steps = [point.env_steps for point in points]
    assert (steps[0], steps[-1]) == (0, lines - 1)
    assert 5 <= len(steps) <= 12
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps[:-1])}
    assert len(gaps) == 1


def test_a_line_without_an_update_has_no_staleness(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", row(0), row(64), row(128) | {"updates": 64})
    assert [point.staleness for point in Curve(path).poll()] == [None, 1.0, None]


def test_a_rate_is_taken_over_the_stretch_before_its_point(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, row(0), row(100, None, 2.0), row(400, None, 3.0), row(500, None, 3.0))
    assert rates(Curve(path).poll()) == [None, 50.0, 300.0, None]
    assert rates([]) == []


def test_runs_of_any_length_are_drawn_in_one_plot(tmp_path: Path) -> None:
    for name, length in {"a": 200, "b": 60, "c": 0}.items():
        write(tmp_path / name / "metrics.jsonl", *(row(64 * n, float(n), 0.25 * n) for n in range(length)))
    one, three = tmp_path / "one.png", tmp_path / "three.png"
    draw([tmp_path / "c"], one)
    draw([tmp_path / "a", tmp_path / "b", tmp_path / "c"], three)
    assert imread(three).shape[0] > imread(one).shape[0]
    pixels = (255 * imread(three)[..., :3]).round().astype(int)
    assert all((pixels == colour).all(-1).any() for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)))


# ---- What a person sees, and the figures behind it.


HALF_WAY = Progress(
    env_steps=75_000,
    updates=36,
    publications=37,
    steps_per_second=61_234.5,
    mean_return=231.25,
    staleness_p50=1.0,
    outstanding=2048,
    budget=4096,
    log_bytes=3 * 1024 * 1024,
)


def view_row(steps: int, value: float | None) -> dict[str, object]:
    """A line of `metrics.jsonl`."""
    return {"env_steps": steps, "mean_return": value, "staleness_p50": 1, "updates": 2}


def test_plain_lines_show_all_figures_at_intervals() -> None:
    stream = io.StringIO()
    with PlainView(stream, {"steps": 150_000}, target=475.0) as view:
        view.event("training")
        view.show(HALF_WAY)
        view.show(HALF_WAY)
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" training")
    assert second.split(" ", 1)[1] == (
        "steps 75,000/150,000  rate 61,234/s  return 231.2 of 475  staleness 1.0  buffer 50% 3.0 MiB  "
        "updates 36  publications 37"
    )


@pytest.mark.parametrize(
    ("limits", "begins"),
    [
        ({"total_updates": 300}, "updates 36/300  rate 61,234/s"),
        ({"total_updates": 300_000}, "steps 75,000/10,000,000  rate 61,234/s"),
        ({"total_seconds": 60.0}, "seconds 15/60  rate 61,234/s"),
        ({"total_steps": None}, "steps 75,000  rate 61,234/s"),
    ],
)
def test_progress_counts_towards_what_ends_the_run_first(limits: dict[str, Any], begins: str) -> None:
    learner = LearnerSection(**({"total_steps": 10_000_000} | limits))
    plain, terminal = io.StringIO(), io.StringIO()
    progress = replace(HALF_WAY, training_seconds=15.0)
    with PlainView(plain, limits_of(learner), target=None) as view:
        view.show(progress)
    text = plain.getvalue().split(" ", 1)[1]
    assert text.startswith(begins)
    assert ("steps 75,000" in text, "updates 36" in text) == (True, True)
    console = Console(file=terminal, force_terminal=True, width=120)
    with LiveView(console, "a run", limits_of(learner), target=None) as bar:
        bar.show(progress)
    unit, figures = begins.split("  ", maxsplit=1)[0].split(" ")
    assert f"{figures} {unit}" in terminal.getvalue()


def test_a_stalled_run_writes_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.launch.inspection.live_view.PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    with PlainView(stream, {}, target=None) as view:
        for seconds in (10.0, 12.0, 14.0):
            view.show(replace(HALF_WAY, training_seconds=seconds))
        view.show(replace(HALF_WAY, updates=37))
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_gets_a_bar_with_the_figures_below() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with LiveView(console, "cartpole-v1-abc", {"steps": 150_000}, target=475.0) as view:
        view.show(HALF_WAY)
        view.event("actor-0 died (signal 9), restarting: no [dim] in [1, 2] and no [/bold]")
    text = stream.getvalue()
    for words in (
        "cartpole-v1-abc",
        "75,000/150,000",
        "231.2 of 475",
        "61,234/s",
        "50% 3.0 MiB",
        "signal 9",
        "no [dim] in [1, 2] and no [/bold]",
    ):
        assert words in text


def test_without_a_terminal_plain_lines_are_printed() -> None:
    assert isinstance(make_view(io.StringIO(), "x", {}, None), PlainView)


def test_unknown_figures_are_dashes() -> None:
    stream = io.StringIO()
    with PlainView(stream, {}, target=None) as view:
        view.show(Progress())
    assert "return –" in stream.getvalue()


def test_a_line_that_is_still_being_written_is_read_next_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(view_row(1, 1.0)) + "\n")
    tail = MetricsTail(path)
    assert tail.poll() is None
    text = json.dumps(view_row(1, None)) + "\n" + json.dumps(view_row(2, None)) + "\n"
    with path.open("a") as file:
        file.write(text[:-10])
        file.flush()
        assert tail.poll() is None
        file.write(text[-10:])
        file.flush()
    progress = tail.poll()
    assert progress is not None
    assert (progress.env_steps, progress.staleness_p50) == (2, 1.0)


def test_a_line_torn_by_a_killed_learner_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    whole, torn = json.dumps(view_row(3, 1.0)) + "\n", json.dumps(view_row(4, 1.0))[:25] + "\n"
    path.write_text(torn + whole + torn)
    progress = tail.poll()
    assert progress is not None
    assert progress.env_steps == 3


def test_a_learner_that_waits_for_experience_is_not_training(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    nothing = {"env_steps": 0, "updates": 0, "outstanding": 0}
    path.write_text(2 * (json.dumps(nothing) + "\n"))
    assert tail.poll() is None
    with path.open("a") as file:
        file.write(json.dumps(nothing | {"outstanding": 256}) + "\n")
    assert tail.poll() is not None


# ---- A look at a process from outside, with the port that every process serves.


SERVICE = """
import sys
from penstock.runtime import metrics
from penstock.runtime.health import Health, announce, serve_http
health = Health("launcher")
metrics.RESTARTS.labels("actor").inc(2)
_, port = serve_http(health, "127.0.0.1", 0)
announce("launcher", metrics_port=port)
sys.stdin.read()
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Endpoint]]:
    """A process that serves health and metrics, as a launcher does."""
    file = tmp_path / "endpoint.json"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        stdin=subprocess.PIPE,
        env=os.environ | {"PENSTOCK_ENDPOINT_FILE": str(file)},
    )
    pause = threading.Event()
    while (endpoint := read_endpoint(file)) is None:
        assert process.poll() is None
        pause.wait(0.02)
    yield process, endpoint
    process.kill()
    process.communicate()


def announce(folder: Path) -> None:
    """Write `endpoints.json` as the launcher does."""
    (folder / "endpoints.json").write_text(f'{{"launcher": {(folder / "endpoint.json").read_text()}}}')


def test_a_healthy_process_is_read(
    service: tuple["subprocess.Popen[bytes]", Endpoint], tmp_path: Path
) -> None:
    _, endpoint = service
    announce(tmp_path)
    (seen,) = look_at_all(tmp_path)
    assert (seen.problem, seen.ended, seen.pid) == ("", False, endpoint.pid)
    assert seen.total("restarts_total", role="actor") == 2
    assert seen.total("restarts_total", role="learner") is None
    assert seen.total("no_such_metric") is None


def test_a_stopped_process_is_named_without_waiting(
    service: tuple["subprocess.Popen[bytes]", Endpoint],
) -> None:
    process, endpoint = service
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert look("launcher", endpoint, time.time()).problem == "stands still: stopped by a signal"
    process.send_signal(signal.SIGCONT)
    assert look("launcher", endpoint, time.time()).problem == ""


def test_a_process_that_has_ended_is_named_and_the_run_continues_no_longer(
    service: tuple["subprocess.Popen[bytes]", Endpoint], tmp_path: Path
) -> None:
    process, endpoint = service
    announce(tmp_path)
    assert is_going_on(tmp_path)
    process.kill()
    process.wait()
    seen = look("launcher", endpoint, time.time())
    assert (seen.ended, seen.problem) == (True, "has ended")
    assert not is_alive(endpoint.pid)
    assert not is_going_on(tmp_path)


def test_a_reused_pid_is_not_a_sign_of_life(
    service: tuple["subprocess.Popen[bytes]", Endpoint],
) -> None:
    process, endpoint = service
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert look("launcher", endpoint, time.time() - 3600).ended
    process.send_signal(signal.SIGCONT)
    # One that answers in its role is itself, whatever a clock that was set says.
    assert not look("launcher", endpoint, time.time() - 3600).ended


def test_an_unhealthy_process_gives_its_reason_and_other_processes_are_not_mistaken_for_it() -> None:
    health = Health("launcher")
    health.fail("the disk is full")
    server, port = serve_http(health, "127.0.0.1", 0)
    try:
        own = Endpoint(role="launcher", pid=os.getpid(), metrics_port=port)
        seen = look("launcher", own, time.time())
        assert (seen.problem, seen.ended) == ("the disk is full", False)
        assert seen.samples
        learner = Endpoint(role="learner", pid=os.getpid(), metrics_port=port)
        other = look("learner", learner, time.time())
        assert (other.ended, other.samples) == (True, ())
    finally:
        server.shutdown()
        server.server_close()


def test_a_run_without_processes_shows_only_the_silence_of_its_broker(tmp_path: Path) -> None:
    def no_broker() -> control_pb2.StatusReply:
        raise Fatal("no broker has come up yet")

    seen = observe(tmp_path, no_broker)
    assert (seen.sights, seen.status, seen.silence, seen.learnt) == (
        (),
        None,
        "no broker has come up yet",
        None,
    )


def test_the_last_update_is_the_first_line_that_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"updates": 1, "time": 10}\n{"updates": 2, "time": 11}\n{"upda\n'
        '{"updates": 2, "time": 12}\n{"updates": 2, "time": 13}\n{"updates": 3, "ti'
    )
    learnt = read_learnt(path)
    assert learnt is not None
    assert (learnt.row["time"], learnt.update_at) == (13, 11)


# ---- Returns as people read them.


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [(499.04, None, "499.0"), (-250.0, None, "-250.0"), (0.61234, None, "0.612"), (None, None, "–"),
     (math.nan, None, "–"), (2.04, 499.0, "2.0"), (0.2, 0.6, "0.200")],
)  # fmt: skip
def test_small_returns_have_more_decimals(value: float | None, like: float | None, text: str) -> None:
    assert shown(value, like) == text
