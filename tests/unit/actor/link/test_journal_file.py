"""A file of lines: whole ones whatever crashed before, and an error where the disk takes no more."""

from pathlib import Path

import pytest

from actor.link.journal_file import JournalFile
from penstock.config.settings import ConfigurationError
from penstock.runtime.exit import Fatal


def test_a_line_behind_a_torn_one_is_whole(tmp_path: Path) -> None:
    """It begins on a line of its own."""
    path = tmp_path / "new" / "lines.jsonl"
    JournalFile(path).write([{"a": 1}, {"a": 2}])
    path.write_bytes(path.read_bytes()[:-3])
    again = JournalFile(path)
    again.write([{"a": 3}])
    again.close()
    assert path.read_text().splitlines() == ['{"a":1}', '{"a":', '{"a":3}']


def test_a_disk_that_takes_no_more_is_told_with_the_file() -> None:
    """As what ends the process."""
    with pytest.raises(Fatal, match="/dev/full: No space left on device"):
        JournalFile(Path("/dev/full")).write([{"a": 1}])


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    """Named with the key."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="actor.ack_journal="):
        JournalFile(tmp_path / "file" / "lines.jsonl")
