"""How content people are with a version, by HTTP, on each kind of database."""

from typing import Any

import pytest

from penstock.gateway.routes.satisfaction_routes import LEAST
from tests.support.gateway.small_gateway import SmallGateway

GIVE = "/api/policies/feedback/my_agent"
TELL = "/api/projects/alpha/agents/my_agent/conversations"
ASK = "/api/projects/alpha/agents/my_agent/satisfaction"


@pytest.fixture
def editor(small_gateway: SmallGateway) -> dict[str, str]:
    """The header of a program of `alpha`."""
    return small_gateway.token("alpha")


def told(gateway: SmallGateway, caller: dict[str, str], version: int, first: int, last: int) -> int:
    """How many conversations were new of those with the numbers from `first` to `last`."""
    names = [f"c{number}" for number in range(first, last)]
    body = {"version": version, "conversations": names}
    reply = gateway.client.post(TELL, json=body, headers=caller)
    assert reply.status_code == 201, reply.text
    return int(reply.json()["stored"])


def rate(gateway: SmallGateway, caller: dict[str, str], score: float, **of: Any) -> None:
    """One rating."""
    body = {"prompt": "a", "response": "b", "score": score} | of
    assert gateway.client.post(GIVE, json=body, headers=caller).status_code == 200


def asked(gateway: SmallGateway, caller: dict[str, str], query: str = "") -> list[dict[str, Any]]:
    """What is said of each version."""
    found = gateway.get(f"{ASK}{query}", caller).json()
    assert found["leastConversations"] == LEAST
    return list(found["versions"])


def test_thumbs_up_are_counted_among_all_conversations(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    assert told(small_gateway, editor, 7, 0, 40) == 40
    assert told(small_gateway, editor, 7, 30, 50) == 10
    for number in range(10):
        rate(small_gateway, editor, 0.0, version=7, conversation=f"c{number}")
        rate(small_gateway, editor, 1.0, version=7, conversation=f"c{number}")
    rate(small_gateway, editor, 0.5, version=7, conversation="c10")
    rate(small_gateway, editor, 1.0, version=7, conversation="c11", key="tone")
    rate(small_gateway, editor, 1.0, conversation="c12")
    (found,) = asked(small_gateway, editor)
    assert (found["conversations"], found["rated"], found["thumbsUp"]) == (50, 11, 10)
    assert (found["ratingRate"], found["satisfaction"]) == (11 / 50, 10 / 50)
    # Wilson's interval of 10 in 50, worked out by hand.
    assert (found["low"], found["high"]) == pytest.approx((0.112438, 0.330373), abs=1e-5)
    (tone,) = asked(small_gateway, editor, "?key=tone")
    assert (tone["rated"], tone["thumbsUp"]) == (1, 1)


def test_too_little_is_said_to_be_too_little(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    told(small_gateway, editor, 7, 0, LEAST - 1)
    rate(small_gateway, editor, 1.0, version=7, conversation="c0")
    for _ in range(LEAST):
        rate(small_gateway, editor, 1.0, version=8)
    newest, before = asked(small_gateway, editor)
    assert [one["verdict"] for one in (newest, before)] == ["cannot tell", "cannot tell"]
    assert (newest["satisfaction"], newest["rated"], newest["ratingRate"]) == (None, LEAST, None)
    assert (before["satisfaction"], before["conversations"]) == (None, LEAST - 1)
    assert told(small_gateway, editor, 7, LEAST - 1, LEAST) == 1
    assert asked(small_gateway, editor)[1]["verdict"] == "told"


def test_conversations_of_others_are_none_of_ours(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    told(small_gateway, editor, 7, 0, 3)
    stranger = small_gateway.token("beta")
    assert small_gateway.get(ASK, stranger).status_code == 404
    assert small_gateway.get(ASK.replace("my_agent", "other"), editor).json()["versions"] == []
    for wrong, field in (
        ({"version": 0, "conversations": ["a"]}, "version"),
        ({"version": 7, "conversations": []}, "conversations"),
        ({"version": 7, "conversations": ["x" * 129]}, "conversations.0"),
        ({"version": 7, "conversations": ["x"] * 1001}, "conversations"),
    ):
        reply = small_gateway.client.post(TELL, json=wrong, headers=editor)
        assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
