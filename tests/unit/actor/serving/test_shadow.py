"""A shadow costs its client nothing, and says what it cost the server."""

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.actor.serving import batcher
from penstock.actor.serving import shadow as shadow_module
from penstock.runtime import metrics
from tests.support.serving.server_parts import Stand, rows_of, seen
from tests.unit.actor.serving.test_loaded_versions import arms

PATIENCE_S = 30.0


async def shadowed(**serving: Any) -> Stand:
    """Version 1 answers, version 2 is its shadow."""
    stand = Stand(**serving)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    return stand


class Slow:
    """The shadow's pass as it stands still, and who makes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.passes: list[tuple[int, int]] = []
        original = batcher.answer

        def answer(loaded: Any, questions: Any) -> Any:
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            self.passes.append((len(questions), niceness))
            self.has_begun.set()
            assert self.may_go_on.wait(PATIENCE_S)
            return original(loaded, questions)

        monkeypatch.setattr(shadow_module, "answer", answer)


@pytest.mark.promise("shadow-delays-answer-asked")
async def test_clients_are_answered_while_the_shadow_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    await stand.answer(stand.asking(seen(0)), 1e12)
    assert await asyncio.to_thread(slow.has_begun.wait, PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(stand.answer(stand.asking(seen(step)), 1e12) for step in range(20)))
        await stand.play(stand.start(), 5)
    assert [count for count, _ in slow.passes] == [1]
    slow.may_go_on.set()
    await stand.handler.shadow.finish()
    assert [count for count, _ in slow.passes] == [1, 25]
    if sys.platform == "linux":
        assert {niceness for _, niceness in slow.passes} == {19}
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


@pytest.mark.promise("shadow-delays-answer-asked")
async def test_the_shadow_is_asked_after_the_reply_and_after_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    slow.may_go_on.set()
    monkeypatch.setattr(shadow_module, "GRACE_S", 1e6)
    shadow = stand.handler.shadow
    await stand.answer(stand.asking(seen(0)), 1e12)
    assert shadow._running is None
    stand.batcher._rows = 1  # somebody waits
    shadow._grace_is_over()
    assert shadow._running is None
    stand.batcher._rows = 0
    shadow._grace_is_over()
    await shadow.finish()
    assert len(slow.passes) == 1


async def test_what_there_is_no_time_for_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    monkeypatch.setattr(shadow_module, "MAX_ROWS", 10)
    await stand.answer(stand.asking(seen(0)), 1e12)
    assert await asyncio.to_thread(slow.has_begun.wait, PATIENCE_S)
    before = metrics.SHADOW_SHED._value.get()
    for step in range(25):
        await stand.answer(stand.asking(seen(step)), 1e12)
    assert metrics.SHADOW_SHED._value.get() - before == 15
    slow.may_go_on.set()
    await stand.handler.shadow.finish()
    assert [count for count, _ in slow.passes] == [1, 10]


@pytest.mark.promise("shadow-delays-answer-asked")
async def test_what_the_shadow_costs_is_counted() -> None:
    stand, before = await shadowed(), metrics.SHADOW_SECONDS._value.get()
    await stand.answer(stand.asking(rows_of(1)["observation"][0]), 1e12)
    await stand.handler.shadow.finish()
    assert 0 < metrics.SHADOW_SECONDS._value.get() - before < PATIENCE_S


async def test_a_server_that_ends_waits_for_the_pass_under_way_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    for _ in range(2):
        await stand.answer(stand.asking(seen(0)), 1e12)
    slow.may_go_on.set()
    stand.handler.shadow.close()
    await asyncio.sleep(0)
    assert slow.passes == []
