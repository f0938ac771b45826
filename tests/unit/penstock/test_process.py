import asyncio
import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import pytest

from penstock.launch.commands.certificates import main as certificates
from penstock.launch.commands.request import Order
from penstock.runtime import failpoint as module
from penstock.runtime import logs, metrics
from penstock.runtime import metrics as process_metrics
from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE, PHASE_VARIABLE
from penstock.runtime.health import MANY_OBJECTS, Health, collect_seldom, leave_out_what_stays
from penstock.runtime.lifecycle import giving_way
from penstock.runtime.metrics import PERIOD_S, watch_loop
from penstock.runtime.output_file import write_once
from penstock.runtime.retry import Interrupted, full_jitter, retry, retry_async
from tests.support.fleet.fleet import read_phases

# ---- Fail points: off they are nothing; on they end the process at the named hit and leave the phase
# behind.


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


# ---- The garbage collector looks seldom while a process starts, and as usual once it is ready.


USUAL = (700, 10, 10)


@pytest.fixture
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_as_before")
def test_a_start_is_over_when_the_process_is_ready() -> None:
    health = Health("broker")
    collect_seldom()
    health.set_ready(False, "waits for redis")
    assert gc.get_threshold() == (MANY_OBJECTS, *USUAL[1:])
    health.set_ready(True)
    assert gc.get_threshold() == USUAL


@pytest.mark.usefixtures("_as_before")
def test_what_somebody_else_has_set_stays() -> None:
    gc.set_threshold(1_234, 5, 6)
    Health("actor").set_ready(True)
    assert gc.get_threshold() == (1_234, 5, 6)


@pytest.mark.usefixtures("_as_before")
def test_what_stays_is_looked_at_no_more() -> None:
    before = gc.get_freeze_count()
    try:
        leave_out_what_stays()
        assert gc.get_freeze_count() > before
        assert not gc.get_objects()[1000:]
    finally:
        gc.unfreeze()


# ---- A loop that does not come round is seen from outside, and its lag is measured.


PATIENCE_S = 60.0
LOOP = "event loop"


