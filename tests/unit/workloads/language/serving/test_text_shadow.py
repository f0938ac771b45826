"""A shadow of text: what it says is on record and in no reply, and no client waits for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.records import Traffic
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics
from tests.support.language.text_stand import TOOLS, TextStand, adapter, running, user
from workloads.language.engine.requests import Request
from workloads.language.serving import text_shadow
from workloads.language.serving.text_shadow import Compared, TextShadow
from workloads.plugin.serving import ShadowRecord, Weights


async def shadowed(stand: TextStand, version: int, blob: bytes) -> None:
    """Have this version asked of all answers."""
    stand.weights[version] = Weights(version, version - 1, blob)
    traffic = Traffic(policy="default", latest_share=1.0, shadow=version)
    arms = Arms(traffic=traffic, active=None, canary=None, pinned=frozenset({version}))
    assert await stand.versions.steer(arms) == []


def agreements() -> float:
    """How many answers a shadow was asked of."""
    (summary,) = metrics.SHADOW_AGREEMENT.collect()
    (count,) = [one.value for one in summary.samples if one.name.endswith("_count")]
    return float(count)


def lines(path: Path) -> list[dict[str, Any]]:
    """Of the record."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compared(shadow: int) -> Compared:
    """An answer of one token that this version is asked of."""
    return Compared(
        shadow=shadow,
        conversation="",
        request_id="",
        version=1,
        arm=Arm.LATEST,
        ids=(4, 8, 2),
        log_prob=(-1.0,),
    )


async def test_a_shadow_says_how_likely_it_finds_each_answer(dialogue: Path, tmp_path: Path) -> None:
    """Its log-probabilities are those of the plain pass under its version; the reply is of the other one."""
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    async with running(TextStand(dialogue, record=record)) as stand:
        await shadowed(stand, 2, adapter(dialogue, 2, size=0.2))
        before = agreements()
        replies = [
            await stand.say(stand.start(), user()),
            await stand.say("", user(), request_id="r", count=2),
        ]
        await stand.shadow.finish()
        assert agreements() == before + 3
        stand.shadow.close()
    assert [one.version for one in replies] == [1, 1]
    written = lines(tmp_path / "shadow.jsonl")
    assert [one["request_id"] for one in written] == ["", "r", "r"]
    assert written[0]["conversation"]
    prompt = stand.conversations._encoder.begin([user()], TOOLS)
    answers = [answer for reply in replies for answer in reply.answers]
    for one, answer in zip(written, answers, strict=True):
        told = stand.engine.log_prob(2, [*prompt, *answer.ids], len(prompt))
        assert one["shadow"] == {"version": 2, "log_prob": pytest.approx(told)}
        assert one["answered"] == {"version": 1, "arm": "latest", "log_prob": pytest.approx(answer.log_prob)}
        assert told != pytest.approx(answer.log_prob, abs=1e-3)


async def test_while_clients_are_answered_the_shadow_is_not_asked(dialogue: Path) -> None:
    """Neither while one waits nor while an answer grows; then it is."""
    stand = TextStand(dialogue)
    await stand.publish(1)
    before = agreements()
    stand.shadow.compare(compared(shadow=1))
    answer = stand.engine.submit(Request(ids=(4, 8), most=3, version=1))
    for _ in range(2):
        stand.shadow.sweep()
        assert stand.shadow._running is None
        assert not answer.finish
        stand.engine.step()
    assert agreements() == before
    while not answer.finish:
        stand.engine.step()
    stand.shadow.sweep()
    await stand.shadow.finish()
    assert agreements() == before + 1


async def test_what_there_is_no_room_for_is_left_out(
    stand: TextStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counted; a version that cannot be asked costs no caller anything."""
    monkeypatch.setattr(text_shadow, "MAX_TOKENS", 8)
    shadow, before = TextShadow(stand.engine, None), metrics.SHADOW_SHED._value.get()
    one = compared(shadow=99)
    for _ in range(3):
        shadow.compare(one)
    assert metrics.SHADOW_SHED._value.get() == before + 1
    asked = agreements()
    await shadow.finish()
    assert agreements() == asked + 2
    shadow.compare(one)
    await shadow.finish()
    assert agreements() == asked + 3
