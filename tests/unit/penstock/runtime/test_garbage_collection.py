"""The garbage collector looks seldom while a process starts, and as usual once it is ready."""

import gc
from collections.abc import Iterator

import pytest

from penstock.runtime.health import MANY_OBJECTS, Health, collect_seldom, leave_out_what_stays

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_start_is_over_when_the_process_is_ready() -> None:
    health = Health("broker")
    collect_seldom()
    health.set_ready(False, "waits for redis")
    assert gc.get_threshold() == (MANY_OBJECTS, *USUAL[1:])
    health.set_ready(True)
    assert gc.get_threshold() == USUAL


def test_what_somebody_else_has_set_stays() -> None:
    gc.set_threshold(1_234, 5, 6)
    Health("actor").set_ready(True)
    assert gc.get_threshold() == (1_234, 5, 6)


def test_what_stays_is_looked_at_no_more() -> None:
    before = gc.get_freeze_count()
    try:
        leave_out_what_stays()
        assert gc.get_freeze_count() > before
        assert not gc.get_objects()[1000:]
    finally:
        gc.unfreeze()
