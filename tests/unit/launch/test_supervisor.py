import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.launch.commands.train import tell
from penstock.launch.inspection.curve import Progress
from penstock.launch.inspection.live_view import make_view
from penstock.launch.run import supervisor as module
from penstock.launch.run.memory import (
    Memory,
    Trees,
    available,
    explain,
    of_process,
    parse_device_memory,
    problem,
    together,
)
from penstock.launch.run.supervisor import (
    CleanExit,
    GaveUp,
    ServiceSpec,
    Supervisor,
    last_line,
    without_configuration,
)
from penstock.runtime import metrics

# ---- Services are started, restarted and ended as promised. The services here are small real processes.


PATIENCE_S = 20.0


IN_ORDER = (
    "import os, pathlib\npathlib.Path(os.environ['PENSTOCK_ENDPOINT_FILE']).with_suffix('.ended').touch()"
)
"""`announce_end` without the second that importing it takes."""


def python(
    code: str,
    name: str = "worker",
    on_restart: tuple[str, ...] = (),
    clean_exit: CleanExit = CleanExit.DONE,
) -> ServiceSpec:
    """A service that runs `code`, and ends in order when it comes to its end."""
    site = () if "penstock" in code else ("-S",)  # installed packages take most of a start
    return ServiceSpec(
        name=name,
        role="actor",
        command=(sys.executable, *site, "-c", f"{code}\n{IN_ORDER}"),
        on_restart=on_restart,
        clean_exit=clean_exit,
    )


class Harness:
    """A supervisor in a folder, the events it told, and its end of the lifeline."""

    def __init__(self, path: Path) -> None:
        self.folder = path
        (path / "logs").mkdir()
        (path / "endpoints").mkdir()
        self.events: list[str] = []
        self.read_fd, self.write_fd = os.pipe()
        self.supervisor = Supervisor(self.folder, self.read_fd, {"OF_THE_RUN": "told"}, self.events.append)

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until `condition` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            self.supervisor.step(0.05)

    def is_running(self, name: str = "worker") -> bool:
        return self.supervisor.services[name].process is not None

    def log(self, name: str = "worker") -> str:
        """What the service wrote."""
        return (self.folder / "logs" / f"{name}.log").read_text()


