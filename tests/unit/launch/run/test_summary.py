"""The summary of a run."""

import json
from pathlib import Path

import pytest

from penstock.launch.commands.request import Request
from penstock.launch.run.memory import Memory
from penstock.launch.run.plan import Plan, make_plan, prepare_folder
from penstock.launch.run.summary import Ending, RedisFacts, make_summary, summary_lines, write_summary
from penstock.launch.run.supervisor import Account

LEARNT = {
    "solved": True,
    "mean_return": 480.5,
    "evaluation": {"mean": 499.0, "std": 2.0, "episodes": 100, "version": 41},
    "env_steps": 80_000,
    "updates": 40,
    "policy_version": 41,
    "training_seconds": 3.5,
    "solved_at": {"seconds": 1.25, "env_steps": 70_000, "version": 36},
    "env_steps_per_second": 22_857.1,
    "staleness": {"p50": 1, "p99": 2, "max": 2},
    "ledger": {
        "acked": 81, "trained": 78, "dropped": {"stale": 1, "nan": 0}, "resident": 2, "balanced": True,
    },
}  # fmt: skip
REDIS = RedisFacts(version="6.2.14", durability="fsync_1s")


def plan_in(path: Path) -> Plan:
    """A prepared run."""
    plan = make_plan(Request(what="CartPole-v1", run_dir=path / "r", seed=3))
    prepare_folder(plan)
    return plan


def ending(cause: str = "") -> Ending:
    """Ended with one actor that was restarted once."""
    actor = Account(
        name="actor-0", role="actor", pid=7, restarts=1, cpu_seconds=1.23456, memory=Memory(3000, 1000)
    )
    return Ending(wall_seconds=9.5, interrupted=False, cause=cause, accounts=[actor], redis=REDIS)


def test_it_holds_every_field_that_others_rely_on(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    summary = make_summary(plan, ending(), LEARNT)
    write_summary(plan.run_dir, summary)
    assert json.loads((plan.run_dir / "summary.json").read_text()) == summary
    assert summary.items() >= LEARNT.items()
    assert summary["target_return"] == 475.0
    assert (summary["run"], summary["workload"], summary["seed"]) == (plan.settings.run, "control", 3)
    assert summary["processes"] == [
        {"role": "actor", "pid": 7, "restarts": 1, "cpu_seconds": 1.235, "peak_memory_bytes": 3000}
    ]
    assert summary["peak_memory_bytes"] == 3000
    assert (summary["preparation_seconds"], summary["device_memory_bytes"]) == (0.0, None)
    assert summary["redis"] == {"version": "6.2.14", "durability": "fsync_1s"}
    assert "failure" not in summary


def test_people_read_the_verdict_and_the_books(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    text = "\n".join(summary_lines(make_summary(plan, ending(), LEARNT)))
    assert text.startswith("CartPole-v1: solved")
    assert "time         3.5 s of training, 9.5 s in all" in text
    assert "solved after 1.2 s of training and 70,000 steps, by version 36" in text
    assert "balanced: 81 acked = 78 trained + 1 dropped (stale 1) + 2 resident" in text
    assert "499.0 ± 2.0 over 100 episodes of version 41" in text


BASE = {
    "mean": 300.0, "std": 20.0, "episodes": 100, "starts": 100, "length": 300.0, "version_length": 499.0,
    "difference": 199.0, "standard_error": 2.0, "low": 195.0, "high": 203.0, "verdict": "better",
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "+199.0 (95% interval +195.0 to +203.0): better than the base"),
        (
            {"difference": -1.0, "low": -4.0, "high": 2.0, "verdict": "chance"},
            "-1.0 (95% interval -4.0 to +2.0): cannot be told from chance",
        ),
        (
            {"difference": -9.0, "low": -12.0, "high": -6.0, "verdict": "worse"},
            "-9.0 (95% interval -12.0 to -6.0): worse than the base",
        ),
        (
            {"standard_error": None, "low": None, "high": None, "verdict": "chance"},
            "+199.0: cannot be told from chance",
        ),
    ],
)
def test_people_read_whether_training_beat_what_it_began_with(
    tmp_path: Path, told: dict[str, object], said: str
) -> None:
    learnt = LEARNT | {"evaluation": {**LEARNT["evaluation"], "base": BASE | told}}  # type: ignore[dict-item]
    lines = summary_lines(make_summary(plan_in(tmp_path), ending(), learnt))
    place = next(index for index, line in enumerate(lines) if line.startswith("  evaluation "))
    assert lines[place + 1 : place + 4] == [
        "  base         300.0 ± 20.0 before any training, on the same 100 episodes",
        f"  difference   {said}",
        "  length       499.0 steps, of the base 300.0",
    ]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("updates", "all updates are done"),
        ("rejected", "the algorithm's own validation rejected what was learned"),
        ("theatre", "the algorithm's own validation says theatre"),
        (None, "before the learner could say why"),
    ],
)
def test_people_read_why_it_ended(tmp_path: Path, word: str | None, said: str) -> None:
    learnt = LEARNT | {"ending": word, "restored_from": None}
    lines = summary_lines(make_summary(plan_in(tmp_path), ending(), learnt))
    assert any(line.endswith(f" {said}") for line in lines), lines


def test_a_run_whose_learner_said_nothing_still_has_a_summary(tmp_path: Path) -> None:
    summary = make_summary(plan_in(tmp_path), ending(cause="redis failed 5 times in a row"), {})
    assert summary["failure"] == "redis failed 5 times in a row"
    assert summary["solved"] is False
    assert summary["ledger"] is None
    lines = summary_lines(summary)
    assert lines[0] == "CartPole-v1: failed"
    assert "–" not in "\n".join(lines)
