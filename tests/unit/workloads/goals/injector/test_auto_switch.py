"""The switch of a folder counts more than the option, and is seen while an injector goes on."""

from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.injection_journal import SWITCHES, is_on, last_switch, switch


@pytest.mark.parametrize("default", [False, True])
def test_the_newest_line_counts_and_without_one_the_option(tmp_path: Path, default: bool) -> None:
    assert is_on(tmp_path, default=default) is default
    for wanted in (not default, default, not default):
        switch(tmp_path, on=wanted, by="ada")
        assert is_on(tmp_path, default=default) is wanted
    found = last_switch(tmp_path)
    assert found is not None
    assert (found.on, found.by) == (not default, "ada")


def test_a_line_that_is_no_switch_is_named(tmp_path: Path) -> None:
    (tmp_path / SWITCHES).write_text('{"on": "perhaps", "timestamp": 1.0}\n')
    with pytest.raises(ConfigurationError, match=r"auto_switches.jsonl: line 1: on='perhaps'"):
        is_on(tmp_path, default=False)


def test_a_folder_that_is_none_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no folder"):
        switch(tmp_path / "absent", on=True)
    assert list(tmp_path.iterdir()) == []
