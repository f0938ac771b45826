"""Memory of processes, of the machine and of its GPUs, as the kernel and the driver say it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launch.run.memory import Memory, Trees, available, of_process, parse_device_memory, together

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
def test_of_a_process_that_shows_nobody_what_it_shares_the_peak_is_known() -> None:
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
def test_the_least_of_machine_and_container_is_available(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert available(tmp_path) == expected


def test_memory_of_all_gpus_is_added_and_one_that_does_not_say_is_not_known() -> None:
    assert parse_device_memory("100, 24564\n20, 24564\n") == (120 * MIB, 49128 * MIB)
    assert parse_device_memory("[N/A], [N/A]\n") is None
    assert parse_device_memory("") is None
