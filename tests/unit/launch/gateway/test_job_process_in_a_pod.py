"""The first process of a job's pod: once for a job, however many pods a cluster starts."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from penstock.launch.jobs.job_process import EXIT_BEGUN_BEFORE, IN_A_POD

AROUND: Final = (sys.executable, "-P", "-m", "penstock.launch.jobs.job_process", IN_A_POD)


def test_what_it_runs_is_noted_and_a_second_one_does_nothing(tmp_path: Path) -> None:
    said = "import sys; print('out'); sys.exit(3)"
    command = (*AROUND, str(tmp_path), "output", sys.executable, "-c", said)
    assert subprocess.run(command, check=False).returncode == 3
    assert json.loads((tmp_path / "begun.json").read_text()).keys() == {"pid", "host"}
    assert json.loads((tmp_path / "ended.json").read_text()) == {"code": 3}
    assert (tmp_path / "output").read_text() == "out\n"
    assert subprocess.run(command, check=False).returncode == EXIT_BEGUN_BEFORE
    assert (tmp_path / "output").read_text() == "out\n"


def test_a_signal_reaches_what_it_runs(tmp_path: Path) -> None:
    waits = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    command = (*AROUND, str(tmp_path), "output", sys.executable, "-c", waits)
    process = subprocess.Popen(command, start_new_session=True)
    output, pause = tmp_path / "output", threading.Event()
    while not (output.exists() and output.read_text()):
        assert process.poll() is None
        pause.wait(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert json.loads((tmp_path / "ended.json").read_text()) == {"code": 130}