def is_ready(supervisor: Supervisor) -> bool:
    process = supervisor.services["worker"].process
    return process is not None and process.is_ready()


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A supervisor with a short back-off; what it started is gone afterwards."""
    monkeypatch.setattr(module, "BACKOFF_BASE_S", 0.01)
    monkeypatch.setattr(module, "BACKOFF_CAP_S", 0.02)
    harness = Harness(tmp_path)
    yield harness
    harness.supervisor.kill(list(harness.supervisor.services))
    os.close(harness.read_fd)
    os.close(harness.write_fd)


def test_each_service_has_its_own_process_group_and_log_file(harness: Harness) -> None:
    code = "import os, sys; print(os.getpgid(0) == os.getpid()); print('to stderr', file=sys.stderr)"
    harness.supervisor.start(python(code))
    harness.until(lambda: harness.supervisor.is_done("worker"))
    assert sorted(harness.log().splitlines()) == ["True", "to stderr"]


def test_restarts_are_exported_before_the_first(harness: Harness) -> None:
    harness.supervisor.start(python("pass"))
    assert 'penstock_restarts_total{role="actor"}' in metrics.exposition("launcher").decode()


def test_a_crashed_service_is_restarted_with_its_restart_arguments(harness: Harness) -> None:
    code = "import sys; print(sys.argv[1:], flush=True); '--resume' in sys.argv or sys.exit('boom')"
    harness.supervisor.start(python(code, on_restart=("--resume",)))
    harness.until(lambda: harness.supervisor.is_done("worker"))
    assert "['--resume']" in harness.log()
    assert harness.events == ["worker died (exit 1), restarting: boom"]
    assert harness.supervisor.accounts()[0].restarts == 1


def test_a_service_that_keeps_dying_ends_the_run_with_its_last_line(harness: Harness) -> None:
    harness.supervisor.start(python("raise SystemExit('the disk is full')"))
    with pytest.raises(
        GaveUp, match=r"worker failed 5 times in a row \(exit 1\): the disk is full"
    ) as caught:
        harness.until(lambda: False)
    assert caught.value.code == 1


def test_a_service_with_a_wrong_configuration_is_not_restarted(harness: Harness) -> None:
    harness.supervisor.start(python("import sys; print('seed=-1: no'); sys.exit(2)"))
    with pytest.raises(GaveUp, match="^seed=-1: no$") as caught:
        harness.until(lambda: False)
    assert caught.value.code == 2
    assert harness.supervisor.accounts()[0].restarts == 0


def test_a_service_that_exits_is_done(harness: Harness) -> None:
    harness.supervisor.start(python("sum(range(10**6))"))
    harness.until(lambda: harness.supervisor.is_done("worker"))
    account = harness.supervisor.accounts()[0]
    assert account.restarts == 0
    assert account.cpu_seconds > 0
    assert harness.events == []


def test_a_broker_that_was_drained_from_outside_is_restarted(harness: Harness) -> None:
    code = (
        "import signal, sys; print('up', flush=True)\n"
        "signal.sigwait({signal.SIGTERM}) if '--again' not in sys.argv else signal.pause()"
    )
    code = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})\n{code}"
    harness.supervisor.start(python(code, on_restart=("--again",), clean_exit=CleanExit.DIED))
    harness.until(lambda: harness.log() == "up\n")
    os.kill(harness.supervisor.accounts()[0].pid, signal.SIGTERM)
    harness.until(lambda: harness.log() == "up\nup\n")
    assert harness.events == ["worker died (exit 0), restarting"]
    assert harness.is_running()


def test_an_actor_that_ended_is_started_again_unless_the_run_ends(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 1)
    monkeypatch.setattr(module, "STOPPED_S", 1e6)
    harness.supervisor.start(python("", clean_exit=CleanExit.STOPPED))
    harness.until(lambda: not harness.is_running())
    assert not harness.supervisor.is_done("worker")
    monkeypatch.setattr(module, "STOPPED_S", 0.0)
    harness.supervisor.start(python("", "other", clean_exit=CleanExit.STOPPED))
    harness.until(lambda: harness.supervisor.accounts()[1].restarts == 2)
    assert harness.supervisor.accounts()[0].restarts == 0


@pytest.mark.parametrize("leaves", ["import os; os._exit(0)", "raise SystemExit"])
@pytest.mark.parametrize("clean_exit", CleanExit)
def test_an_unrequested_exit_0_is_a_failure(leaves: str, clean_exit: CleanExit, harness: Harness) -> None:
    harness.supervisor.start(python(leaves, clean_exit=clean_exit))
    with pytest.raises(GaveUp, match=r"worker failed 5 times in a row \(exit 0\): it was not asked to end"):
        harness.until(lambda: False)


SERVES = (
    "import threading; from penstock.runtime.health import Health, announce, serve_http\n"
    "health = Health('worker'); health.set_ready(True)\n"
    "announce('worker', metrics_port=serve_http(health, '127.0.0.1', 0)[1]); threading.Event().wait()"
)


def kill_when_ready(harness: Harness, *, after_progress: bool) -> None:
    """Kill the service from outside, and wait until its death is booked."""
    supervisor = harness.supervisor
    harness.until(lambda: is_ready(supervisor))
    if after_progress:
        supervisor.note_progress()
    pid, deaths = supervisor.accounts()[0].pid, len(harness.events)
    os.kill(pid, signal.SIGKILL)
    harness.until(lambda: len(harness.events) > deaths)


def test_a_kill_after_progress_is_not_counted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    harness.supervisor.start(python(SERVES))
    for _ in range(3):
        kill_when_ready(harness, after_progress=True)
    assert harness.events == ["worker died (signal 9), restarting"] * 3
    with pytest.raises(GaveUp, match=r"worker failed 2 times in a row \(signal 9\)"):
        kill_when_ready(harness, after_progress=False)


def test_a_crash_is_named_by_its_signal_and_not_by_the_last_line(harness: Harness) -> None:
    crash = "import os, signal; print('session open', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    harness.supervisor.start(python(crash))
    harness.until(lambda: bool(harness.events))
    cause = "the environment, or a library that it loads, has crashed"
    assert harness.events[0] == f"worker died (signal 11, Segmentation fault), restarting: {cause}"


HANGS = SERVES.replace(
    "threading.Event().wait()",
    "health.watch('environment', 0.2); health.expect('environment', ''); threading.Event().wait()",
)


def hang(harness: Harness, *, after_progress: bool = False) -> None:
    """Wait until the service stands still and is killed for it."""
    supervisor, deaths = harness.supervisor, len(harness.events)
    if after_progress:
        harness.until(lambda: is_ready(supervisor))
        supervisor.note_progress()

    def is_killed() -> bool:
        supervisor.check_health()
        return any("died" in event for event in harness.events[deaths:])

    harness.until(is_killed)


@pytest.fixture
def two_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deaths in a row end the run, and what is red is killed soon."""
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    monkeypatch.setattr(module, "RED_LIMIT_S", 0.1)


