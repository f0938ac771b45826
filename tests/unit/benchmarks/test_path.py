import os
import subprocess
import sys

import pytest

from benchmarks.path import Shape, Transfer, compared
from benchmarks.stand import cpu_seconds
from penstock.protocol.fragment import check
from penstock.protocol.limits import KIB


def transfer(megabytes_per_second: float) -> Transfer:
    """A transfer at this rate: its clock is turned, not waited for."""
    done = Transfer()
    done.add(1, 10)
    done._first_s = 1.0
    done.add(4, round(megabytes_per_second * 1e6))
    done._last_s = 2.0
    return done


def test_what_came_first_is_in_no_rate() -> None:
    done = transfer(100)
    assert (100, 5) == (done.megabytes_per_second, done.entries)


def test_a_first_arrival_alone_has_no_rate() -> None:
    done = Transfer(processes={"reader": os.getpid()})
    done.add(1, 10)
    done.finish()
    assert (0.0, {}) == (done.megabytes_per_second, done.cpu_seconds_per_gb)


def test_cpu_seconds_are_told_of_a_process_that_has_ended() -> None:
    body = "import time\nopen('/proc/self/comm', 'w').write('a) b (c')\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen([sys.executable, "-c", body]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        spent = cpu_seconds(process.pid)
    assert spent >= 0.25


def test_the_better_packer_is_the_yardstick() -> None:
    plain = {
        "hiredis": [transfer(100), transfer(100), transfer(200)],
        "python": [transfer(90), transfer(90), transfer(900)],
    }
    packer, ratio = compared([transfer(50), transfer(30), transfer(40)], plain)
    assert packer == "hiredis"
    assert ratio == pytest.approx(0.3)


@pytest.mark.parametrize(("size", "steps", "slots"), [(2 * KIB, 8, 8), (64 * KIB, 16, 8), (512 * KIB, 16, 8)])
def test_a_made_up_fragment_conforms_and_nearly_fills_its_size(size: int, steps: int, slots: int) -> None:
    shape = Shape.of(size, steps, slots)
    fragment = shape.template(session=1)
    check(fragment, shape.schema, "bench")
    assert len(fragment.payload) == shape.fragment_bytes
    assert 0.85 * size < len(fragment.payload) <= size
