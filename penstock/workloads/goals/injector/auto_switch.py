"""The switch of a folder: whether goals are carried out, changed while the injector goes on.

The newest line of `auto_switches.jsonl` counts more than `--auto`, also after a restart: who has switched an
injector off finds it off.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.injector.durable_lines import FollowedLines, add_alone, read_lines
from penstock.workloads.goals.injector.injection_records import Switch, read_record

SWITCHES: Final = "auto_switches.jsonl"


class AutoSwitch:
    """Reads the switch of one folder. default: what counts before it was ever used."""

    def __init__(self, folder: Path, *, default: bool) -> None:
        self._lines, self._on = FollowedLines(folder / SWITCHES), default

    def is_on(self) -> bool:
        """Return whether goals are carried out; raises ConfigurationError for a line that is no switch."""
        for one in _switches(self._lines.new()):
            self._on = one.on
        return self._on


def switch(folder: Path, *, on: bool, by: str = "") -> None:
    """Switch the injector of a folder; raises ConfigurationError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"--folder {folder}: is no folder; name the one that `penstock inject` works in"
        )
    add_alone(folder / SWITCHES, Switch(on=on, by=by, timestamp=time.time()).model_dump())


def last_switch(folder: Path) -> Switch | None:
    """Return how a folder was switched last; None where it never was."""
    found = list(_switches(read_lines(folder / SWITCHES)))
    return found[-1] if found else None


def _switches(lines: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[Switch]:
    for number, line in lines:
        yield read_record(Switch, SWITCHES, number, line)
