"""The garbage collector looks seldom while a process starts, and as usual once it is ready."""

import gc
from collections.abc import Iterator

import pytest

from penstock.runtime.collector import MANY_OBJECTS, look_as_usual, look_seldom
from penstock.runtime.health import Health

USUAL = gc.get_threshold()


@pytest.fixture(autouse=True)
def _as_usual() -> Iterator[None]:
    yield
    look_as_usual()


def test_a_start_is_over_when_the_process_is_ready() -> None:
    health = Health("broker")
    look_seldom()
    health.set_ready(False, "waits for redis")
    assert gc.get_threshold() == (MANY_OBJECTS, *USUAL[1:])
    health.set_ready(True)
    assert gc.get_threshold() == USUAL
