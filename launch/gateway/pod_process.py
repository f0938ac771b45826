"""The process of a job in a pod: `python -P -m launch.gateway.pod_process FOLDER OUTPUT COMMAND…`.

It notes that the job was begun, runs the command, and notes its exit code, as `job_process` does on a
machine. A cluster may start a pod a second time, for a node that it lost sight of: the second one finds the
note, and ends with EXIT_BEGUN_BEFORE without doing anything. It is the pod's first process, so that it alone
gets the signals, and hands them on. What the command prints goes into the file OUTPUT of the folder, errors
into its log.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Final

from launch.gateway.job_process import BEGUN_FILE, ENDED_FILE, LOG_FILE, write_durably
from penstock.runtime.output_file import write_once

EXIT_BEGUN_BEFORE: Final = 76


def main(folder: Path, output: str, command: list[str]) -> int:
    """Run the command to its end and return its exit code, as the shell counts it where a signal ended it."""
    asked, child = list[int](), list[subprocess.Popen[bytes]]()

    def hand_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for one in child:
            one.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    signal.signal(signal.SIGINT, hand_on)
    note = {"pid": os.getpid(), "host": os.uname().nodename}
    if not write_once(folder / BEGUN_FILE, json.dumps(note).encode()):
        return EXIT_BEGUN_BEFORE
    with (folder / LOG_FILE).open("ab") as log, (folder / output).open("ab") as out:
        child.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, cwd=folder))
    if asked:
        child[0].terminate()
    code = child[0].wait()
    write_durably(folder / ENDED_FILE, {"code": code if code >= 0 else 128 - code})
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
