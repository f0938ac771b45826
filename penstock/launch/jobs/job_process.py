"""The process around a job: it records that the job has begun, runs the command, and records its exit code.

    python -P -m penstock.launch.jobs.job_process LOCK_FD FOLDER COMMAND…       of a job on this machine
    python -P -m penstock.launch.jobs.job_process pod FOLDER OUTPUT COMMAND…    of a job in a pod

On a machine this process and the command hold the job's lock: while either lives, every other process sees
that the job is running. They are a process group, which the end of its starter does not reach, and which a
signal reaches as a whole.

In a pod this is the first process, the only one that gets signals, and it forwards them. A cluster may start
a second pod for a job whose node it lost sight of: that one finds the note, and ends with EXIT_BEGUN_BEFORE
without doing anything. What the command prints goes into the file OUTPUT of the folder, errors into the log.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

from penstock.config.run_folder import guard, opener
from penstock.runtime.output_file import replace_file, write_once

LOG_FILE: Final = "train.log"
BEGUN_FILE: Final = "begun.json"
ENDED_FILE: Final = "ended.json"
IN_A_POD: Final = "pod"
EXIT_BEGUN_BEFORE: Final = 76


def main(folder: Path, command: list[str], *, lock_fd: int | None = None, output: str = LOG_FILE) -> int:
    """Run the command, unless another pod has; return its exit code, or EXIT_BEGUN_BEFORE.

    lock_fd: of the job's lock, None in a pod. output: file for what the command prints. The exit code of a
    command that a signal ended is 128 + its number, as in a shell.
    """
    is_in_pod = lock_fd is None
    signals, children = list[int](), list[subprocess.Popen[bytes]]()

    def on_signal(number: int, _: FrameType | None) -> None:
        signals.append(number)
        for child in children if is_in_pod else ():  # on a machine the command is in the signalled group
            child.send_signal(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    guard(folder)
    if lock_fd is not None:
        note_durably(folder / BEGUN_FILE, {"group": os.getpid()})
    else:
        note = {"pid": os.getpid(), "host": os.uname().nodename}
        if not write_once(folder / BEGUN_FILE, json.dumps(note).encode()):
            return EXIT_BEGUN_BEFORE
    with (
        open(folder / LOG_FILE, "ab", opener=opener) as log,
        open(folder / output, "ab", opener=opener) as out,
    ):
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            cwd=folder if is_in_pod else None,
            pass_fds=() if lock_fd is None else (lock_fd,),
        )
    children.append(child)
    if signals:  # one may have come before the command could get it
        child.terminate()
    code = child.wait()
    code = code if code >= 0 else 128 - code
    note_durably(folder / ENDED_FILE, {"code": code})
    return code


def note_durably(file: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a reader finds all of it or nothing, also after a loss of power; raises OSError."""
    replace_file(file, json.dumps(content).encode())


if __name__ == "__main__":
    if sys.argv[1] == IN_A_POD:
        sys.exit(main(Path(sys.argv[2]), sys.argv[4:], output=sys.argv[3]))
    sys.exit(main(Path(sys.argv[2]), sys.argv[3:], lock_fd=int(sys.argv[1])))
