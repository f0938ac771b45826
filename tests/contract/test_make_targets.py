"""What `make` starts with ARGS starts by itself, whatever other modules import of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(set(re.findall(r"python -m (\S+) .*\$\(ARGS\)", (ROOT / "Makefile").read_text())))


def test_the_long_measurements_are_among_them() -> None:
    """Else nothing is tested here."""
    assert {"benchmarks", "benchmarks.learn", "benchmarks.staleness", "benchmarks.synchronous"} <= {*MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_tells_how_it_is_used(module: str) -> None:
    """An import in a circle ends only the one that is started first."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sage" in done.stdout
