"""How a process is asked to end. Each test runs a real process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from penstock.runtime.lifecycle import LIFELINE_VARIABLE, Lifecycle

SERVICE = """
import sys, threading
from penstock.runtime.lifecycle import Fatal
from penstock.runtime.lifecycle import run_service
from penstock.config.settings import ConfigurationError
def main(lifecycle):
    lifecycle.on_drain(lambda: print("callback", lifecycle.reason, flush=True))
    print("up", flush=True)
    lifecycle.draining.wait()
    {then}
    return 0
sys.exit(run_service(main, "test"))
"""


@contextmanager
def service(
    then: str = "pass", lifeline: int | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A running service that does `then` when it drains. prefix: the words before its command line."""
    environment = {**os.environ} | ({} if lifeline is None else {LIFELINE_VARIABLE: str(lifeline)})
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", SERVICE.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=() if lifeline is None else (lifeline,),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_drains_and_exits_clean() -> None:
    with service() as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        assert (out, process.returncode) == ("callback SIGTERM\n", 0)


def test_a_closed_terminal_drains() -> None:
    with service(prefix=["env", "--default-signal=HUP"]) as process:
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=10)
        assert (out, process.returncode) == ("callback SIGHUP\n", 0)


def test_what_nohup_started_outlives_its_terminal() -> None:
    with service(prefix=["nohup"]) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        assert (out, process.returncode) == ("callback SIGTERM\n", 0)


def test_sigint_exits_130_after_a_clean_drain() -> None:
    with service() as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130


def test_a_closed_lifeline_drains() -> None:
    read_fd, write_fd = os.pipe()
    with service(lifeline=read_fd) as process:
        os.close(read_fd)
        os.close(write_fd)
        out, _ = process.communicate(timeout=10)
        assert (out, process.returncode) == ("callback the launcher is gone\n", 0)


def test_a_second_signal_ends_a_drain_that_hangs() -> None:
    with service(then="threading.Event().wait()") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "callback SIGINT\n"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(0.3)
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("then", "code", "last"),
    [
        ("raise Fatal('the disk is full')", 1, "the disk is full"),
        ("raise ConfigurationError('seed=-1: use 0 or more')", 2, "seed=-1: use 0 or more"),
        ("raise RuntimeError('unforeseen')", 1, "RuntimeError: unforeseen"),
    ],
)
def test_the_cause_is_the_last_line_on_stderr(then: str, code: int, last: str) -> None:
    with service(then=then) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
        assert (process.returncode, err.splitlines()[-1]) == (code, last)


def test_a_callback_registered_while_draining_runs_at_once() -> None:
    lifecycle = Lifecycle("test")
    lifecycle.drain("enough")
    called: list[str] = []
    lifecycle.on_drain(lambda: called.append(lifecycle.reason))
    lifecycle.drain("again")
    assert called == ["enough"]


def test_a_failing_callback_does_not_keep_the_others_from_draining() -> None:
    lifecycle = Lifecycle("test")
    called: list[str] = []

    def fail() -> None:
        raise RuntimeError("closed already")

    lifecycle.on_drain(fail)
    lifecycle.on_drain(lambda: called.append("second"))
    lifecycle.drain("enough")
    assert called == ["second"]


def test_a_callback_is_forgotten_with_its_block() -> None:
    lifecycle = Lifecycle("test")
    called: list[str] = []
    with lifecycle.calling_on_drain(lambda: called.append("outlived")):
        pass
    with lifecycle.calling_on_drain(lambda: called.append("inside")):
        lifecycle.drain("enough")
    assert called == ["inside"]


ON_A_FULL_DISK = """
import sys
from penstock.runtime.lifecycle import leave, run_service
def main(lifecycle):
    with open("/dev/full", "w") as file:
        file.write("a checkpoint")
leave(run_service(main, "learner"))
"""


@pytest.mark.parametrize("is_log_full", [False, True])
def test_a_full_disk_ends_a_service_with_3_also_when_its_log_is_on_it(is_log_full: bool) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        process = subprocess.run(
            [sys.executable, "-c", ON_A_FULL_DISK],
            stderr=full if is_log_full else subprocess.PIPE,
            check=False,
        )
    assert process.returncode == 3
    if not is_log_full:
        last = process.stderr.decode().splitlines()[-1]
        assert last == "learner cannot write its files: No space left on device; make room, then resume"
