"""Agents as their authors write them: scripts that know the package `openai` alone, and post rewards.

    python -m tests.support.language.agents TASK BASE_URL CONVERSATIONS SEED [AT_ONCE [THINKS_S]]

prints what each conversation earned, nan where it was cut off. THINKS_S: before each.

lookup          what colour is it? The tool tells; nothing else does, so that a guess is right half the time
guess           the same without the tool
opening         three turns; the third earns 1 where the first was `please`
opening-apart   the same, of which each turn is a conversation of its own
unruly          the tool again and again; messages are repeated and edited, answers asked for anew, rewards
                posted twice, late, or never
"""

import math
import random
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final

import openai

COLOURS: Final = ("red", "blue")
TOOL: Final = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
AT_ONCE: Final = "8"


def lookup(client: Any, chance: random.Random, *, tools: bool = True) -> float:
    """One question; 1 for the right colour."""
    name, colour = uuid.uuid4().hex, chance.choice(COLOURS)
    messages: list[Any] = [{"role": "user", "content": "colour"}]
    said = ask(client, messages, name, tools=tools)
    if said.tool_calls:
        messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": colour})
        said = ask(client, messages, name, tools=tools)
    earned = float((said.content or "").split() == [colour])
    post(client, conversation_id=name, reward=earned, final=True)
    return earned


def opening(client: Any, _chance: random.Random, *, apart: bool = False) -> float:
    """Three turns; only the first decides, and only the third is rewarded."""
    messages, names, first = list[Any](), [uuid.uuid4().hex] * 3, ""
    if apart:
        names = [uuid.uuid4().hex for _ in names]
    for turn, word in enumerate(("hello", "more", "more")):
        messages.append({"role": "user", "content": word})
        said = ask(client, messages, names[turn])
        first = first or said.content or "nothing"
        if apart and turn < 2:
            post(client, conversation_id=names[turn], reward=0.0, final=True)
    earned = float(first.split() == ["please"])
    post(client, conversation_id=names[2], reward=earned, final=True)
    return earned


def unruly(client: Any, chance: random.Random) -> float:
    """Some turns, of which the client makes what it likes; the share that call the tool."""
    name, messages, called, turns = uuid.uuid4().hex, list[Any](), 0, chance.randint(2, 4)
    for turn in range(turns):
        if not messages or messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": "colour"})
        if chance.random() < 0.1:
            messages[0] = {"role": "user", "content": chance.choice(("hello", "more"))}
        before = list(messages)
        said = ask(client, messages, name, tools=True)
        if chance.random() < 0.2:
            messages = before
            said = ask(client, messages, name, tools=True, regenerate=chance.random() < 0.5)
        called += bool(said.tool_calls)
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": chance.choice(COLOURS)})
        for _ in range(chance.randint(0, 2)):
            post(client, conversation_id=name, reward=float(bool(said.tool_calls)), id=f"reward-{turn}")
    if chance.random() < 0.8:
        post(client, conversation_id=name, final=True)
        if chance.random() < 0.1:
            post(client, conversation_id=name, reward=1.0, turn=0, id="late")
    return called / turns


TASKS: Final[dict[str, Callable[[Any, random.Random], float]]] = {
    "lookup": lookup,
    "guess": lambda client, chance: lookup(client, chance, tools=False),
    "opening": opening,
    "opening-apart": lambda client, chance: opening(client, chance, apart=True),
    "unruly": unruly,
}


def ask(client: Any, messages: list[Any], name: str, *, tools: bool = False, regenerate: bool = False) -> Any:
    """The assistant's message, which joins the others."""
    made = client.chat.completions.create(
        model="default",
        messages=messages,
        tools=[TOOL] if tools else openai.omit,
        metadata={"conversation_id": name},
        extra_body={"penstock": {"regenerate": True}} if regenerate else None,
    )
    said = made.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    return said


def post(client: Any, **body: Any) -> None:
    """A reward."""
    client.post("/rewards", body=body, cast_to=object)


def _tried(task: str, client: Any, chance: random.Random, thinks_s: float) -> float:
    time.sleep(thinks_s)
    try:
        return TASKS[task](client, chance)
    except openai.APIError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return math.nan


def main(
    task: str, base_url: str, conversations: str, seed: str, at_once: str = AT_ONCE, thinks_s: str = "0"
) -> None:
    """Have so many conversations, some at a time."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=30)
    seeds = random.Random(int(seed))
    with ThreadPoolExecutor(int(at_once)) as pool:
        left = int(conversations)
        while left > 0:
            count = min(left, 4 * int(at_once))
            chances = [random.Random(seeds.random()) for _ in range(count)]
            for done in as_completed(
                [pool.submit(_tried, task, client, chance, float(thinks_s)) for chance in chances]
            ):
                sys.stdout.write(f"{done.result()}\n")
                sys.stdout.flush()
            left -= count


if __name__ == "__main__":
    main(*sys.argv[1:])
