"""Which folders `penstock thoughts check` refuses."""

from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.thoughts.environment import Thoughts
from penstock.workloads.thoughts.start import START_MODEL
from penstock.workloads.thoughts.study import check_run, start_of


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_folder_that_is_no_run_is_called_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="so no run"):
        check_run(tmp_path / name, questions=8)


def test_a_run_that_was_moved_has_its_start_with_it(tmp_path: Path) -> None:
    named = Thoughts(model=str(tmp_path / "elsewhere" / START_MODEL))
    assert start_of(tmp_path, named) == Path(named.model)
    (tmp_path / START_MODEL).mkdir()
    assert start_of(tmp_path, named) == tmp_path / START_MODEL
