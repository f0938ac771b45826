"""What `penstock thoughts conditions` refuses before it trains anything."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError
from tests.support.thoughts.small_thoughts import small_base
from workloads.thoughts.commands.conditions import ALL, run_seed
from workloads.thoughts.commands.conditions_command import Asked, make_plan

ROOT = Path(__file__).resolve().parents[5]


def asked(recipe: Path) -> Asked:
    """All conditions of a recipe."""
    return Asked(recipe=recipe, out=Path("out"), seeds=1, updates=0, questions=64, only=())


def test_a_recipe_says_how_many_updates_unless_the_command_does() -> None:
    """And all conditions are made unless some are named."""
    recipe = asked(ROOT / "recipes" / "thoughts-tiny.toml")
    plan = make_plan(recipe)
    assert (plan.updates, plan.conditions) == (300, ALL)
    plan = make_plan(replace(recipe, updates=7, only=(5,)))
    assert (plan.updates, plan.conditions) == (7, (5,))
    assert plan.environment.kwargs["task"] == "rings:7:4"


def test_what_is_no_recipe_of_thoughts_is_refused(tmp_path: Path) -> None:
    """By name, with the remedy."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        make_plan(asked(tmp_path / "missing.toml"))
    with pytest.raises(ConfigurationError, match="thoughts-tiny"):
        make_plan(asked(ROOT / "recipes" / "goals.toml"))
    with pytest.raises(ConfigurationError, match="1 to 7"):
        make_plan(replace(asked(ROOT / "recipes" / "thoughts-tiny.toml"), only=(8,)))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("rings:7:4", "rings:0:0", "rings"),
        ("count = 128", "count = 4", "a single question"),
        ("[learner]", "[learner]\nno_such = 1", "no_such"),
        ("[algorithm]", "[algorithm]\nno_such = 1", "no_such"),
        ("[environment.kwargs]", "[environment.kwargs]\nno_such = 1", "no_such"),
    ],
)
def test_a_recipe_that_no_run_takes_is_refused_at_once(tmp_path: Path, old: str, new: str, why: str) -> None:
    """Not after the model that all begin with was made, nor when its turn comes."""
    text = (ROOT / "recipes" / "thoughts-tiny.toml").read_text()
    assert old in text
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigurationError, match=why):
        make_plan(asked(recipe))


def test_a_start_of_another_task_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """Its tokens mean other words."""
    small_base(tmp_path / "start")
    plan = make_plan(replace(asked(ROOT / "recipes" / "thoughts-tiny.toml"), out=tmp_path / "out", only=(4,)))
    plan.recipe["environment"]["kwargs"]["model"] = str(tmp_path / "start")
    with pytest.raises(ConfigurationError, match=f"model='{tmp_path}.*task='rings:7:4'"):
        run_seed(plan, 0)
