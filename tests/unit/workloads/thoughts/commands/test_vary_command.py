"""How values of an ablation are read, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.training import TrainingConfig
from workloads.thoughts.commands import condition_runs, vary_command
from workloads.thoughts.commands.condition_runs import RunSettings
from workloads.thoughts.commands.vary_command import Variation, main, nested, parsed
from workloads.thoughts.thought_section import thoughts_section


@pytest.mark.parametrize(
    ("said", "meant"), [("group", "group"), ("0", 0), ("0.01", 0.01), ("true", True), ('"5"', "5")]
)
def test_a_value_is_what_a_file_would_say(said: str, meant: Any) -> None:
    """A word that is no TOML value is a text."""
    assert parsed(said) == meant
    assert type(parsed(said)) is type(meant)


def test_a_key_becomes_tables_in_tables() -> None:
    """As deep as it has dots."""
    assert nested("environment.kwargs.group", 8) == {"environment": {"kwargs": {"group": 8}}}


def test_a_recipe_of_something_else_is_refused(tmp_path: Path) -> None:
    """Before anything is made."""
    recipe = Path(__file__).resolve().parents[5] / "recipes" / "goals.toml"
    varied = Variation(
        recipe=recipe, key="algorithm.baseline", values=("none",), out=tmp_path / "out", seeds=1, updates=1
    )
    with pytest.raises(ConfigurationError, match="recipe of thoughts"):
        main(varied)
    assert not (tmp_path / "out").exists()


THOUGHTS = Path(__file__).resolve().parents[5] / "recipes" / "thoughts-tiny.toml"


def varied(recipe: Path, out: Path, *values: str, key: str = "algorithm.baseline") -> Variation:
    """One seed, one update."""
    return Variation(recipe=recipe, key=key, values=values, out=out, seeds=1, updates=1)


def test_a_value_that_no_run_takes_is_refused_before_the_first_is_made(tmp_path: Path) -> None:
    """The last of several as the first: it is said at once, not after hours."""
    with pytest.raises(ConfigurationError, match=r"algorithm\.baseline.*'wrong'"):
        main(varied(THOUGHTS, tmp_path / "out", "none", "wrong"))
    with pytest.raises(ConfigurationError, match=r"nothing=1"):
        main(varied(THOUGHTS, tmp_path / "out", "1", key="nothing"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["../../elsewhere", "/elsewhere", "a/b"])
def test_a_value_that_names_another_folder_is_refused(tmp_path: Path, value: str) -> None:
    """Runs lie in the folder that was named."""
    with pytest.raises(ConfigurationError, match="name of a folder"):
        main(varied(THOUGHTS, tmp_path / "out", value, key="run.name"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rest", ["", "environment = 3", "learner = 3\n[environment]", "[environment]\nx = 1"]
)
def test_a_recipe_of_thoughts_with_odd_sections_is_refused(tmp_path: Path, rest: str) -> None:
    """In words that name the file."""
    recipe = tmp_path / "odd.toml"
    recipe.write_text(f'workload = "thoughts"\n{rest}\n')
    with pytest.raises(ConfigurationError):
        main(varied(recipe, tmp_path / "out", "none"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "folders", "shares"),
    [
        ("environment.kwargs.empty_share", ["start-0.1-0", "start-0.9-0"], [0.1, 0.9]),
        ("algorithm.staleness", ["start-0", "start-0"], [0.7, 0.7]),
    ],
)
def test_what_the_start_depends_on_gets_a_start_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, folders: list[str], shares: list[float]
) -> None:
    """Else a value would be without effect, in a table that says otherwise."""
    made: list[tuple[str, float]] = []

    def make_start(environment: EnvironmentSection, folder: Path, *_: Any, **__: Any) -> Path:
        made.append((folder.name, thoughts_section(environment).empty_share))
        return folder

    monkeypatch.setattr(vary_command, "make_start", make_start)
    monkeypatch.setattr(vary_command, "train_thoughts", lambda *_: {})
    values = ("0.1", "0.9") if key.startswith("environment") else ("0", "5")
    main(varied(THOUGHTS, tmp_path / "out", *values, key=key))
    assert made == list(zip(folders, shares, strict=True))


def test_a_folder_of_another_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs have the same names: 0 of the one would stand in the table of the other."""
    monkeypatch.setattr(vary_command, "make_start", lambda *_, **__: tmp_path)
    monkeypatch.setattr(vary_command, "train_thoughts", lambda *_: {})
    main(varied(THOUGHTS, tmp_path / "out", "0", key="algorithm.staleness"))
    with pytest.raises(ConfigurationError, match="another key"):
        main(varied(THOUGHTS, tmp_path / "out", "0", key="algorithm.kl_coefficient"))


def test_runs_of_decimal_values_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.01 and 0.02 do not differ in what a suffix would leave of them."""
    begun: list[Path] = []

    class Ended(Exception):
        """No run is made here."""

    def start(config: TrainingConfig) -> None:
        assert isinstance(config.what, Path)
        begun.append(config.what)
        raise Ended

    monkeypatch.setattr(condition_runs, "start", start)
    for value in ("0.01", "0.02"):
        with pytest.raises(Ended):
            condition_runs.train_thoughts(
                {}, tmp_path / "model", tmp_path / f"{value}-0", condition_runs.RunSettings(seed=0, updates=1)
            )
    assert [one.name for one in begun] == ["0.01-0.toml", "0.02-0.toml"]


def test_a_row_has_a_figure_of_each_seed_and_what_failed_in_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A seed of two loses the comparison that it is kept honest by; both stand in the row."""

    def train_thoughts(_: object, __: object, run_dir: Path, settings: RunSettings) -> dict[str, Any]:
        gain = 2.0 + settings.seed
        test = {"name": "possible_gain", "passed": gain <= 2.3}
        run_dir.mkdir(parents=True)
        (run_dir / "metrics.jsonl").write_text('{"updates": 1, "gain": 0.5}\n')
        return {
            "theatre": {"gain": gain, "verdict": "honest" if test["passed"] else "doubtful", "tests": [test]},
            "evaluation": {"sampled": {"mean": 0.9}},
            "updates": 1,
            "ending": "updates",
        }

    monkeypatch.setattr(vary_command, "make_start", lambda *_, **__: tmp_path)
    monkeypatch.setattr(vary_command, "train_thoughts", train_thoughts)
    main(replace(varied(THOUGHTS, tmp_path / "out", "none"), seeds=2))
    row = capsys.readouterr().out.splitlines()[2]
    assert row == (
        "| none | 0.90 0.90 | – – | 2.00 3.00 | – – | honest, doubtful | possible_gain | 1 1 | "
        "updates, updates | no, no |"
    )
    assert row in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "vary.png").stat().st_size > 1_000
