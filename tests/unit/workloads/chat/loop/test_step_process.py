"""A step as a process: why it failed."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from penstock.workloads.chat.step_process import LOG, StepFailed, run_step


def test_a_step_that_was_killed_is_said_to_be(tmp_path: Path) -> None:
    def kill(seconds: float) -> bool:
        wanted = ["pgrep", "-P", str(os.getpid()), "-f", "reward train"]
        found = subprocess.run(wanted, capture_output=True, check=False, text=True).stdout
        for pid in found.split():
            os.kill(int(pid), signal.SIGKILL)
        return threading.Event().wait(seconds)

    with pytest.raises(
        StepFailed, match="`penstock rlhf reward train`: was killed by signal 9; its last line: "
    ):
        run_step(["rlhf", "reward", "train", "nothing.jsonl"], tmp_path, kill)
    assert (tmp_path / LOG).read_text().startswith("$ penstock rlhf reward train nothing.jsonl")


def test_a_step_that_ends_by_itself_says_why(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="`penstock rlhf reward train`: .*Missing option"):
        run_step(["rlhf", "reward", "train", "nothing.jsonl"], tmp_path, threading.Event().wait)
