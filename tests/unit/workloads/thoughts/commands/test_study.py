"""`penstock thoughts study`: refusals, resumption and the table."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.config.settings import ConfigurationError
from penstock.training import TrainingConfig
from penstock.workloads.thoughts import study as module
from penstock.workloads.thoughts.study import (
    NAMES,
    Condition,
    Study,
    have_failed,
    main,
    make_study,
    table,
)
from penstock.workloads.thoughts.thought_commands import StudyOptions
from tests.support.thoughts.small_thoughts import small_base

RECIPES: Final = Path(__file__).resolve().parents[5] / "penstock" / "recipes"
TINY: Final = RECIPES / "thoughts-tiny.toml"
ALL: Final = tuple(map(Condition, NAMES))


def asked(recipe: Path, out: Path = Path("out"), **more: Any) -> Study:
    """All conditions of a recipe."""
    options: dict[str, Any] = {"seeds": 1, "questions": 64}
    return make_study(StudyOptions(recipe=recipe, out=out, **options | more))


def result(verdict: str = "honest", accuracy: float = 0.9) -> dict[str, Any]:
    """Of a condition and seed."""
    judged = {"verdict": verdict, "gain": 1.5, "direct_loss": 2.5, "chains": 0.8, "coherence": 0.7}
    return {"accuracy": accuracy, "greedy": 1.0, "validation": judged}


def test_a_recipe_says_how_many_updates_unless_the_command_does() -> None:
    made = asked(TINY)
    assert (made.updates, made.conditions) == (300, ALL)
    made = asked(TINY, updates=7, only=(5,), vary=("algorithm.baseline=none",))
    assert (made.updates, made.conditions) == (7, (Condition(5), Condition(5, "algorithm.baseline=none")))
    assert made.conditions[1].over(made.recipe)["algorithm"]["baseline"] == "none"
    assert made.recipe["algorithm"].get("baseline") != "none"
    assert Condition(7).over(made.recipe)["algorithm"]["reward_from"] == "another"


def test_a_study_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        asked(tmp_path / "missing.toml")
    with pytest.raises(ConfigurationError, match="thoughts-tiny"):
        asked(RECIPES / "goals.toml")
    with pytest.raises(ConfigurationError, match="1 to 7"):
        asked(TINY, only=(8,))


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("algorithm.baseline=wrong", r"algorithm\.baseline.*'wrong'"),
        ("nothing=1", "nothing"),
        ("run=../elsewhere", "name of a folder"),
        ("algorithm.baseline", "section.key=value"),
    ],
)
def test_a_setting_that_no_run_takes_is_refused_before_the_first_is_made(setting: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        asked(TINY, vary=("algorithm.baseline=none", setting))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("rings:7:4", "rings:0:0", "rings"),
        ("count = 128", "count = 4", "a single question"),
        ("[learner]", "[learner]\nno_such = 1", "no_such"),
        ("[environment.kwargs]", "[environment.kwargs]\nno_such = 1", "no_such"),
    ],
)
def test_a_recipe_that_no_run_takes_is_refused_at_once(tmp_path: Path, old: str, new: str, why: str) -> None:
    text = TINY.read_text()
    assert old in text
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigurationError, match=why):
        asked(recipe)


@pytest.mark.parametrize("rest", ["environment = 3", "learner = 3\n[environment]", "[environment]\nx = 1"])
def test_a_recipe_with_odd_sections_is_refused(tmp_path: Path, rest: str) -> None:
    recipe = tmp_path / "odd.toml"
    recipe.write_text(f'workload = "thoughts"\n{rest}\n')
    with pytest.raises(ConfigurationError, match=r"odd\.toml"):
        asked(recipe, vary=("learner.total_updates=3",))


def test_a_start_of_another_task_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    small_base(tmp_path / "start")
    kwargs = f'[environment.kwargs]\nmodel = "{tmp_path / "start"}"'
    recipe.write_text(TINY.read_text().replace("[environment.kwargs]", kwargs, 1))
    with pytest.raises(ConfigurationError, match=f"model='{tmp_path}.*task='rings:7:4'"):
        main(asked(recipe, tmp_path / "out", only=(4,)))


class Made:
    """What a study makes, without training: each condition is as good as its number of calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.starts = list[str]()
        self.networks = list[tuple[int, str]]()
        monkeypatch.setattr(module, "make_start", self._start)
        monkeypatch.setattr(module, "check_words", lambda *_: None)
        monkeypatch.setattr(module, "_network", self._network)
        monkeypatch.setattr(module, "_measure", lambda *_: result("theatre"))
        self.out = tmp_path / "out"

    def _start(self, _: object, folder: Path, *_args: object, **_more: object) -> Path:
        self.starts.append(folder.name)
        return folder

    def _network(self, _: Study, condition: Condition, __: object, seed: int) -> None:
        self.networks.append((seed, condition.name))


