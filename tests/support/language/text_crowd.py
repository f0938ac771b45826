"""Many agents at once by the text client, in one process, as unruly as those of `agents`.

python -m tests.support.language.text_crowd ADDRESS SEED AT_ONCE THINKS_S      until it is killed
"""

import asyncio
import random
import sys
import uuid
from typing import Any, Final

from penstock.client import AsyncTextClient, PolicyError
from tests.support.language.agents import COLOURS, TOOL

PAUSE_S: Final = 0.2
"""After a conversation that was cut off: who comes again at once keeps a server that starts from starting."""


async def converse(client: AsyncTextClient, chance: random.Random, thinks_s: float) -> None:
    """One conversation, whose agent thinks before each turn; raises PolicyError."""
    conversation = await client.start_conversation(name=uuid.uuid4().hex)
    messages: list[dict[str, Any]] = []
    for turn in range(chance.randint(2, 5)):
        if not messages or messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": "colour"})
        if chance.random() < 0.05:
            messages[0] = {"role": "user", "content": chance.choice(("hello", "more"))}
        await asyncio.sleep(thinks_s)
        given = await conversation.generate(messages, tools=[TOOL])
        if chance.random() < 0.1:
            given = await conversation.generate(messages, tools=[TOOL], regenerate=chance.random() < 0.5)
        said = given.answers[0].message
        messages.append(said)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": chance.choice(COLOURS)}
            for call in said.get("tool_calls", ())
        ]
        for _ in range(chance.randint(0, 2)):
            amount = float("tool_calls" in said)
            await conversation.rewards([(turn, amount)], request_id=f"reward-{turn}")
    if chance.random() < 0.9:
        await conversation.end()


async def converse_on(client: AsyncTextClient, chance: random.Random, thinks_s: float) -> None:
    """For ever."""
    while True:
        try:
            await converse(client, chance, thinks_s)
        except PolicyError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            await asyncio.sleep(PAUSE_S)


async def main(address: str, seed: str, at_once: str, thinks_s: str) -> None:
    """All of them beside one another."""
    seeds = random.Random(int(seed))
    async with AsyncTextClient(address) as client:
        chances = [random.Random(seeds.random()) for _ in range(int(at_once))]
        await asyncio.gather(*(converse_on(client, chance, float(thinks_s)) for chance in chances))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
