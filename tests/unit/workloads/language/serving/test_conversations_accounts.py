"""Whatever clients do, each token that was sampled is learned from or counted with a reason, once."""

import asyncio
import random
from typing import Any

import pytest

from penstock.protocol.fragment import read_payload
from penstock.protocol.refusal import Refused
from penstock.runtime import metrics
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.conversations import REASONS
from penstock.workloads.language.serving.text_request import TextReply, TextRequest
from tests.support.language.text_stand import FAR, TextStand, tool, user

SAMPLED_OTHERWISE: tuple[dict[str, Any], ...] = ({}, {}, {}, {"seed": 3}, {"count": 2}, {"not_learned": True})


class Client:
    """A client that repeats itself, edits its history, goes away, and rewards twice, late or never."""

    def __init__(self, stand: TextStand, chance: random.Random) -> None:
        self._stand, self._chance = stand, chance
        self.replies: list[TextReply] = []
        self.earned = 0.0

    async def converse(self, number: int) -> None:
        """One conversation, with an end or without."""
        conversation, messages = self._stand.start(f"c-{number}"), [user()]
        for _ in range(self._chance.randint(1, 4)):
            await self._ask(conversation, messages)
            if self._chance.random() < 0.5:
                await self._reward(conversation)
            if self._chance.random() < 0.2:
                messages[-2 if len(messages) > 1 else 0] = Message("user", "other")
        if self._chance.random() < 0.6:
            is_over = self._chance.random() < 0.7
            self._stand.conversations.end(
                conversation, "e", terminated=is_over, abandoned=not is_over, reward=None
            )

    async def _ask(self, conversation: str, messages: list[Message]) -> None:
        try:
            fields = self._chance.choice(SAMPLED_OTHERWISE)
            reply = await self._stand.say(conversation, *messages, **fields)
            self._note(reply)
            for again in range(self._chance.randint(0, 2)):
                asked = {"regenerate": True} if again else {}
                self._note(reply := await self._stand.say(conversation, *messages, **fields, **asked))
        except Refused:
            messages[:] = [user()]  # No room is left, or what was edited cannot be answered.
            return
        answer = self._chance.choice(reply.answers).message
        follows = tool("3", answer.tool_calls[0]) if answer.tool_calls else user()
        messages += [answer, follows]

    def _note(self, reply: TextReply) -> None:
        if not any(reply is one for one in self.replies):
            self.replies.append(reply)

    async def _reward(self, conversation: str) -> None:
        for _ in range(self._chance.randint(1, 2)):
            await self._stand.conversations.reward(conversation, "r", [(None, 1.0)])

    @property
    def sampled(self) -> int:
        """Tokens of all answers, each once."""
        return sum(len(one.ids) for reply in self.replies for one in reply.answers)


def not_learned() -> dict[str, float]:
    """Tokens by reason, so far in this process."""
    return {reason: metrics.NOT_LEARNED_STEPS.labels(reason)._value.get() for reason in REASONS}


@pytest.mark.promise("token-server-sampled-conversation")
@pytest.mark.parametrize("seed", range(3))
async def test_each_sampled_token_is_learned_from_or_counted(stand: TextStand, seed: int) -> None:
    before, chance = not_learned(), random.Random(seed)
    client, learned = Client(stand, chance), 0
    for number in range(12):
        await client.converse(number)
        if chance.random() < 0.3:
            await stand.publish(number + 2)
        if chance.random() < 0.3:
            stand.now_s += stand.section.episode_timeout_s + 1
            stand.conversations.sweep()
    await stand_over(stand)
    for fragment in stand.fragments():
        learned += int(read_payload(fragment.header, fragment.payload)["valid"].sum())
    counted = {reason: count - before[reason] for reason, count in not_learned().items()}
    assert learned > 0
    assert counted["sibling"] > 0
    assert counted["abandoned"] > 0
    assert learned + sum(counted.values()) == client.sampled, counted


async def test_a_client_that_dies_while_its_answer_grows_is_counted(stand: TextStand) -> None:
    before, conversation = not_learned()["stopped"], stand.start()
    ask = TextRequest(messages=(user(),), conversation_id=conversation, max_tokens=30)
    task = asyncio.ensure_future(stand.conversations.generate(ask, FAR, lambda _index, _part: _cancel(task)))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not_learned()["stopped"] > before
    assert (await stand.say(conversation, user())).turn == 0


async def stand_over(stand: TextStand) -> None:
    """The end of the server: what is open is given up."""
    stand.conversations.finish()
    assert not stand.conversations._talks
    assert stand.conversations._held.used == 0


def _cancel(task: "asyncio.Future[TextReply]") -> None:
    task.cancel()
