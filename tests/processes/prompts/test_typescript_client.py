"""The TypeScript package: made with the types of the API, its own suite passes against real processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.serving import node_client

ROOT: Final = Path(__file__).resolve().parents[3]
PACKAGE: Final = ROOT / "clients" / "typescript"


@pytest.mark.timeout(1200)
def test_its_own_suite_passes() -> None:
    node_client.install(PACKAGE)
    done = subprocess.run(
        ["npm", "test"],
        cwd=PACKAGE,
        env=os.environ | {"VIRTUAL_ENV": str(Path(sys.prefix))},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "DIRECTIVE-023" in done.stdout
