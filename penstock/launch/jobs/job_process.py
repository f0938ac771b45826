"""The process around a job: it notes that the job has begun, runs the command, and notes its exit code.

    python -P -m penstock.launch.jobs.job_process LOCK_FD FOLDER COMMAND…       of a job on this machine
    python -P -m penstock.launch.jobs.job_process pod FOLDER OUTPUT COMMAND…    of a job in a pod

On a machine it and the command hold the job's lock: while either lives, every other process sees that the job
goes on. It heads a process group of its own, which the end of its starter does not reach, and a signal to the
group reaches the command.

In a pod it is the first process, the only one that gets signals, and hands them on. A cluster may start a
pod a second time, for a node that it lost sight of: the second one finds the note, and ends with
EXIT_BEGUN_BEFORE without doing anything. What the command prints goes into the file OUTPUT of the folder,
errors into its log.
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


def main(lock_fd: int, folder: Path, command: list[str]) -> int:
    """Run the command to its end and return its exit code, as the shell counts it where a signal ended it."""
    asked = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)  # the command got it, too, if it had begun

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    guard(folder)
    note_durably(folder / BEGUN_FILE, {"group": os.getpid()})
    with open(folder / LOG_FILE, "ab", opener=opener) as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock_fd,)
        )
    return _ended(folder, child, asked)


def main_of_pod(folder: Path, output: str, command: list[str]) -> int:
    """Run the command, unless another pod has; return its exit code, or EXIT_BEGUN_BEFORE."""
    asked, child = list[int](), list[subprocess.Popen[bytes]]()

    def hand_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for one in child:
            one.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    signal.signal(signal.SIGINT, hand_on)
    guard(folder)
    note = {"pid": os.getpid(), "host": os.uname().nodename}
    if not write_once(folder / BEGUN_FILE, json.dumps(note).encode()):
        return EXIT_BEGUN_BEFORE
    with (
        open(folder / LOG_FILE, "ab", opener=opener) as log,
        open(folder / output, "ab", opener=opener) as out,
    ):
        child.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, cwd=folder))
    return _ended(folder, child[0], asked)


def _ended(folder: Path, child: subprocess.Popen[bytes], asked: list[int]) -> int:
    """Wait for the command, which ends if that was asked before it began; return its exit code, noted."""
    if asked:
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
        sys.exit(main_of_pod(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
