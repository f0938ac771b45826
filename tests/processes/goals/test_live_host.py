"""Goals of a live host: whatever is started, killed or resumed, the injector alone carries them out."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.supervisor import penstock
from penstock.workloads.goals.injection_journal import FEEDBACK, INJECTIONS
from tests.support.run.harness import OFTEN, PATIENCE_S, Training, trainings
from tests.support.serving.goals_run import done, goals_file, injector_words, lines

RECIPE: Final = Path(__file__).resolve().parents[3] / "penstock" / "recipes" / "goals.toml"
GOALS: Final = tuple(f"goal_{number}" for number in range(9))
STEPS: Final = 260
LEARNED: Final = 200
REMEDY: Final = "environment.kwargs.actors_act=true"
QUICK: Final = (
    "--total-steps", str(STEPS), "--set", "algorithm.batch_steps=32", "--set", "algorithm.minibatches=1",
    "--set", "actor.unroll_length=8", "--set", "environment.count=1", *OFTEN,
)  # fmt: skip


def said(*words: str) -> tuple[int, str]:
    """Exit code and stderr of a command that ends by itself."""
    ended = subprocess.run(penstock(*words), capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return ended.returncode, ended.stderr


def live(folder: Path) -> tuple[str, ...]:
    """What makes the goals of a run those of the folder's file."""
    return (
        "--set", "environment.kwargs.executor=commands",
        "--set", f"environment.kwargs.goals={folder / 'goals.toml'}",
    )  # fmt: skip


@contextmanager
def injecting(address: str, folder: Path) -> Iterator[None]:
    """An injector that carries out what is drawn, ten times a second, and ends in order."""
    words = injector_words(address, folder, "--auto", "--threshold", "0", "--seed", "1", "--interval", "0.1")
    with (
        (folder / "injector.log").open("w") as log,
        subprocess.Popen(words, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


def by_hand(training: Training, role: str) -> tuple[int, str]:
    """An actor of this machine joins the run."""
    broker = json.loads((training.run_dir / "endpoints.json").read_text())["broker"]["address"]
    return said(
        "actor", "--broker", broker, "--actor-id", f"by-hand-{role}", "--role", role,
        "--set", 'actor.allow_modules=["penstock.workloads.goals.tasks"]',
        "--set", f"actor.places.goals={training.run_dir.parent / 'goals.toml'}",
    )  # fmt: skip


def test_a_run_that_serves_an_injector_does_no_goal_itself(tmp_path: Path) -> None:
    goals_file(tmp_path, GOALS)
    address, run_dir = f"unix:{tmp_path}/serve.sock", tmp_path / "run"
    with trainings(run_dir) as start, injecting(address, tmp_path):
        training = start(str(RECIPE), *live(tmp_path), *QUICK, "--actors", "0", "--serve", address)
        training.until_steps(32)
        assert done(tmp_path) <= len(lines(tmp_path, FEEDBACK)) + 1
        assert "evaluator" not in training.pids()
        for role, why in (("evaluation", "evaluation.episodes=0"), ("rollout", REMEDY)):
            code, told = by_hand(training, role)
            assert (code, why in told) == (2, True), told
        for name in ("broker", "learner", "server"):
            os.kill(training.pids()[name], signal.SIGKILL)
            training.until_steps(training.steps() + 16)
        training.process.send_signal(signal.SIGINT)
        assert training.end()[0] == 130
        resumed = start("--resume")
        code, _, err = resumed.end()
        assert code == 0, err
    summary = resumed.summary()
    assert summary["env_steps"] >= STEPS
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert (summary["target_return"], summary["evaluation"]) == (None, None)
    newest = {line["goal_id"]: line for line in lines(tmp_path, INJECTIONS)}
    learned = [one for one in newest.values() if one["injected"] and one["metadata"].get("learned")]
    assert len(learned) >= LEARNED
    for why, command, *words in (
        ("evaluation.episodes=0", "evaluate"),
        (REMEDY, "evaluate", "--episodes", "2"),
        (REMEDY, "record", "--out", str(tmp_path / "out"), "--steps", "8"),
    ):
        code, told = said(command, str(run_dir), *words)
        assert (code, why in told) == (2, True), told
    assert done(tmp_path) == len(lines(tmp_path, FEEDBACK)) >= LEARNED


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), REMEDY),
        (("--dry-run",), "environment.kwargs.executor='simulated'"),
        (
            ("--set", REMEDY),
            "environment.count=16: several environments would act on one host at the same time",
        ),
        (("--set", "environment.kwargs.actors_act='true'"), REMEDY),
    ],
)
def test_actors_are_refused_before_a_process_starts(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    goals_file(tmp_path)
    code, told = said("train", str(RECIPE), *live(tmp_path), "--run-dir", str(tmp_path / "run"), *words)
    assert (code, why in told) == (2, True), told
    assert not (tmp_path / "run" / "config.toml").exists()
    assert done(tmp_path) == 0


def test_an_actor_with_permission_carries_goals_out(tmp_path: Path) -> None:
    goals_file(tmp_path)
    code, told = said(
        "train", str(RECIPE), *live(tmp_path), *QUICK, "--run-dir", str(tmp_path / "run"), "--set", REMEDY
    )
    assert code == 0, told
    assert done(tmp_path) > 0
    assert not (tmp_path / "run" / "endpoints" / "evaluator.json").exists()