@pytest.mark.promise("actor-makes-environments-session")
@pytest.mark.parametrize(("role", "ends"), [("actor", False), ("broker", True)])
def test_an_actor_that_hangs_now_and_then_is_started_again_while_the_run_continues(
    harness: Harness, two_hangs: None, role: str, ends: bool
) -> None:
    harness.supervisor.start(replace(python(HANGS), role=role))
    hang(harness, after_progress=True)
    if ends:
        with pytest.raises(GaveUp, match="unhealthy: environment"):
            hang(harness, after_progress=True)
    else:
        hang(harness, after_progress=True)
        hang(harness, after_progress=True)


DELIVERS_ONCE = "import sys; metrics.FRAGMENTS_ACKED.inc('--again' not in sys.argv)"
DELIVERS_AND_HANGS = f"from penstock.runtime import metrics; metrics.FRAGMENTS_ACKED.inc()\n{HANGS}".replace(
    "'worker'", "'actor'"
)


@pytest.mark.promise("actor-makes-environments-session")
def test_an_actor_that_hangs_after_a_fragment_was_acknowledged_is_started_again(
    harness: Harness, two_hangs: None
) -> None:
    harness.supervisor.start(python(DELIVERS_AND_HANGS))
    for _ in range(3):
        hang(harness)
    assert sum("worker died" in event for event in harness.events) == 3


@pytest.mark.promise("actor-makes-environments-session")
def test_an_actor_that_hangs_before_a_fragment_is_acknowledged_ends_the_run(
    harness: Harness, two_hangs: None
) -> None:
    code = DELIVERS_AND_HANGS.replace("metrics.FRAGMENTS_ACKED.inc()", DELIVERS_ONCE)
    harness.supervisor.start(python(code, on_restart=("--again",)))
    hang(harness)
    with pytest.raises(GaveUp, match=r"worker failed 2 times in a row .*unhealthy: environment"):
        hang(harness)


def test_stop_drains_and_names_services_that_did_not_end(harness: Harness) -> None:
    harness.supervisor.start(
        python("print('up', flush=True); import threading; threading.Event().wait()", "good")
    )
    deaf = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    harness.supervisor.start(python(deaf, "deaf"))
    harness.until(lambda: "up" in harness.log("good") and harness.log("deaf").endswith("\n"))
    assert harness.supervisor.stop(["good", "deaf"], grace_s=0.5) == ["deaf"]
    harness.supervisor.kill(["deaf"])
    assert not harness.is_running("deaf")
    grandchild = int(harness.log("deaf"))
    harness.until(lambda: not is_alive(grandchild))


def test_children_see_the_launcher_die(harness: Harness) -> None:
    code = "import os; print(os.read(int(os.environ['PENSTOCK_LIFELINE_FD']), 1) == b'')"
    harness.supervisor.start(python(code))
    os.close(harness.write_fd)
    harness.write_fd = os.dup(harness.read_fd)
    harness.until(lambda: harness.supervisor.is_done("worker"))
    assert harness.log() == "True\n"


def test_endpoints_of_an_earlier_process_are_forgotten(harness: Harness) -> None:
    stale = {"role": "actor", "pid": 1, "metrics_port": 1}
    (harness.folder / "endpoints" / "worker.json").write_text(json.dumps(stale))
    harness.supervisor.start(python("import threading; threading.Event().wait()"))
    assert harness.supervisor.endpoints() == {}
    assert not is_ready(harness.supervisor)


