"""Wall clocks that a test can move, for every Python process that finds this folder on its PYTHONPATH.

`CHAOS_CLOCK` names a file with seconds; `time.time` and `time.time_ns` are the true time plus that. Only
gRPC's own modules keep the true time: its C core reads the kernel's clock, and both halves of a deadline must
agree. Python imports a module of this name by itself when it starts.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

_VARIABLE: Final = "CHAOS_CLOCK"
_time, _time_ns = time.time, time.time_ns


def _offset(file: Path) -> float:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return 0.0 if caller.partition(".")[0] == "grpc" else float(file.read_text())


def _move(file: Path) -> None:
    def moved() -> float:
        return _time() + _offset(file)

    def moved_ns() -> int:
        return _time_ns() + int(_offset(file) * 1e9)

    time.time, time.time_ns = moved, moved_ns


if _VARIABLE in os.environ:
    _move(Path(os.environ[_VARIABLE]))
