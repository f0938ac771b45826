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
from typing import Any

import pytest

from penstock.launch.commands.certificates import main as certificates
from penstock.launch.commands.request import Order
from penstock.runtime import failpoint as module
from penstock.runtime import logs, metrics
from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE, PHASE_VARIABLE
from penstock.runtime.health import MANY_OBJECTS, Health, collect_seldom, leave_out_what_stays
from penstock.runtime.lifecycle import giving_way
from penstock.runtime.metrics import PERIOD_S, watch_loop
from penstock.runtime.output_file import write_once
from penstock.runtime.retry import Interrupted, full_jitter, retry, retry_async
from tests.support.fleet.fleet import read_phases
from tests.support.run.harness import eventually

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


def run(rules: str = "", phases: Path | None = None) -> tuple[int, str]:
    variables = {FAILPOINTS_VARIABLE: rules, **({PHASE_VARIABLE: str(phases)} if phases else {})}
    environment = {**os.environ, **(variables if rules else {})}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=False, env=environment
    )
    return done.returncode, done.stdout


def test_off_it_is_an_empty_function_and_on_it_kills_at_the_hit_that_was_named() -> None:
    assert module.failpoint is module._off
    assert run() == (0, "survived\n")
    assert run("update.before=kill@5;commit.after=kill")[0] == -9
    assert run("update.before=kill@6") == (0, "survived\n")
    with pytest.raises(ValueError, match="write name=kill@3"):
        module._parse("update.before=explode")


def test_the_phase_of_each_thread_can_be_read_after_its_death(tmp_path: Path) -> None:
    file = tmp_path / "phases"
    run("update.before=kill@3", file)
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


@pytest.fixture
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_as_before")
def test_starting_ends_when_the_process_is_ready() -> None:
    health, usual = Health("broker"), (700, 10, 10)
    collect_seldom()
    health.set_ready(False, "waits for redis")
    assert gc.get_threshold() == (MANY_OBJECTS, *usual[1:])
    health.set_ready(True)
    assert gc.get_threshold() == usual
    gc.set_threshold(1_234, 5, 6)
    Health("actor").set_ready(True)
    assert gc.get_threshold() == (1_234, 5, 6), "what somebody else has set stays"


@pytest.mark.usefixtures("_as_before")
def test_long_lived_objects_are_excluded_from_collections() -> None:
    before = gc.get_freeze_count()
    try:
        leave_out_what_stays()
        assert gc.get_freeze_count() > before
        assert not gc.get_objects()[1000:]
    finally:
        gc.unfreeze()


@pytest.mark.promise("healthz-role-turns-red")
def test_a_blocked_loop_turns_health_red_and_shows_as_lag() -> None:
    health, blocked, go_on, end = Health("broker"), threading.Event(), threading.Event(), threading.Event()
    health.watch("event loop", 1.0)
    patience_s = 60.0

    async def main() -> None:
        task = asyncio.create_task(watch_loop(partial(health.progress, "event loop")))
        await asyncio.sleep(2 * PERIOD_S)
        blocked.set()
        go_on.wait(patience_s)  # blocks the loop
        await asyncio.to_thread(end.wait, patience_s)
        task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    blocked.wait(patience_s)
    eventually(lambda: str(health.problem()).startswith("event loop: no progress for "), "a red health")
    go_on.set()
    eventually(lambda: health.problem() is None, "a green health")
    end.set()
    thread.join(patience_s)
    text = metrics.exposition("broker").decode()
    worst = next(line for line in text.splitlines() if line.startswith("penstock_loop_lag_worst_seconds "))
    assert float(worst.split()[1]) > 1.0 - PERIOD_S


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness for each thread is Linux's")
def test_work_in_a_thread_has_lower_priority_than_its_caller() -> None:
    before = _niceness()
    assert giving_way(_niceness, 3) == min(before + 3, 19)
    assert _niceness() == before

    def fails() -> None:
        raise ImportError("no such part")

    with pytest.raises(ImportError, match="no such part"):
        giving_way(fails, 1)


def expiry() -> float | None:
    """What is told of the certificate."""
    text = metrics.exposition("broker").decode()
    found = re.search(r"^penstock_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


def test_the_expiry_of_a_certificate_is_exported_also_after_its_replacement(tmp_path: Path) -> None:
    assert expiry() is None
    certificate = tmp_path / "broker.pem"
    metrics.watch_certificate(certificate)
    try:
        assert expiry() == 0
        for days in (10.0, 90.0):
            certificates(Order(folder=tmp_path, run="run-a", days=days))
            assert expiry() == pytest.approx(time.time() + days * 86_400, abs=3_600)
        certificate.write_text("no certificate")
        assert expiry() == 0
    finally:
        metrics.watch_certificate(None)
    assert expiry() is None


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
    interrupted = ThreadGroup()

    def ends_quietly() -> None:
        interrupted.stop.wait()
        raise Interrupted

    interrupted.start("interrupted", ends_quietly)
    interrupted.join(10)
    interrupted.check()


def test_of_concurrent_writers_one_writes(tmp_path: Path) -> None:
    file = tmp_path / "begun.json"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: write_once(file, b"%d" % number * 999, mode=0o600), range(8)))
    assert sorted(found) == [False] * 7 + [True]
    assert [path.name for path in tmp_path.iterdir()] == ["begun.json"]
    assert file.read_bytes() == b"%d" % found.index(True) * 999
    assert file.stat().st_mode & 0o777 == 0o600