def test_a_wake_ends_the_wait_for_a_death(harness: Harness) -> None:
    threading.Timer(0.05, harness.supervisor.wake).start()
    began = time.monotonic()
    harness.supervisor.step(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_children_inherit_no_configuration() -> None:
    assert without_configuration({"PATH": "/bin", "PENSTOCK_ALGORITHM__EPOCHS": "3"}) == {"PATH": "/bin"}


def test_children_get_settings_that_the_file_cannot_hold(harness: Harness) -> None:
    harness.supervisor.start(python("import os; print(os.environ['OF_THE_RUN'])"))
    harness.until(lambda: harness.supervisor.is_done("worker"))
    assert harness.log() == "told\n"


def test_the_last_line_is_the_last_one_that_is_not_empty(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_line(log) == ""
    log.write_text("x" * 20_000 + "\nthe cause\n\n  \n")
    assert last_line(log) == "the cause"


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_service_that_waited_in_vain_does_not_wait_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEALTHY_S", 0.0)
    harness.supervisor.start(python("raise SystemExit('redis did not answer for 60 s')"))
    with pytest.raises(GaveUp, match="redis did not answer for 60 s"):
        harness.until(lambda: False)
    assert harness.supervisor.accounts()[0].restarts == 0


def test_a_service_that_is_not_ready_is_named_with_its_last_line(harness: Harness) -> None:
    harness.supervisor.start(
        python("print('waiting for redis', flush=True); import threading; threading.Event().wait()")
    )
    harness.until(lambda: harness.log() != "")
    assert harness.supervisor.unready() == [("worker", "waiting for redis")]


def test_a_service_whose_health_stays_red_is_killed_and_restarted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RED_LIMIT_S", 0.0)
    code = (
        "import threading; from penstock.runtime.health import Health, announce, serve_http\n"
        "health = Health('worker'); health.fail('the environment hangs')\n"
        "announce('worker', metrics_port=serve_http(health, '127.0.0.1', 0)[1]); threading.Event().wait()"
    )
    harness.supervisor.start(python(code))
    harness.until(lambda: harness.supervisor.endpoints() != {})
    harness.supervisor.check_health()
    harness.supervisor.check_health()
    assert harness.events == ["worker is unhealthy (the environment hangs): killed"]
    harness.until(lambda: harness.supervisor.accounts()[0].restarts == 1)


def test_a_failed_run_is_not_restarted(harness: Harness) -> None:
    harness.supervisor.start(
        python("import sys; print('no update for 300 s: all actors are gone'); sys.exit(3)")
    )
    with pytest.raises(GaveUp, match="^no update for 300 s: all actors are gone$") as caught:
        harness.until(lambda: False)
    assert caught.value.code == 1
    assert harness.supervisor.accounts()[0].restarts == 0


def test_a_service_that_stalls_again_and_again_ends_the_run(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "RED_LIMIT_S", 0.0)
    monkeypatch.setattr(module, "HEALTHY_S", 0.0)
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    code = (
        "import os, pathlib, threading; from penstock.runtime.health import Health, announce, serve_http\n"
        "health = Health('worker'); health.set_ready(True)\n"
        "announce('worker', metrics_port=serve_http(health, '127.0.0.1', 0)[1])\n"
        f"seen = pathlib.Path('{tmp_path}') / str(os.getpid())\n"
        "while not seen.exists(): threading.Event().wait(0.01)\n"
        "health.fail('the environment hangs'); threading.Event().wait()"
    )
    harness.supervisor.start(python(code))

    def look() -> bool:
        harness.supervisor.check_health()
        service = harness.supervisor.services["worker"]
        if service.was_ready and service.process is not None:
            (tmp_path / str(service.process.pid)).touch()
        return False

    with pytest.raises(GaveUp, match=r"worker failed 2 times .*unhealthy: the environment hangs"):
        harness.until(look)


# ---- A run is watched on a terminal or through a pipe, and goes on when that is closed.


STEPS = 100


def through_a_pipe() -> tuple[int, int]:
    """Both ends of a pipe: the reader's, and the run's."""
    return os.pipe()


def on_a_terminal() -> tuple[int, int]:
    """Both ends of a terminal."""
    return pty.openpty()


@pytest.mark.parametrize("ends", [through_a_pipe, on_a_terminal])
def test_a_run_continues_when_its_page_is_closed(ends: Callable[[], tuple[int, int]]) -> None:
    reader, own = ends()
    with os.fdopen(own, "w") as stream:
        with make_view(stream, "run", {"steps": STEPS}, None) as view:
            view.event("watched")
            os.close(reader)
            for steps in range(3):
                view.event(f"unwatched {steps}")
                view.show(Progress(env_steps=steps))
        stream.write("the end")
        stream.flush()


def test_a_summary_that_nobody_reads_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, own = through_a_pipe()
    os.close(reader)
    with os.fdopen(own, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        tell(["unread"])


# ---- The launcher finds a full disk itself: no log can tell of it.


LIMITED = """
import pathlib, resource, sys
from penstock.launch.run.memory import explain
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(explain("learner: exit 3", pathlib.Path(sys.argv[1])))
"""


def test_a_folder_with_room_is_no_problem(tmp_path: Path) -> None:
    assert problem((tmp_path, tmp_path / "absent")) is None
    assert explain("learner: exit 3", tmp_path) == "learner: exit 3"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_removed_is_reported_before_the_cause(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    told = explain("learner: exit 2", gone)
    assert told == (
        f"{gone}: the run's folder was removed while the run went on; start a new run (learner: exit 2)"
    )


def test_a_full_disk_is_reported_before_the_cause(tmp_path: Path) -> None:
    reply = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert reply.stdout.strip() == (
        f"cannot write in {tmp_path}: File too large; make room, then resume (learner: exit 3)"
    )
    assert list(tmp_path.iterdir()) == []


# ---- Memory of processes, of the machine and of its GPUs, as the kernel and the driver say it.


MIB = 1024 * 1024
MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   10000000 kB\n"


def test_pages_of_files_that_several_processes_share_count_once() -> None:
    parts = [Memory(100, 30), Memory(50, 40), Memory(20, 0)]
    assert together(parts) == Memory(70 + 10 + 20 + 40, 40)
    assert together([]) == Memory()


def test_the_peak_of_a_process_stays_when_it_gives_memory_back() -> None:
    code = (
        "import sys; kept = bytearray(96 * 1024 * 1024); del kept; print('done', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"done\n"
        found = Trees().look([process.pid, os.getpid()])
        own = of_process(os.getpid())
        assert 96 * MIB < found[process.pid].peak < 200 * MIB
        # Of this process with that one, which it has started.
        assert found[os.getpid()].peak >= own.peak - own.shared + 96 * MIB
        process.stdin.close()
        process.wait()
        assert of_process(process.pid) == Memory()


CLOSED = """
import ctypes, os, signal, sys
from penstock.launch.run.memory import Trees, inherited_by
if os.geteuid() == 0:  # who may look into every process
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
reading, writing = os.pipe()
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    os.write(writing, b".")
    signal.pause()
try:
    os.read(reading, 1)
    print(inherited_by(pid), Trees().look([pid])[pid].peak > 0)
finally:
    os.kill(pid, signal.SIGKILL)
"""
"""Looks at a process of the same user that nobody may look into, such as one that had another user before."""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_DUMPABLE is Linux's")
def test_the_peak_of_a_process_is_known_without_its_shared_pages() -> None:
    told = subprocess.run([sys.executable, "-P", "-c", CLOSED], capture_output=True, text=True, check=False)
    assert told.stdout == "0 True\n", told.stderr


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 10_000_000 * 1024),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 10_000_000 * 1024),
        ({"memory.max": "2000000\n", "memory.current": "500000\n"}, 1_500_000),
        ({"memory.max": "100\n", "memory.current": "101\n"}, 0),
        ({"memory/memory.limit_in_bytes": "4000\n", "memory/memory.usage_in_bytes": "1000\n"}, 3000),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1\n"},
         10_000_000 * 1024),
    ],
)  # fmt: skip
def test_available_memory_is_the_least_of_machine_and_container(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert available(tmp_path) == expected


def test_gpu_memory_is_summed_and_unknown_when_one_gpu_does_not_report() -> None:
    assert parse_device_memory("100, 24564\n20, 24564\n") == (120 * MIB, 49128 * MIB)
    assert parse_device_memory("[N/A], [N/A]\n") is None
    assert parse_device_memory("") is None
