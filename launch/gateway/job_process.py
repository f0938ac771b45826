"""The process around a job: `python -m launch.gateway.job_process LOCK_FD FOLDER COMMAND…`.

It notes that the job was begun, runs the command, and notes its exit code. It and the command hold the job's
lock: while either lives, every gateway sees that the job goes on. It is the head of a process group of its
own, so that the gateway's end is not the job's, and a signal to the group reaches the command.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

from penstock.config.run_files import opener
from penstock.runtime.output_file import sync_folder

LOG_FILE: Final = "train.log"
BEGUN_FILE: Final = "begun.json"
ENDED_FILE: Final = "ended.json"


def main(lock_fd: int, folder: Path, command: list[str]) -> int:
    """Run the command to its end and return its exit code, as the shell counts it where a signal ended it."""
    asked = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)  # the command got it, too, if it had begun

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    write_durably(folder / BEGUN_FILE, {"group": os.getpid()})
    with (folder / LOG_FILE).open("ab") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, pass_fds=(lock_fd,)
        )
    if asked:
        child.terminate()
    code = child.wait()
    write_durably(folder / ENDED_FILE, {"code": code if code >= 0 else 128 - code})
    return code


def write_durably(file: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a reader finds all of it or nothing, also after a loss of power; raises OSError."""
    temporary = file.with_suffix(".tmp")
    with open(temporary, "w", opener=opener) as out:
        json.dump(content, out)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
    sync_folder(file.parent)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
