"""A thread gives way, and its process does not."""

import os
import sys
import threading

import pytest

from penstock.runtime.lifecycle import giving_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a niceness for each thread is Linux's")


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_gives_way_and_who_waits_for_it_does_not() -> None:
    before = _niceness()
    assert giving_way(_niceness, 3) == min(before + 3, 19)
    assert _niceness() == before


def test_what_the_work_raises_is_raised() -> None:
    def fails() -> None:
        raise ImportError("no such part")

    with pytest.raises(ImportError, match="no such part"):
        giving_way(fails, 1)
