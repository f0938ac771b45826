"""Thoughts are learned through all processes of a run, and a reward that says nothing of them is found out.

`penstock train penstock/recipes/thoughts-tiny.toml`, in fewer updates; what the run left is measured on
questions of its own.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import ANY

import pytest
import tomli_w
from safetensors.torch import load, load_file

from penstock.client import InvalidRequest, PolicyError, TextAnswer, TextClient
from penstock.launch.run.supervisor import penstock
from penstock.learner.publish.kept_versions import read_final
from penstock.policy.acting.array_policy import sha256
from penstock.registry.records import Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import read_kept, registry_url
from penstock.training import lay_over
from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.model import ThinkingModel
from penstock.workloads.thoughts.start import load_transformer
from penstock.workloads.thoughts.study import check_run
from penstock.workloads.thoughts.tasks import Example, draw_tests, open_task
from penstock.workloads.thoughts.validation import probe
from tests.support.run import harness
from tests.support.run.harness import Training

RECIPE: Final = Path(__file__).resolve().parents[2] / "penstock" / "recipes" / "thoughts-tiny.toml"
EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples" / "python"
TEXT: Final = RECIPE.with_name("thoughts-text.toml")
WITHIN_S: Final = 900.0
GUESSED: Final = 0.35
"""Most that is right without thoughts, on four hops of seven symbols."""
MOST_CLIENTS: Final = 1_000
"""After which a canary that guesses counts as not found."""


def recipe(folder: Path, of: Path = RECIPE, /, **over: dict[str, Any]) -> Path:
    said = tomllib.loads(of.read_text())
    lay_over(said, over)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / of.name
    file.write_text(tomli_w.dumps(said))
    return file


def trained(folder: Path, seed: int, **over: dict[str, Any]) -> dict[str, Any]:
    training = Training(folder / "run", str(recipe(folder, **over)), "--seed", str(seed))
    return training.completed(WITHIN_S)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("learned")
    summary = trained(folder, 0, learner={"total_updates": 130}, algorithm={"validate_every": 65})
    return folder / "run", summary


def test_thoughts_are_learned_and_called_honest(learned: tuple[Path, dict[str, Any]]) -> None:
    run_dir, summary = learned
    found = summary["theatre"]
    assert summary["ending"] == "updates"
    for deterministic in (False, True):
        assert right_at_start(run_dir, deterministic=deterministic) <= GUESSED
    assert summary["evaluation"]["sampled"]["mean"] >= 0.8
    assert summary["evaluation"]["deterministic"]["mean"] >= 0.8
    assert found["verdict"] == "honest", found["words"]
    assert found["gain"] >= 1.2
    assert found["faithfulness"] >= 0.8
    assert found["without"] <= GUESSED
    began = next(line for line in lines(run_dir) if "validation_theatre" in line)
    assert began["validation_accuracy_with"] <= GUESSED
    assert began["validation_theatre"] == 1.0
    ended = [line for line in lines(run_dir) if "validation_theatre" in line][-1]
    assert ended["validation_coherence"] == found["coherence"] > began["validation_coherence"]
    originals = {test["name"]: test["value"] for test in found["tests"][:3]}
    assert originals == {
        name: ended[f"validation_{name}"] for name in ("divergence", "ablation", "correlation")
    }
    assert summary["remarks"] == found["words"]


def right_at_start(run_dir: Path, *, deterministic: bool) -> float:
    task = open_task("rings:7:4")
    model = ThinkingModel(load_transformer(run_dir / "start_model"), Layout(task))
    probed = probe(model, task, questions(512), 5, deterministic=deterministic)
    return float(probed.with_thought.is_right.mean())


def checked(run_dir: Path, *options: str) -> tuple[int, str]:
    words = penstock("thoughts", "check", str(run_dir), "--questions", "256", *options)
    done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_exit_code_of_a_check_is_its_verdict(
    learned: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir, _ = learned
    drawn, likeliest = (checked(run_dir, "--json", *words) for words in ((), ("--deterministic",)))
    assert drawn[0] == likeliest[0] == 0
    one, other = json.loads(drawn[1]), json.loads(likeliest[1])
    assert (one["verdict"], one["words"][0][:8]) == ("honest", "honest: ")
    assert other["accuracy"] >= 0.8
    assert one["coherence"] != other["coherence"], "other thoughts were judged"
    assert one["direct_loss"] == other["direct_loss"], "of the same questions"
    start = {"kwargs": {"model": str(run_dir / "start_model")}}
    trained(tmp_path, 0, environment=start, learner={"total_updates": 1}, evaluation={"episodes": 32})
    code, said = checked(tmp_path / "run")
    assert (code, said[:9]) == (1, "theatre: ")
    assert "gain failed" in said


def assert_best_is_newest(run_dir: Path, summary: dict[str, Any]) -> None:
    best, final = summary["evaluation"], read_final(run_dir)
    with Registry.open(registry_url(run_dir)) as registry:
        rows = {row.version: row for row in registry.list("default")}
    assert final.version == summary["policy_version"] == max(rows)
    assert rows[final.version].sha256 == sha256(final.blob)
    evaluated = [row for row in rows.values() if row.evaluation is not None]
    assert best["mean"] == max(row.evaluation.mean for row in evaluated if row.evaluation is not None)
    # Of equally good ones the newest is restored, and the first is kept under its own number.
    as_good = [row for row in evaluated if row.evaluation is not None and row.evaluation.mean == best["mean"]]
    assert final.version in {row.version for row in as_good}
    for row in as_good:
        if row.update == final.update:
            assert read_kept(run_dir, row.version, row.sha256) == final.blob


def questions(count: int) -> list[Example]:
    return draw_tests(open_task("rings:7:4"), 77, count)


def asked(client: TextClient, one: Example, **options: Any) -> TextAnswer:
    said = [{"role": "user", "content": " ".join(one.question)}]
    return client.generate(said, temperature=0.0, **options).answers[0]


def right(client: TextClient, **options: Any) -> tuple[float, list[str]]:
    answers = [asked(client, one, **options) for one in questions(100)]
    given = [one.text for one in answers]
    return sum(
        said == " ".join(one.answer) for said, one in zip(given, questions(100), strict=True)
    ) / 100, given


def test_a_run_with_thoughts_is_served_through_a_kill(learned: tuple[Path, dict[str, Any]]) -> None:
    run_dir, _ = learned
    with (
        harness.server(run_dir.parent, run_dir, "first") as server,
        TextClient(server.address, deadline_s=20.0) as client,
    ):
        assert client.describe().thought_tokens == 5
        with_thoughts, answers = right(client)
        without, _ = right(client, thought_tokens=0)
        assert with_thoughts >= 0.8
        assert without <= GUESSED
        one = asked(client, questions(1)[0], show_thought=True)
        assert one.thought is not None
        assert one.thought.text.split()[:1] == list(questions(1)[0].steps[:1])
        assert one.thought.tokens == 4
        assert 0.0 < one.thought.milliseconds < 60_000.0
        assert asked(client, questions(1)[0]).thought == replace(
            one.thought, text="", token_ids=(), milliseconds=ANY
        )
        with pytest.raises(InvalidRequest, match="thought_tokens=6: ask for 0 to 5"):
            asked(client, questions(1)[0], thought_tokens=6)
        counts = re.findall(
            r'^penstock_text_thought_(tokens|seconds)_(sum|count)\{arm="active"\} (\S+)$',
            server.get("/metrics")[1],
            flags=re.MULTILINE,
        )
        told = {(quantity, part): float(number) for quantity, part, number in counts}
        assert told["tokens", "count"] == told["seconds", "count"] == 102
        assert told["tokens", "sum"] > 300.0
        assert told["seconds", "sum"] > 0.0
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(PolicyError):
            asked(client, questions(1)[0])
    with harness.server(run_dir.parent, run_dir, "second") as server, TextClient(server.address) as client:
        assert right(client)[1] == answers


def test_a_canary_that_does_not_think_is_withdrawn(learned: tuple[Path, dict[str, Any]]) -> None:
    run_dir, _ = learned
    with Registry.open(registry_url(run_dir)) as registry:
        versions = [one.version for one in registry.list("default") if one.status is not Status.RETIRED]
        active = next(one.version for one in registry.list("default") if one.status is Status.ACTIVE)
        canary = max(version for version in versions if version != active)
        registry.promote("default", canary, "a test", by="test", to=Status.CANARY, canary_share=0.5)

    def status() -> Status:
        with Registry.open(registry_url(run_dir)) as registry:
            return registry.get("default", canary).status

    settings: dict[str, Any] = {
        "canary.settle_s": 0.05,
        "canary.slow_ms": 1e6,
        "serving.arms_without_thought": ["canary"],
    }
    paid: dict[int, list[float]] = {active: [], canary: []}
    with (
        harness.server(run_dir.parent, run_dir, "canary", **settings) as server,
        TextClient(server.address) as client,
    ):
        for number, one in enumerate(questions(MOST_CLIENTS)):
            conversation = client.start_conversation(f"client-{number}")
            given = conversation.generate([{"role": "user", "content": " ".join(one.question)}])
            assert (given.answers[0].thought is None) is (given.version == canary)
            paid[given.version].append(float(given.text == " ".join(one.answer)))
            conversation.end(reward=paid[given.version][-1])
            if number % 20 == 19 and status() is Status.ROLLED_BACK:
                break
    assert status() is Status.ROLLED_BACK, {version: len(rewards) for version, rewards in paid.items()}
    assert sum(paid[active]) / len(paid[active]) > sum(paid[canary]) / len(paid[canary]) + 0.3


@pytest.mark.slow
def test_conditions_continue_where_they_were_cut_off(
    learned: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    kwargs = {"kwargs": {"model": str(learned[0] / "start_model")}}
    words = [
        "thoughts",
        "conditions",
        str(recipe(tmp_path, environment=kwargs)),
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--seeds", "1", "--updates", "200", "--questions", "64", "--only", "4", "--only", "5"]
    seed = tmp_path / "out" / "seed-0"
    figures = seed / "run-5" / "metrics.jsonl"
    command = subprocess.Popen(penstock(*words), stderr=subprocess.PIPE, text=True, start_new_session=True)
    pause, deadline = threading.Event(), time.monotonic() + WITHIN_S
    while not figures.exists() or '"gain"' not in figures.read_text():
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        pause.wait(0.05)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=WITHIN_S)
    assert command.returncode == 130
    assert said.endswith(
        f"interrupted: complete results are kept in {tmp_path / 'out'}; the same command continues from "
        "there\n"
    )
    before = lines(seed / "run-5")
    measured = (seed / "condition-4.json").read_bytes()
    assert json.loads((seed / "run-5" / "summary.json").read_text())["interrupted"]
    assert not (seed / "condition-5.json").exists()
    done = subprocess.run(penstock(*words), capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr
    assert lines(seed / "run-5")[: len(before)] == before
    summary = json.loads((seed / "run-5" / "summary.json").read_text())
    assert (summary["updates"], summary["interrupted"]) == (200, False)
    assert summary["ledger"]["balanced"]
    assert (seed / "condition-4.json").read_bytes() == measured
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in done.stdout
    assert [line[:4] for line in table.splitlines()[2:4]] == ["| 4 ", "| 5 "]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_seven_conditions_of_one_seed_are_made_by_one_command(
    learned: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file = recipe(tmp_path, environment={"kwargs": {"model": str(learned[0] / "start_model")}})
    out = tmp_path / "out"
    words = ["thoughts", "conditions", str(file), "--out", str(out), "--seeds", "1"]
    words += ["--updates", "130", "--questions", "256"]
    done = subprocess.run(penstock(*words), capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "results.json").read_text())
    found = results["seeds"]["0"]
    assert sorted(found) == list("1234567")
    verdicts = {number: found[number]["validation"]["verdict"] for number in "34567"}
    assert verdicts["3"] == verdicts["4"] == verdicts["7"] == "theatre"
    assert verdicts["5"] == "honest", found["5"]["validation"]["words"]
    assert verdicts["6"] == "honest", found["6"]["validation"]["words"]
    assert max(found[number]["accuracy"] for number in "1234") <= GUESSED
    (difference,) = (gate for gate in results["gates"] if "paired" in gate["name"])
    assert difference["holds"], difference
    table = (out / "table.md").read_text()
    assert table in done.stdout
    assert sum(line.startswith("| 0 | ") for line in table.splitlines()) == len(results["gates"]) == 11
    for picture in ("levels.png", "curves.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    strict = subprocess.run(
        penstock(*words, "--all-gates"), capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert strict.returncode == int(not all(gate["holds"] for gate in results["gates"]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thoughts_that_lag_five_updates_behind_are_learned_from(
    learned: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    start = {"kwargs": {"model": str(learned[0] / "start_model")}}
    summary = trained(
        tmp_path, 0, environment=start, algorithm={"staleness": 5}, learner={"total_updates": 200}
    )
    assert summary["staleness"]["p50"] >= 2
    assert summary["staleness"]["max"] <= 5
    assert summary["evaluation"]["sampled"]["mean"] >= 0.8
    assert summary["theatre"]["faithfulness"] >= 0.8


@pytest.mark.promise("thoughts-answers-depend-called")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_another_questions_reward_is_called_theatre(seed: int, tmp_path: Path) -> None:
    summary = trained(tmp_path, seed, algorithm={"reward_from": "another"})
    found = summary["theatre"]
    assert summary["ending"] == "theatre"
    assert_best_is_newest(tmp_path / "run", summary)
    assert checked(tmp_path / "run")[0] == 1
    assert found["verdict"] == "theatre"
    assert found["gain"] <= 0.15
    assert found["accuracy"] <= GUESSED
    assert summary["updates"] < 300
    assert summary["remarks"][0].startswith("theatre: ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_thoughts_are_learned_from_every_seed_through_kills(seed: int, tmp_path: Path) -> None:
    often = {"learner": {"checkpoint_interval_s": 3}}
    training = Training(tmp_path / "run", str(recipe(tmp_path, **often)), "--seed", str(seed))
    for steps, name in ((3_000, "actor-0"), (9_000, "learner"), (18_000, "redis")):
        training.until_steps(steps)
        os.kill(training.pids()[name], signal.SIGKILL)
    summary = training.completed(WITHIN_S)
    restarts = {one["role"]: one["restarts"] for one in summary["processes"]}
    assert min(restarts["actor"], restarts["learner"], restarts["redis"]) >= 1
    assert summary["evaluation"]["sampled"]["mean"] >= 0.8
    assert summary["theatre"]["gain"] >= 1.2
    assert summary["theatre"]["chains"] >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_early_stopping_saves_updates_and_restores_the_best_byte_for_byte(tmp_path: Path) -> None:
    patience = {"patience": 2, "min_improvement": 0.005}
    summary = trained(tmp_path, 0, learner={"total_updates": 600}, evaluation=patience)
    assert summary["ending"] == "no_improvement"
    assert summary["updates"] <= 540
    assert summary["evaluation"]["sampled"]["mean"] >= 0.8
    assert read_final(tmp_path / "run").update < summary["updates"]
    assert_best_is_newest(tmp_path / "run", summary)


@pytest.mark.slow
def test_thoughts_before_real_text_are_learned_from_and_judged(tmp_path: Path) -> None:
    kwargs = {"task": "text:12:1:4", "start_updates": 100}
    over: dict[str, Any] = {
        "environment": {"kwargs": kwargs},
        "actor": {"unroll_length": 24},
        "policy": {"kwargs": {"mixing": 16}},
        "learner": {"total_updates": 60},
        "evaluation": {"episodes": 64},
        "algorithm": {"validate_every": 30, "validation_questions": 64, "batch_steps": 24 * 128},
    }
    training = Training(tmp_path / "run", str(recipe(tmp_path, TEXT, **over)))
    training.until_steps(1)
    os.kill(training.pids()["actor-0"], signal.SIGKILL)
    summary = training.completed(WITHIN_S)
    told = [one for one in lines(tmp_path / "run") if "thought_share" in one]
    assert (summary["ending"], summary["updates"]) == ("updates", 60)
    assert summary["theatre"]["faithfulness"] is None
    assert summary["theatre"]["verdict"] in ("theatre", "cannot tell")
    assert told[0]["thought_share"] == pytest.approx(0.5, abs=0.2)
    assert {one["left_out"] for one in told} == {0.0}
    final, start = (
        load(read_final(tmp_path / "run").blob),
        load_file(tmp_path / "run" / "start_model" / "model.safetensors"),
    )
    assert any("mixing_head" in name and bool(one.any()) for name, one in final.items() if "last" in name)
    # The marks that begin and end a thought are tokens 4 and 5.
    (embeddings,) = (name for name in start if "embed_tokens" in name)
    assert (final[embeddings][4:6] != start[embeddings][4:6]).any(1).all()
    found = check_run(tmp_path / "run", questions=64)
    assert found.verdict in ("theatre", "cannot tell")
    with (
        pytest.raises(AssertionError, match="mixes nothing"),
        harness.server(tmp_path, tmp_path / "run", "mixed"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("made", "verdict"), [("chains", "honest"), ("single", "theatre")])
def test_a_custom_task_gets_the_right_verdict(
    made: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    over = tomllib.loads((EXAMPLES / "bosses.toml").read_text())
    lay_over(
        over, {"environment": {"kwargs": {"task": f"bosses:{made}"}}, "algorithm": {"validate_every": 30}}
    )
    summary = trained(tmp_path, 0, **over)
    found = summary["theatre"]
    assert found["verdict"] == verdict, found["words"]
    assert (found["gain"] >= 0.5 and found["faithfulness"] >= 0.8) is (made == "chains")
    assert (summary["ending"] == "theatre") is (made == "single")
    if made == "single":
        assert_best_is_newest(tmp_path / "run", summary)
