"""From nothing to a chat that one talks to and rates: one command, with a run of its own."""

from pathlib import Path

import pytest

from penstock.registry.registry import Registry
from tests.support.chat.chat_gateway import ChatGateway

pytestmark = pytest.mark.timeout(900)


def test_somebody_talks_rates_and_is_learned_from(tmp_path: Path) -> None:
    with ChatGateway(tmp_path, "--train=algorithm.batch_steps=64") as gateway:
        assert f" serving url={gateway.url}/chat\n" in gateway.log.read_text(), "where the page is"
        learned = 0
        with gateway.begin() as talk:
            for turn in range(4):
                parts, kind, data = talk.say("how are you")
                assert (kind, data["turn"]) == ("answer", turn)
                assert "".join(parts) == data["text"]
                assert data["version"] > 0
                kept = talk.tell("thumb", turn, up=True, id=f"thumb-of-turn-{turn}")
                assert kept == talk.tell("thumb", turn, up=True, id=f"thumb-of-turn-{turn}")
                learned += kept["rewarded"]
            talk.tell("stars", 0, key="safety", stars=5)
            _, _, second = talk.say(None)
            assert second["again"]
            assert talk.tell("prefer", second["turn"], better="second")["text"] == second["text"]
        assert learned == 4
        seen = gateway.get("/api/chat/overview")
        assert sum(one["rated"] for one in seen["versions"]) >= 1
        assert sum(one["answers"] for one in seen["versions"]) == 5
        assert all(one["satisfaction"] is None for one in seen["versions"]), "one conversation tells nothing"
        with Registry.read(f"sqlite:///{gateway.state}/run/registry.sqlite") as registry:
            ratings = [kept.rating for kept in registry.ratings("default")]
        assert [one.key for one in ratings] == ["thumb"] * 4 + ["safety", "preferred"]
        assert {one.rater for one in ratings} == {gateway.me}
        mine = gateway.post("/api/chat/mine", me=gateway.me)["ratings"]
        assert [one["key"] for one in mine] == [one.key for one in ratings]
        assert gateway.post("/api/chat/mine", me="somebody-else")["ratings"] == []
        assert gateway.post("/api/chat/forget", me=gateway.me) == {"deleted": 6}
        assert gateway.post("/api/chat/mine", me=gateway.me)["ratings"] == []
    summary = gateway.summary()
    assert summary["ledger"]["balanced"], summary["ledger"]
