"""What `make` starts with ARGS starts by itself, whatever other modules import of it."""

import re
from pathlib import Path

import pytest

from tests.support.run.forked_process import MODULE, ForkedProcess

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
MODULES = sorted(set(re.findall(r"python -m (\S+) .*\$\(ARGS\)", (ROOT / "Makefile").read_text())))


def test_the_long_measurements_are_among_them() -> None:
    assert {"benchmarks", "benchmarks.proofs"} <= {*MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_tells_how_it_is_used(module: str, tmp_path: Path) -> None:
    said = tmp_path / "help.txt"
    code = ForkedProcess(MODULE, module, "--help", output=said).wait(PATIENCE_S)
    assert code == 0, said.read_text()
    assert "sage" in said.read_text()
