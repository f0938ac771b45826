"""Named places on the way of a fragment at which a fault test kills or freezes this process.

By default `failpoint` does nothing. Two environment variables, read at the import of this module, turn it on:

- `PENSTOCK_FAILPOINTS`: `name=action@hit`, several with `;`. When a thread reaches `name` for the hit-th time
  (default 1), the process sends itself SIGKILL (`kill`) or SIGSTOP (`stop`).
- `PENSTOCK_PHASE_FILE`: a file with the last place that each thread reached. It is mapped memory, which
  outlives `kill -9`, and shows where a killed process was.

A name is `what.moment`; a thread at a name that ends in `.waiting` is idle.
"""

import mmap
import os
import re
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

FAILPOINTS_VARIABLE: Final = "PENSTOCK_FAILPOINTS"
PHASE_VARIABLE: Final = "PENSTOCK_PHASE_FILE"
_ACTIONS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_RULE: Final = re.compile(r"(?P<name>[a-z_.]+)=(?P<action>kill|stop)(?:@(?P<hit>[1-9][0-9]*))?")
RECORD: Final = struct.Struct("<40sQQ")
_THREADS: Final = 64


class _Reached:
    """`failpoint` where it is turned on."""

    def __init__(self, rules: str, phase_file: str) -> None:
        self._rules = _parse(rules)
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._slots = 0
        self._own = threading.local()
        self._map = _map(Path(phase_file)) if phase_file else None

    def __call__(self, name: str, sequence: int = 0) -> None:
        if self._map is not None:
            RECORD.pack_into(self._map, self._slot(), name.encode(), sequence, time.monotonic_ns())
        if name in self._rules:
            with self._lock:
                self._hits[name] += 1
                hits = self._hits[name]
            wanted, number = self._rules[name]
            if hits == wanted:
                # To this thread: another one might take the signal, and this one would continue a little.
                signal.pthread_kill(threading.get_ident(), number)

    def _slot(self) -> int:
        """Return the offset of this thread's record; threads beyond the last record share it."""
        slot: int | None = getattr(self._own, "slot", None)
        if slot is None:
            with self._lock:
                slot = self._own.slot = min(self._slots, _THREADS - 1) * RECORD.size
                self._slots += 1
        return slot


def _map(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        file.truncate(_THREADS * RECORD.size)
        return mmap.mmap(file.fileno(), 0)


def _parse(rules: str) -> dict[str, tuple[int, signal.Signals]]:
    parsed = {}
    for rule in filter(None, rules.split(";")):
        match = _RULE.fullmatch(rule)
        if match is None:
            raise ValueError(f"{FAILPOINTS_VARIABLE}={rule!r}: write name=kill@3 or name=stop")
        parsed[match["name"]] = (int(match["hit"] or 1), _ACTIONS[match["action"]])
    return parsed


def _off(_name: str, _sequence: int = 0) -> None:
    """`failpoint` outside of fault tests."""


def _choose(rules: str, phase_file: str) -> Callable[..., None]:
    return _Reached(rules, phase_file) if rules or phase_file else _off


failpoint: Final = _choose(os.environ.get(FAILPOINTS_VARIABLE, ""), os.environ.get(PHASE_VARIABLE, ""))
"""`failpoint(name, sequence=0)` notes that this thread is at `name`. sequence: of the fragment."""
