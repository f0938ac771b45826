"""What is refused before a training is started; trainings themselves are started by tests of processes."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra `ui`")

from penstock.launch.ui.run_starter import CannotStart, RunStarter
from tests.support.run.left_run import make_run


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"learner": {"total_steps": 0}}, "settings.learner.total_steps"),
        ({"learner": {"unheard": 1}}, "settings.learner.unheard"),
        ({"algorithm": {"name": "unheard"}}, "settings.algorithm.name"),
        ({"seed": None}, "settings.seed"),
        ({"learner": {"target_return": None}}, "settings.learner.target_return"),
        ({"environment": {"kwargs": {"deep": [None]}}}, "settings.environment.kwargs.deep.0"),
    ],
)
def test_a_setting_that_is_wrong_is_named_and_nothing_is_made(
    tmp_path: Path, settings: dict[str, Any], field: str
) -> None:
    starter = RunStarter(tmp_path / "runs", tmp_path / "state")
    (tmp_path / "runs").mkdir()
    with pytest.raises(CannotStart) as refused:
        starter.start("mine", settings)
    assert refused.value.field == field, refused.value
    assert list((tmp_path / "runs").iterdir()) == []
    assert not (tmp_path / "state").exists()


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(CannotStart, match="choose another") as refused:
        RunStarter(tmp_path, tmp_path / "state").start("mine", {})
    assert refused.value.field == "name"


def test_below_a_run_none_is_started(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(CannotStart, match="on the folder above it"):
        RunStarter(run, tmp_path / "state").start("mine", {})
