"""The messages as they are against those of `protos/released.binpb`, whose speakers stay understood."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

PROTOS: Final = Path(__file__).resolve().parents[2] / "protos"
BUF: Final = Path(sys.executable).with_name("buf")

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="no buf for this machine (PyPI: buf-bin)")


def _breaking(protos: Path) -> str:
    """What buf complains of, a line each; "" when nothing is broken."""
    command = [str(BUF), "breaking", str(protos), "--against", str(PROTOS / "released.binpb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 or done.stdout, done.stderr
    return done.stdout


def test_nothing_that_was_released_is_broken() -> None:
    assert _breaking(PROTOS) == ""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("uint32 batch = 4;", "", 'field "4" with name "batch"'),
        ("uint32 batch = 4;", "string batch = 4;", 'changed type from "uint32" to "string"'),
        ("uint32 batch = 4;", "uint32 rows = 4;", 'changed name from "batch" to "rows"'),
    ],
)
def test_what_would_break_a_client_is_found(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    shutil.copytree(PROTOS / "penstock", tmp_path / "penstock")
    policy = tmp_path / "penstock" / "v1" / "policy.proto"
    text = policy.read_text()
    assert text.count(old) == 1
    policy.write_text(text.replace(old, new))
    assert complaint in _breaking(tmp_path)
