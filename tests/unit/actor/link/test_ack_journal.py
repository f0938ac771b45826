"""The actor's record of acknowledgements: a line per fragment, whole whatever crashed before."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.actor.link.ack_journal import AckJournal, journal_files, read_journal
from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Slot
from penstock.runtime.exit import Fatal
from tests.support.run.small_run import RUN, SLOTS, STEPS, fragment


def test_a_line_says_what_was_acknowledged(tmp_path: Path) -> None:
    given = fragment(7, 3, observation=np.ones((STEPS + 1, SLOTS, 3), np.float32))
    given = replace(given, header=replace(given.header, slots=(Slot(0, 4, 9), Slot(1, 0, 3)), created_us=5))
    journal = AckJournal(tmp_path / "new" / "folder", RUN, "actor-0")
    journal.record([given, fragment(7, 4)])
    journal.close()
    (path,) = journal_files([tmp_path / "new" / "folder"])
    first, second = read_journal(path)
    assert first is not None
    assert second is not None
    assert (first.run, first.actor, first.kind) == (RUN, "actor-0", "train")
    assert (first.session, first.sequence, first.steps, first.created_us) == (7, 3, STEPS, 5)
    assert first.sha256 == hashlib.sha256(given.payload).hexdigest()
    assert second.sequence == 4


def test_a_slot_without_valid_steps_starts_no_experience(tmp_path: Path) -> None:
    valid = np.zeros((STEPS, SLOTS), bool)
    valid[1, 1] = True
    given = fragment(1, valid=valid)
    journal = AckJournal(tmp_path, RUN, "actor-0")
    journal.record([replace(given, header=replace(given.header, slots=(Slot(0, 1, 0), Slot(1, 2, 5))))])
    (line,) = read_journal(journal.path)
    assert line is not None
    assert line.slots == ((1, 2, 5),)


def test_a_torn_line_of_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    AckJournal(tmp_path, RUN, "actor-0").record([fragment(1)])
    (path,) = journal_files([tmp_path])
    os.truncate(path, path.stat().st_size - 7)
    AckJournal(tmp_path, RUN, "actor-0").record([fragment(1, 2)])
    torn, whole = read_journal(path)
    assert torn is None
    assert whole is not None
    assert whole.sequence == 2


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"actor\.ack_journal=.*/file"):
        AckJournal(tmp_path / "file", RUN, "actor-0")


def test_a_disk_that_takes_no_more_ends_the_actor(tmp_path: Path) -> None:
    journal = AckJournal(tmp_path, RUN, "actor-0")
    full = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - handed over
    journal._file = full
    with pytest.raises(Fatal, match="No space left"):
        journal.record([fragment(1)])
