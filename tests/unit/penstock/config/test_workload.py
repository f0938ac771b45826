"""Workloads are found by name and loaded by path."""

import pytest

from penstock.config.settings import ConfigurationError
from penstock.config.workload import find, load


def test_the_installed_control_workload_is_found_and_its_paths_load() -> None:
    workload = find("control")
    assert workload.name == "control"
    for path in (workload.environment, workload.spaces, workload.policy, workload.defaults, workload.target):
        assert callable(load(path))


def test_an_unknown_workload_is_named_with_the_installed_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"workload='chess'.*installed: .*control"):
        find("chess")


@pytest.mark.parametrize("path", ["", "nowhere:f", "os:nothing", "os", "os:name"])
def test_a_path_that_is_no_function_is_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a function|cannot be loaded"):
        load(path)