def until_health(health: Health, is_red: bool) -> str | None:
    """Wait until the health is so; why it is red."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if (health.problem() is not None) is is_red:
            return health.problem()
        pause.wait(0.01)
    raise AssertionError(f"health stays {health.problem()!r}")


@pytest.mark.promise("healthz-role-turns-red")
def test_a_blocked_loop_turns_health_red_and_shows_as_lag() -> None:
    health, blocked, go_on, end = Health("broker"), threading.Event(), threading.Event(), threading.Event()
    health.watch(LOOP, 1.0)

    async def main() -> None:
        task = asyncio.create_task(watch_loop(partial(health.progress, LOOP)))
        await asyncio.sleep(2 * PERIOD_S)
        blocked.set()
        go_on.wait(PATIENCE_S)  # blocks the loop
        await asyncio.to_thread(end.wait, PATIENCE_S)
        task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    blocked.wait(PATIENCE_S)
    reason = until_health(health, is_red=True)
    assert reason is not None
    assert reason.startswith("event loop: no progress for ")
    go_on.set()
    until_health(health, is_red=False)
    end.set()
    thread.join(PATIENCE_S)
    text = metrics.exposition("broker").decode()
    worst = next(line for line in text.splitlines() if line.startswith("penstock_loop_lag_worst_seconds "))
    assert float(worst.split()[1]) > 1.0 - PERIOD_S


# ---- A thread gives way, and its process does not.


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness for each thread is Linux's")
def test_work_gives_way_and_who_waits_for_it_does_not() -> None:
    before = _niceness()
    assert giving_way(_niceness, 3) == min(before + 3, 19)
    assert _niceness() == before


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness for each thread is Linux's")
def test_what_the_work_raises_is_raised() -> None:
    def fails() -> None:
        raise ImportError("no such part")

    with pytest.raises(ImportError, match="no such part"):
        giving_way(fails, 1)


# ---- Every process tells of itself what does not depend on its role.


def expiry() -> float | None:
    """What is told of the certificate."""
    text = metrics.exposition("broker").decode()
    found = re.search(r"^penstock_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


def test_a_certificate_tells_when_it_runs_out_also_when_it_was_replaced(tmp_path: Path) -> None:
    assert expiry() is None
    certificate = tmp_path / "broker.pem"
    process_metrics.watch_certificate(certificate)
    try:
        assert expiry() == 0
        for days in (10.0, 90.0):
            certificates(Order(folder=tmp_path, run="run-a", days=days))
            assert expiry() == pytest.approx(time.time() + days * 86_400, abs=3_600)
        certificate.write_text("no certificate")
        assert expiry() == 0
    finally:
        process_metrics.watch_certificate(None)
    assert expiry() is None


# ---- Threads live and die together.


def test_the_first_error_of_a_thread_ends_all() -> None:
    thread_group, seen = ThreadGroup(), threading.Event()

    def fails() -> None:
        raise ValueError("the cause")

    def waits() -> None:
        thread_group.stop.wait()
        seen.set()

    thread_group.check()
    thread_group.start("waits", waits)
    thread_group.start("fails", fails)
    assert seen.wait(10)
    thread_group.join(10)
    with pytest.raises(ValueError, match="the cause"):
        thread_group.check()


def test_a_thread_that_is_interrupted_ends_quietly() -> None:
    thread_group = ThreadGroup()

    def interrupted() -> None:
        thread_group.stop.wait()
        raise Interrupted

    thread_group.start("interrupted", interrupted)
    thread_group.join(10)
    thread_group.check()


# ---- A file that is written once is whole, and nobody's but the first one's.


def test_one_of_many_gets_to_write(tmp_path: Path) -> None:
    file = tmp_path / "begun.json"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: write_once(file, b"%d" % number * 999, mode=0o600), range(8)))
    assert sorted(found) == [False] * 7 + [True]
    assert [path.name for path in tmp_path.iterdir()] == ["begun.json"]
    assert file.read_bytes() == b"%d" % found.index(True) * 999
    assert file.stat().st_mode & 0o777 == 0o600


# ---- The one retry loop.


def failing(times: int, error: Exception) -> Callable[[], str]:
    """A call that raises `error` so many times and then succeeds."""
    left = iter(range(times))

    def call() -> str:
        if next(left, None) is not None:
            raise error
        return "done"

    return call


def is_os_error(error: Exception) -> bool:
    """What these tests retry."""
    return isinstance(error, OSError)


def test_delays_lie_between_zero_and_the_doubling_cap() -> None:
    delays = list(islice(full_jitter(base_s=0.1, cap_s=1.0), 50))
    limits = [min(1.0, 0.1 * 2**n) for n in range(50)]
    assert all(0.0 <= delay <= limit for delay, limit in zip(delays, limits, strict=True))
    assert len(set(delays)) > 40


def test_a_call_is_repeated_until_it_succeeds() -> None:
    waits: list[float] = []
    result = retry(
        failing(2, OSError("down")),
        retryable=is_os_error,
        stop=threading.Event(),
        on_wait=lambda _error, delay_s: waits.append(delay_s),
        delays=repeat(0.001),
    )
    assert (result, len(waits)) == ("done", 2)


def test_what_is_not_retryable_is_raised_at_once() -> None:
    with pytest.raises(ValueError, match="wrong"):
        retry(failing(1, ValueError("wrong")), retryable=is_os_error, stop=threading.Event())


def test_giving_up_raises_the_last_error() -> None:
    with pytest.raises(OSError, match="down"):
        retry(
            failing(10**9, OSError("down")),
            retryable=is_os_error,
            stop=threading.Event(),
            give_up_s=0.02,
            delays=repeat(0.005),
        )


def test_stop_ends_a_long_wait_at_once() -> None:
    stop = threading.Event()
    with pytest.raises(Interrupted):
        retry(
            failing(10**9, OSError("down")),
            retryable=is_os_error,
            stop=stop,
            on_wait=lambda _error, _delay_s: stop.set(),
            delays=repeat(3600.0),
        )


async def test_the_asynchronous_twin_repeats_and_stops() -> None:
    call = failing(2, OSError("down"))

    async def succeed_later() -> str:
        return call()

    async def fail() -> str:
        raise OSError("down")

    stop = asyncio.Event()
    result = await retry_async(succeed_later, retryable=is_os_error, stop=stop, delays=repeat(0.001))
    assert result == "done"
    with pytest.raises(Interrupted):
        await retry_async(
            fail,
            retryable=is_os_error,
            stop=stop,
            on_wait=lambda _error, _delay_s: stop.set(),
            delays=repeat(3600.0),
        )


# ---- The shape of log lines.


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Logging of this process, as it was again after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stream(root: logging.Logger) -> io.StringIO:
    """Where this process logs during a test."""
    stream = io.StringIO()
    logs.configure("broker", "cartpole-1", stream=stream)
    return stream


@pytest.fixture
def objects(root: logging.Logger) -> io.StringIO:
    """Where it logs in JSON, before it knows its run."""
    stream = io.StringIO()
    logs.configure("actor", style="json", stream=stream)
    return stream


def test_a_line_has_time_level_role_message_and_fields(stream: io.StringIO) -> None:
    logging.getLogger("x").warning("slow append", extra={"seconds": 1.23456789, "why": "disk is full"})
    line = stream.getvalue().rstrip("\n")
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == "warning broker slow append seconds=1.23457 why='disk is full' run=cartpole-1"


def test_a_value_cannot_begin_a_line_or_move_the_cursor(stream: io.StringIO) -> None:
    logging.getLogger("x").info("command", extra={"reason": "now\rinfo\x1b[2J", "by": "ε"})
    assert "reason='now\\rinfo\\x1b[2J' by=ε" in stream.getvalue()


def test_a_traceback_follows_its_line(stream: io.StringIO) -> None:
    try:
        int("bad byte")
    except ValueError:
        logging.getLogger("x").exception("failed")
    lines = stream.getvalue().splitlines()
    assert "error broker failed" in lines[0]
    assert lines[-1].startswith("ValueError: invalid literal")


def test_a_json_line_has_role_run_and_every_field(objects: io.StringIO) -> None:
    fields = {"seconds": 0.5, "count": 2, "odd": float("nan"), "where": Path("/a"), "why": "disk\nfull"}
    logging.getLogger("x").warning("slow append", extra=fields)
    (line,) = objects.getvalue().splitlines()
    read = json.loads(line)
    assert read.pop("time").endswith("Z")
    own = {"level": "warning", "role": "actor", "run": None, "logger": "x", "message": "slow append"}
    assert read == own | fields | {"odd": "nan", "where": "/a"}


def test_a_json_line_names_the_run_as_soon_as_it_is_known(objects: io.StringIO) -> None:
    logs.name_run("cartpole-1")
    logging.getLogger("x").info("ready", extra={"run": "other", "role": "other"})
    read = json.loads(objects.getvalue())
    assert (read["run"], read["role"]) == ("cartpole-1", "actor")


def test_a_traceback_is_a_field_of_its_json_line(objects: io.StringIO) -> None:
    try:
        int("bad byte")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = objects.getvalue().splitlines()
    assert json.loads(line)["exception"].splitlines()[-1].startswith("ValueError: invalid literal")


def test_lines_of_text_do_not_change_with_the_run(stream: io.StringIO) -> None:
    logs.name_run("other")
    logging.getLogger("x").info("ready")
    assert stream.getvalue().rstrip("\n").endswith("info broker ready run=cartpole-1")


def test_a_file_has_the_records_of_its_time(
    root: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launcher.log"
    file.write_text("of before\n")
    with logs.at_end_of(file, "launcher", "cartpole-1", style="text"):
        logging.getLogger("x").info("within")
    logging.getLogger("x").info("after")
    before, within = file.read_text().splitlines()
    assert (before, within.split(" ", 1)[1]) == ("of before", "info launcher within run=cartpole-1")
    (after,) = capsys.readouterr().err.splitlines()
    assert after.endswith("info launcher after run=cartpole-1")
