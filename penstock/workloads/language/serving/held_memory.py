"""What conversations take in memory.

Objects count, because an empty one has two bytes on the wire and takes hundreds. The figures are CPython's,
rounded up; they bound what is held and need not be exact.
"""

import sys
from collections.abc import Iterable
from typing import Any, Final

from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.asks import Ask, TextAnswer

ID_BYTES: Final = 48
"""A token id in a tuple."""
SAMPLED_BYTES: Final = 256
"""A token with its log-probability and its text, as it was answered."""
TURN_BYTES: Final = 256
_OBJECT_BYTES: Final = 96


def of_ask(ask: Ask) -> int:
    """Bytes of what was asked."""
    texts = [*ask.stop, ask.begins_with, ask.client_key]
    return (
        sum(map(of_message, ask.messages))
        + _of_values(ask.tools)
        + sum(map(sys.getsizeof, texts))
        + _OBJECT_BYTES * (1 + len(ask.logit_bias))
    )


def of_answer(answer: TextAnswer) -> int:
    """Bytes of what was answered, and thought before it."""
    size = SAMPLED_BYTES * len(answer.ids) + of_message(answer.message) + ID_BYTES * len(answer.before)
    if answer.thought is not None:
        size += ID_BYTES * len(answer.thought.ids) + sys.getsizeof(answer.thought.text)
    return size


def of_message(message: Message) -> int:
    """Bytes of one message."""
    texts = [message.role, message.content, message.tool_call_id]
    texts += [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    return _OBJECT_BYTES * (1 + len(message.tool_calls)) + sum(map(sys.getsizeof, texts))


def _of_values(values: Iterable[Any]) -> int:
    """Bytes of what JSON holds, without recursion, because it may be deep."""
    size, waiting = 0, list(values)
    while waiting:
        value = waiting.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return size
