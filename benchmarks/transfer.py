"""The rate of a transfer from process to process, and its cost to each process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.rate import Rate

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Transfer(Rate):
    """A rate, and the CPU seconds of `processes` (pid by name) from the first arrival to `finish`.

    What came with the first arrival is in neither: the processes were still starting.
    """

    processes: Mapping[str, int] = field(default_factory=dict)
    _before: Mapping[str, float] = field(default_factory=dict)
    _spent: Mapping[str, float] = field(default_factory=dict)
    _first_entries: int = 0

    def add(self, entries: int, size: int) -> None:
        """Count `entries` of `size` bytes in all that have arrived and were read."""
        if not self.entries:
            self._first_entries = entries
            self._before = {name: cpu_seconds(pid) for name, pid in self.processes.items()}
        Rate.add(self, entries, size)

    def finish(self) -> None:
        """Note that everything has arrived; call it before an ended process is waited for."""
        self._spent = {name: cpu_seconds(pid) - self._before[name] for name, pid in self.processes.items()}

    @property
    def entries_per_second(self) -> float:
        """Return arrivals per second; 0 when all arrived at once."""
        seconds = self._last_s - (self._first_s or self._last_s)
        return (self.entries - self._first_entries) / seconds if seconds else 0.0

    @property
    def cpu_seconds_per_gb(self) -> dict[str, float]:
        """Return CPU seconds of each process per 10⁹ bytes that arrived."""
        return {name: seconds / (self._bytes / 1e9) for name, seconds in self._spent.items() if self._bytes}


def cpu_seconds(pid: int) -> float:
    """Return CPU seconds of a process, its ended threads included.

    Also of one that ended and was not waited for.
    """
    # The second field is the program's name, which may hold spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
