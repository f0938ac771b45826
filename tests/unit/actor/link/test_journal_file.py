"""A file of lines: whole ones whatever crashed before, and an error where the disk takes no more."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from penstock.actor.link.ack_journal import JournalFile
from penstock.config.settings import ConfigurationError
from penstock.runtime.exit import Fatal

_WRITER: Final = """
import os, signal, sys
from pathlib import Path
from penstock.actor.link.ack_journal import JournalFile
file = JournalFile(Path(sys.argv[1]))
file.write([{"a": 1}])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_line_behind_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    JournalFile(path).write([{"a": 1}, {"a": 2}])
    path.write_bytes(path.read_bytes()[:-3])
    again = JournalFile(path)
    again.write([{"a": 3}])
    again.close()
    assert path.read_text().splitlines() == ['{"a":1}', '{"a":', '{"a":3}']


def test_a_disk_that_takes_no_more_is_told_with_the_file() -> None:
    with pytest.raises(Fatal, match="/dev/full: No space left on device"):
        JournalFile(Path("/dev/full")).write([{"a": 1}])


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="actor.ack_journal="):
        JournalFile(tmp_path / "file" / "lines.jsonl")


def test_a_line_outlives_kill_9_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    done = subprocess.run([sys.executable, "-c", _WRITER, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b'{"a":1}\n'