def test_what_is_measured_is_kept_and_the_rest_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(monkeypatch, tmp_path)
    assert main(asked(TINY, made.out, only=(3,))) == 0
    assert main(asked(TINY, made.out, only=(3, 4), seeds=2)) == 0
    assert made.networks == [(0, "3"), (0, "4"), (1, "3"), (1, "4")]
    assert json.loads((made.out / "seed-1" / "condition-4.json").read_text())["seed"] == 1
    written = (made.out / "table.md").read_text()
    assert capsys.readouterr().out.endswith(written)
    assert "| 3 filler | 0.90 0.90 |" in written


def test_a_folder_of_another_study_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Made(monkeypatch, tmp_path)
    main(asked(TINY, made.out, only=(4,)))
    with pytest.raises(ConfigurationError, match="another updates, questions"):
        main(asked(TINY, made.out, only=(4,), updates=3, questions=128))
    main(asked(TINY, made.out, only=(4,)))


def test_a_setting_of_the_environment_gets_a_start_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Made(monkeypatch, tmp_path)
    vary = ("environment.kwargs.empty_share=0.9", "algorithm.staleness=5")
    main(asked(TINY, made.out, only=(5,), vary=vary))
    assert made.starts == ["start_model", "start_model-5-environment.kwargs.empty_share=0.9", "start_model"]


def test_runs_of_decimal_values_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    class Ended(Exception):
        """No run is made here."""

    def start(config: TrainingConfig) -> None:
        assert isinstance(config.what, Path)
        begun.append(config.what)
        raise Ended

    monkeypatch.setattr(module, "start", start)
    for value in ("0.01", "0.02"):
        with pytest.raises(Ended):
            module.train_thoughts({}, tmp_path / f"run-{value}", {"seed": 0})
    assert [one.name for one in begun] == ["run-0.01.toml", "run-0.02.toml"]


def test_a_run_that_has_ended_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    class Ended(Exception):
        """No run is made here."""

    def resume(run_dir: Path) -> None:
        begun.append(run_dir)
        raise Ended

    monkeypatch.setattr(module, "resume", resume)
    (tmp_path / "config.toml").write_text("")
    summary = tmp_path / "summary.json"
    summary.write_text('{"interrupted": false}')
    module.train_thoughts({}, tmp_path, {})
    assert begun == []
    for text in ('{"interrupted": true}', '{"interrupted": false, "failure": "x"}'):
        summary.write_text(text)
        with pytest.raises(Ended):
            module.train_thoughts({}, tmp_path, {})
    assert begun == [tmp_path, tmp_path]


def test_a_condition_has_a_row_and_a_seed_a_figure_in_it() -> None:
    varied = Condition(5, "algorithm.baseline=none")
    rows = table({Condition(1): [result(), result()], varied: [result(), result("doubtful", accuracy=0.8)]})
    assert rows[2] == "| 1 direct answers | 0.90 0.90 | 1.00 1.00 | – | 2.50 2.50 | – | – | – |"
    assert rows[3] == (
        "| 5 REINFORCE, algorithm.baseline=none | 0.90 0.80 | 1.00 1.00 | 1.50 1.50 | 2.50 2.50 "
        "| 0.80 0.80 | 0.70 0.70 | honest, doubtful |"
    )


@pytest.mark.parametrize("number", [3, 7])
def test_conditions_that_must_fail_are_theatre_in_every_seed(number: int) -> None:
    honest, theatre = result(), result("theatre")
    assert have_failed({Condition(5): [honest], Condition(number): [theatre, theatre]})
    assert not have_failed({Condition(5): [honest], Condition(number): [theatre, honest]})
