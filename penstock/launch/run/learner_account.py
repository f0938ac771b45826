"""The learner's final account, `learner.json`, as one attempt of a launcher sees it.

An account that was there before the attempt began is an earlier attempt's: it stays where it is, and counts
for nothing in this one. The learner replaces the file by rename, so a new account is a new file.
"""

import json
from pathlib import Path
from typing import Any, Final

LEARNER_FILE: Final = "learner.json"


class LearnerAccount:
    """What the learner of this attempt wrote when it ended."""

    def __init__(self, run_dir: Path) -> None:
        """run_dir: of the run, as it is found before anything of it is started."""
        self._file = run_dir / LEARNER_FILE
        self._found = self._identity()

    def read(self) -> dict[str, Any]:
        """The account; empty while the learner of this attempt has written none."""
        if self._identity() in (None, self._found):
            return {}
        return read_account(self._file.parent)

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns


def read_account(run_dir: Path) -> dict[str, Any]:
    """Return what the last learner of a run that got to its end wrote; empty when none did."""
    try:
        return dict(json.loads((run_dir / LEARNER_FILE).read_text()))
    except FileNotFoundError:
        return {}
