"""A step of a round as a process: a command that anybody may give by hand, which ends with the loop.

The process holds the round's lock as long as it lives, also one that a killed loop left behind and that is
still on its way out: no two of them ever write into the folder of a round.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final

from penstock.runtime.exit import EXIT_OK
from penstock.runtime.lifecycle import LIFELINE_VARIABLE

LOG: Final = "steps.log"
LOCK: Final = "lock"
_LOOK_S: Final = 0.5
_TAIL_BYTES: Final = 8192


class StepFailed(Exception):
    """Reports a step that cannot be done; the message says why, and what would help."""


class StepInterrupted(Exception):
    """Reports that the loop is to end, or to wait, before the step has ended: it is done another time."""


def run_step(words: Sequence[str], folder: Path, wait: Callable[[float], bool]) -> None:
    """Run `penstock WORDS…` in the folder of a round until it has ended.

    wait: waits that many seconds at most, and returns whether the step is to end before it is done. What the
    command prints goes to the round's log. Raises StepFailed with the last line of one that failed, and
    StepInterrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    try:
        with (folder / LOCK).open("a") as lock, (folder / LOG).open("ab") as log:
            _take(lock, wait)
            log.write(f"$ penstock {' '.join(words)}\n".encode())
            log.flush()
            begin = log.tell()
            child = subprocess.Popen(
                (sys.executable, "-P", "-m", "penstock.launch.cli", *words),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(reading, lock.fileno()),
                env={**os.environ, LIFELINE_VARIABLE: str(reading)},
                process_group=0,  # a Ctrl-C is the loop's, which ends its step in order
            )
            code = _ended(child, wait)
    finally:
        os.close(reading)
        os.close(writing)
    if code is None:
        raise StepInterrupted
    if code != EXIT_OK:
        said = _last_line(folder / LOG, begin) or f"exit code {code}"
        why = f"was killed by signal {-code}; its last line: {said}" if code < 0 else said
        raise StepFailed(f"`penstock {words[0]} {words[1]}`: {why}")


def _take(lock: IO[str], wait: Callable[[float], bool]) -> None:
    """Take the round's lock, which what a killed loop started may still hold; raises StepInterrupted."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait(_LOOK_S):
                raise StepInterrupted from None
        else:
            return


def _ended(child: "subprocess.Popen[bytes]", wait: Callable[[float], bool]) -> int | None:
    """Return the exit code of a process, None of one that was asked to end first."""
    while child.poll() is None:
        if wait(_LOOK_S):
            child.terminate()
            child.wait()
            return None
    return child.returncode


def _last_line(log: Path, begin: int) -> str:
    """Return the last line of a log behind its byte `begin`; "" where there is none."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(begin, file.tell() - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
