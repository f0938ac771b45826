"""A folder of comparisons is of one recipe, and says so."""

from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from workloads.thoughts.commands.plan_file import hold_plan


def test_a_folder_goes_on_with_the_same_and_refuses_another(tmp_path: Path) -> None:
    """The message names what differs, and the folder stays what it was."""
    plan = {"recipe": {"run": "one"}, "questions": 64}
    hold_plan(tmp_path / "out", plan)
    hold_plan(tmp_path / "out", plan)
    with pytest.raises(ConfigurationError, match="another questions, updates"):
        hold_plan(tmp_path / "out", plan | {"questions": 128, "updates": 3})
    hold_plan(tmp_path / "out", plan)
