"""Which folders `penstock thoughts check` and `variance` refuse."""

from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from workloads.thoughts.commands import gradient_variance
from workloads.thoughts.commands.thought_check import check_run


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_folder_that_is_no_run_is_called_so(tmp_path: Path, name: str) -> None:
    """Not a run of another workload."""
    with pytest.raises(ConfigurationError, match="so no run"):
        check_run(tmp_path / name, questions=8)
    with pytest.raises(ConfigurationError, match="so no run"):
        gradient_variance.main(tmp_path / name, draws=1, at_start=False, trust=False)
