"""What a caller says becomes a request, or an error that names the field and the value."""

import re
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import pytest

from penstock.client import PolicyClient, TextClient, calls, text_calls
from penstock.client.values import ActOptions, Description
from penstock.protocol.spaces import Box, Discrete

HALF: Final = "a\ud83d"
"""A text that was cut in the middle of a pair of surrogates, as JSON lets it through."""


def codec() -> calls.Codec:
    """Of a policy of one observation and two choices."""
    described = Description(
        run="r", policy="p", observation_space=Box(low=-np.ones(1, np.float32), high=np.ones(1, np.float32)),
        action_space=Discrete(2), versions=(), max_batch=1, max_message_bytes=1, max_episodes=1,
        reward_window_ms=1, episode_timeout_ms=1, server="s", learns=True,
    )  # fmt: skip
    return calls.Codec("p", described)


def act(**options: Any) -> object:
    """The request for one action."""
    return codec().act(np.zeros(1, np.float32), cast(ActOptions, options))


SAID: Final[dict[str, Callable[[], object]]] = {
    "policy": lambda: PolicyClient("127.0.0.1:1", policy=HALF),
    "policy of text": lambda: TextClient("127.0.0.1:1", policy=HALF),
    "address": lambda: PolicyClient(f"{HALF}:1"),
    "address of a socket": lambda: PolicyClient(f"unix:/tmp/{HALF}"),
    "client_key": lambda: calls.start("p", HALF, learned=True),
    "client_key of one action": lambda: act(client_key=HALF),
    "state": lambda: act(state={HALF: np.zeros(1)}),
    "client_key of a conversation": lambda: text_calls.start("p", HALF, {}),
    "name": lambda: text_calls.start("p", "", {"name": HALF}),
    "messages[1]": lambda: text_calls.generate(
        "p", [{"role": "user", "content": "a"}, {"role": "user", "content": HALF}], {}
    ),
    "stop": lambda: text_calls.generate("p", [], {"stop": ["a", HALF]}),
    "begins_with": lambda: text_calls.generate("p", [], {"begins_with": HALF}),
    "request_id": lambda: text_calls.reward("c", [], HALF),
}


@pytest.mark.parametrize(("name", "call"), SAID.items(), ids=SAID.keys())
def test_what_is_no_text_is_told_by_its_field(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(name.partition(' ')[0])}[=:]") as told:
        call()
    assert not isinstance(told.value, UnicodeEncodeError)
    assert r"\ud83d" in str(told.value)


def test_text_of_any_alphabet_is_sent() -> None:
    assert calls.start("p", "Ünï 😀", learned=True).request.client_key == "Ünï 😀"
