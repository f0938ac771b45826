"""The name under which a learner holds its lease."""

from pathlib import Path

import pytest

from penstock.learner.lease import holder_of


@pytest.mark.promise("learners-two-folders-two")
def test_a_restarted_learner_has_the_same_name(tmp_path: Path) -> None:
    assert holder_of(tmp_path) == holder_of(tmp_path)


@pytest.mark.promise("learners-two-folders-two")
def test_learners_of_two_folders_at_one_path_have_two_names(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    first = holder_of(folder)
    folder.rename(tmp_path / "another place")
    folder.mkdir()
    assert holder_of(folder) != first
