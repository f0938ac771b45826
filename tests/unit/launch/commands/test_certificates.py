"""`penstock certificates`: the folder that it writes to."""

import os
import stat
from pathlib import Path

import pytest

from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.runtime.exit import EXIT_OK


def mode(path: Path) -> int:
    """Of a file or folder, as chmod counts."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_of_its_own_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o755)
    assert main(Order(folder=folder, run="r")) == EXIT_OK
    assert mode(folder) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_the_root_of_a_volume_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, 65532, 65532)
    assert main(Order(folder=folder, run="r")) == EXIT_OK
    assert mode(folder) == 0o777
    assert {mode(key) for key in folder.glob("*.key")} == {0o600}
