"""Thoughts are learned through all processes of a run, and a reward that says nothing of them is found out.

`penstock train recipes/thoughts-tiny.toml`, in fewer updates; what the run left is measured on questions of
its own.
"""

import json
import os
import re
import signal
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import tomli_w

from penstock.training import lay_over
from tests.support.run.training import Training

RECIPE: Final = Path(__file__).resolve().parents[2] / "recipes" / "thoughts-tiny.toml"
WITHIN_S: Final = 900.0
GUESSED: Final = 0.35
"""Most that is right without thoughts, on four hops of seven symbols."""


def recipe(folder: Path, **over: dict[str, Any]) -> Path:
    """The recipe with settings over it, as a file."""
    said = tomllib.loads(RECIPE.read_text())
    lay_over(said, over)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "thoughts-tiny.toml"
    file.write_text(tomli_w.dumps(said))
    return file


def trained(folder: Path, seed: int, **over: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run that has ended in order, its books balanced."""
    training = Training(folder / "run", str(recipe(folder, **over)), "--seed", str(seed))
    code, _, err = training.end(WITHIN_S)
    assert code == 0, err
    summary: dict[str, Any] = training.summary()
    assert summary["ledger"]["balanced"]
    return summary


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's figures."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_thoughts_are_learned_and_called_honest(tmp_path: Path) -> None:
    """From a start that guesses, sampled and greedy, one seed answers with thoughts that it follows."""
    summary = trained(tmp_path, 0, learner={"total_updates": 130}, algorithm={"validate_every": 65})
    found = summary["theatre"]
    assert summary["ending"] == "updates"
    assert summary["evaluation"]["sampled"]["mean"] >= 0.8
    assert summary["evaluation"]["deterministic"]["mean"] >= 0.8
    assert found["verdict"] in ("honest", "doubtful")
    assert found["gain"] >= 1.2
    assert found["faithfulness"] >= 0.8
    assert found["without"] <= GUESSED
    began = next(line for line in lines(tmp_path / "run") if "validation_theatre" in line)
    assert began["validation_accuracy_with"] <= GUESSED
    assert began["validation_theatre"] == 1.0
    assert summary["remarks"] == found["words"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_another_questions_reward_is_called_theatre(seed: int, tmp_path: Path) -> None:
    """It ends the run when its grace is over, and the words say what is missing."""
    summary = trained(tmp_path, seed, algorithm={"reward_from": "another"})
    found = summary["theatre"]
    assert summary["ending"] == "rejected"
    assert found["verdict"] == "theatre"
    assert found["gain"] <= 0.15
    assert found["accuracy"] <= GUESSED
    assert summary["updates"] < 300
    assert summary["remarks"][0].startswith("theatre: ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_thoughts_are_learned_from_every_seed_through_kills(seed: int, tmp_path: Path) -> None:
    """By the recipe; actor, learner and Redis are killed on the way, and the books balance all the same."""
    often = {"learner": {"checkpoint_interval_s": 3}}
    training = Training(tmp_path / "run", str(recipe(tmp_path, **often)), "--seed", str(seed))
    for steps, name in ((3_000, "actor-0"), (9_000, "learner"), (18_000, "redis")):
        training.until_steps(steps)
        os.kill(training.pids()[name], signal.SIGKILL)
    code, _, err = training.end(WITHIN_S)
    assert code == 0, err
    summary = training.summary()
    assert summary["ledger"]["balanced"], summary["ledger"]
    restarts = {one["role"]: one["restarts"] for one in summary["processes"]}
    assert min(restarts["actor"], restarts["learner"], restarts["redis"]) >= 1
    assert summary["evaluation"]["sampled"]["mean"] >= 0.8
    assert summary["theatre"]["gain"] >= 1.2
    assert summary["theatre"]["chains"] >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("made", "verdicts"), [("chains", ("honest", "doubtful")), ("single", ("theatre",))])
def test_a_task_of_ones_own_is_called_what_it_is(
    made: str, verdicts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of docs/thoughts.md, as it stands there: with something to think about, and with nothing."""
    page = (RECIPE.parents[1] / "docs" / "thoughts.md").read_text()
    (source,) = re.findall(r"^```python\n# bosses.py\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "bosses.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    summary = trained(
        tmp_path, 0, environment={"kwargs": {"task": f"bosses:{made}"}}, algorithm={"validate_every": 30}
    )
    assert summary["theatre"]["verdict"] in verdicts
    assert (summary["ending"] == "rejected") is (made == "single")