def failing(times: int, error: Exception) -> Callable[[], str]:
    """A call that raises `error` so many times and then succeeds."""
    left = iter(range(times))

    def call() -> str:
        if next(left, None) is not None:
            raise error
        return "done"

    return call


def test_delays_lie_between_zero_and_the_doubling_cap() -> None:
    delays = list(islice(full_jitter(base_s=0.1, cap_s=1.0), 50))
    limits = [min(1.0, 0.1 * 2**n) for n in range(50)]
    assert all(0.0 <= delay <= limit for delay, limit in zip(delays, limits, strict=True))
    assert len(set(delays)) > 40


def is_os_error(error: Exception) -> bool:
    return isinstance(error, OSError)


def test_a_call_is_repeated_until_it_succeeds_or_it_is_given_up() -> None:
    waits: list[float] = []

    def tried(times: int, error: Exception, **options: Any) -> str:
        options = {"delays": repeat(0.001), "stop": threading.Event(), **options}
        return retry(failing(times, error), retryable=is_os_error, **options)

    down = OSError("down")
    assert tried(2, down, on_wait=lambda _error, delay_s: waits.append(delay_s)) == "done"
    assert len(waits) == 2
    with pytest.raises(ValueError, match="not retryable"):
        tried(1, ValueError("not retryable"))
    with pytest.raises(OSError, match="down"):
        tried(10**9, down, give_up_s=0.02)
    stop = threading.Event()
    with pytest.raises(Interrupted):
        tried(10**9, down, stop=stop, on_wait=lambda _error, _delay_s: stop.set(), delays=repeat(3600.0))


async def test_the_asynchronous_retry_repeats_and_stops() -> None:
    calls, stop = {times: failing(times, OSError("down")) for times in (2, 10**9)}, asyncio.Event()

    async def tried(times: int, delay_s: float, **options: Any) -> str:
        async def call() -> str:
            return calls[times]()

        return await retry_async(call, retryable=is_os_error, stop=stop, delays=repeat(delay_s), **options)

    assert await tried(2, 0.001) == "done"
    with pytest.raises(Interrupted):
        await tried(10**9, 3600.0, on_wait=lambda _error, _delay_s: stop.set())


@pytest.fixture
def root() -> Iterator[None]:
    """Logging of this process, as it was again after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def fail() -> None:
    try:
        int("bad byte")
    except ValueError:
        logging.getLogger("x").exception("failed")


@pytest.mark.usefixtures("root")
def test_a_line_of_text_has_time_level_role_message_and_fields() -> None:
    stream = io.StringIO()
    logs.configure("broker", "cartpole-1", stream=stream)
    logging.getLogger("x").warning("slow append", extra={"seconds": 1.23456789, "why": "disk is full"})
    logs.name_run("other")
    logging.getLogger("x").info("command", extra={"reason": "now\rinfo\x1b[2J", "by": "ε"})
    fail()
    first, second, third, *traceback = stream.getvalue().splitlines()
    stamp, rest = first.split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == "warning broker slow append seconds=1.23457 why='disk is full' run=cartpole-1"
    assert second.endswith("info broker command reason='now\\rinfo\\x1b[2J' by=ε run=cartpole-1")
    assert "error broker failed" in third
    assert traceback[-1].startswith("ValueError: invalid literal")


@pytest.mark.usefixtures("root")
def test_a_line_of_json_has_role_run_and_every_field() -> None:
    stream = io.StringIO()
    logs.configure("actor", style="json", stream=stream)
    fields = {"seconds": 0.5, "count": 2, "odd": float("nan"), "where": Path("/a"), "why": "disk\nfull"}
    logging.getLogger("x").warning("slow append", extra=fields)
    logs.name_run("cartpole-1")
    logging.getLogger("x").info("ready", extra={"run": "other", "role": "other"})
    fail()
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    own = {"level": "warning", "role": "actor", "run": None, "logger": "x", "message": "slow append"}
    assert first == own | fields | {"odd": "nan", "where": "/a"}
    assert (second["run"], second["role"]) == ("cartpole-1", "actor")
    assert third["exception"].splitlines()[-1].startswith("ValueError: invalid literal")


@pytest.mark.usefixtures("root")
def test_a_log_file_has_the_records_of_its_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "launcher.log"
    file.write_text("of before\n")
    with logs.at_end_of(file, "launcher", "cartpole-1", style="text"):
        logging.getLogger("x").info("within")
    logging.getLogger("x").info("after")
    before, within = file.read_text().splitlines()
    assert (before, within.split(" ", 1)[1]) == ("of before", "info launcher within run=cartpole-1")
    (after,) = capsys.readouterr().err.splitlines()
    assert after.endswith("info launcher after run=cartpole-1")
