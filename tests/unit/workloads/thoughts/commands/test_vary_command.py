"""How values of an ablation are read, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import ConfigurationError
from workloads.thoughts.commands.vary_command import Variation, main, nested, parsed


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
