"""The gateway is killed while somebody rates: what was acknowledged is there, once."""

from pathlib import Path

import pytest

from penstock.registry.registry import Registry
from tests.support.chat.chat_gateway import ChatGateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_no_rating_is_lost_or_doubled(tmp_path: Path) -> None:
    """The next gateway finds the run; earlier conversations are unknown to it, their ratings are not."""
    first = ChatGateway(tmp_path)
    with first:
        talk = first.begin()
        _, _, data = talk.say("hello")
        talk.tell("thumb", data["turn"], up=True, id="the-only-thumb")
        first.kill()
    with ChatGateway(tmp_path) as second:
        second.me = first.me
        again = {"id": "the-only-thumb", "turn": data["turn"], "up": True, **talk.named}
        refused = second.session.post(f"{second.url}/api/chat/thumb", json=again, timeout=60)
        assert (refused.status_code, refused.json()["field"]) == (404, "conversation")
        talk = second.begin()
        talk.say("hello")
        seen = second.get("/api/chat/overview")["versions"]
        assert sum(one["conversations"] for one in seen) == 2
        assert sum(one["rated"] for one in seen) == 1
        with Registry.read(f"sqlite:///{second.state}/run/registry.sqlite") as registry:
            assert [kept.rating.key for kept in registry.ratings("default")] == ["thumb"]
    assert second.summary()["ledger"]["balanced"]
