"""Versions are swapped while answers grow: no answer is made of two, and none fails."""

import asyncio

import pytest
import torch

from penstock.protocol.refusal import Refused
from penstock.workloads.language.serving.text_request import TextReply, TextRequest
from tests.support.language.text_stand import FAR, TOOLS, TextStand, adapter, plain_log_prob, user

FAR_APART = 0.2
"""Noise by which adapters differ, so that the wrong one gives other log-probabilities."""


async def answers(stand: TextStand, over: asyncio.Event) -> list[TextReply]:
    """One stream of requests, one behind the other, until it is over."""
    found = []
    while not over.is_set():
        found.append(await stand.say("", user(), max_tokens=20))
    return found


def difference(stand: TextStand, reply: TextReply, version: int) -> float:
    """The largest between the log-probabilities of a reply and those of a version that is loaded."""
    (answer,) = reply.answers
    prompt = stand.conversations._encoder.begin([user()], TOOLS)
    alone = plain_log_prob(stand.engine, version, [*prompt, *answer.ids], len(prompt))
    return max(abs(one - other) for one, other in zip(answer.log_prob, alone, strict=True))


@pytest.mark.promise("versions-swapped-answers-grow")
@pytest.mark.parametrize(
    ("swaps", "streams"),
    [(12, 8), pytest.param(200, 32, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["few", "many"],
)
async def test_swaps_of_versions_under_streams_mix_no_answer(
    stand: TextStand, swaps: int, streams: int
) -> None:
    blobs = {version: adapter(stand.base, version, size=FAR_APART) for version in range(2, swaps + 2)}
    over = asyncio.Event()
    tasks = [asyncio.create_task(answers(stand, over)) for _ in range(streams)]
    for version, blob in blobs.items():
        await stand.publish(version, blob)
    over.set()
    replies = [reply for found in await asyncio.gather(*tasks) for reply in found]
    assert len(replies) >= streams
    assert not any(reply.is_fallback for reply in replies)
    by_version = {reply.version: reply for reply in replies}
    assert len(by_version) > 2
    for version, reply in by_version.items():
        stand.engine.load(version, stand.weights[version].blob)
        assert difference(stand, reply, version) < 1e-3
        stand.engine.drop(version)
    newest = max(by_version)
    stand.engine.load(newest, stand.weights[newest].blob)
    assert difference(stand, by_version[min(by_version)], newest) > 0.01


async def test_no_other_version_goes_on_behind_a_part_that_was_sent(stand: TextStand) -> None:
    shown = list[str]()

    def show(_: int, part: str) -> None:
        shown.append(part)
        engine = stand.engine
        with engine._before_next_step(), torch.no_grad(), engine._loaded.using(1) as network:
            for name, parameter in network.named_parameters():
                if "lora_" in name:
                    parameter.fill_(torch.nan)

    ask = TextRequest(messages=(user(),), conversation_id=stand.start())
    with pytest.raises(Refused, match="the version failed behind the part that was sent"):
        await stand.conversations.generate(ask, FAR, show)
    assert shown
    reply = await stand.say("", user(), temperature=0.0)
    assert reply.is_fallback, "where nothing was sent, the model without its adapter answers"
