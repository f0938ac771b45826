"""The launcher finds a full disk itself: no log can tell of it."""

import subprocess
import sys
from pathlib import Path

from penstock.launch.run.memory import explain, problem

LIMITED = """
import pathlib, resource, sys
from penstock.launch.run.memory import explain
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(explain("learner: exit 3", pathlib.Path(sys.argv[1])))
"""


def test_a_folder_with_room_is_no_problem(tmp_path: Path) -> None:
    assert problem((tmp_path, tmp_path / "absent")) is None
    assert explain("learner: exit 3", tmp_path) == "learner: exit 3"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_goes_before_the_cause(tmp_path: Path) -> None:
    reply = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert reply.stdout.strip() == (
        f"cannot write in {tmp_path}: File too large; make room, then resume (learner: exit 3)"
    )
    assert list(tmp_path.iterdir()) == []
