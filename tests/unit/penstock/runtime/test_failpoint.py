"""Fail points: off they are nothing; on they end the process at the named hit and leave the phase behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime import failpoint as module
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE, PHASE_VARIABLE
from tests.support.fleet.phases import read_phases

PROGRAM = """
import threading
from penstock.runtime.failpoint import failpoint
failpoint("loop.waiting")
thread = threading.Thread(target=lambda: failpoint("append.sending", 7))
thread.start(); thread.join()
for number in range(5):
    failpoint("update.before", number)
print("survived")
"""


def run(**variables: str) -> "subprocess.CompletedProcess[str]":
    """The program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )


def test_off_it_is_an_empty_function() -> None:
    assert module.failpoint is module._off
    assert run().stdout == "survived\n"


def test_a_process_is_killed_at_the_hit_that_was_named() -> None:
    assert run(**{FAILPOINTS_VARIABLE: "update.before=kill@5;commit.after=kill"}).returncode == -9
    assert run(**{FAILPOINTS_VARIABLE: "update.before=kill@6"}).returncode == 0


def test_the_phase_of_each_thread_outlives_the_process(tmp_path: Path) -> None:
    file = tmp_path / "phases"
    run(**{FAILPOINTS_VARIABLE: "update.before=kill@3", PHASE_VARIABLE: str(file)})
    phases = {phase.name: phase for phase in read_phases(file)}
    assert phases.keys() == {"update.before", "append.sending"}
    assert phases["update.before"].sequence == 2
    assert phases["append.sending"].sequence == 7
    assert read_phases(file)[0].name == "update.before"
    assert not phases["update.before"].is_idle


FREEZING = """
import threading, time
from penstock.runtime.failpoint import failpoint
def work():
    failpoint("commit.before", 1)
    failpoint("commit.after", 1)
threading.Thread(target=work).start()
time.sleep(60)
"""


def test_a_thread_that_freezes_its_process_is_frozen_at_that_place(tmp_path: Path) -> None:
    file = tmp_path / "phases"
    rules = {FAILPOINTS_VARIABLE: "commit.before=stop", PHASE_VARIABLE: str(file)}
    process = subprocess.Popen([sys.executable, "-c", FREEZING], env={**os.environ, **rules})
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert [phase.name for phase in read_phases(file)] == ["commit.before"]
    finally:
        process.kill()
        process.wait()


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="write name=kill@3"):
        module._parse("update.before=explode")
