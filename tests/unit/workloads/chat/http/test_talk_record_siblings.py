"""Several answers to the same messages: each is rated as what it says. The server has a model of no sense."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from fastapi.testclient import TestClient

from penstock.workloads.language.pretraining import tiny_models
from tests.support.chat.chat_stand import client_at
from tests.support.language.text_address import served_text
from tests.support.language.text_stand import TOKENIZER, TextStand

ME = "somebody-1"


@pytest.fixture
def stand(tmp_path: Path, short_folder: Path) -> Iterator[TextStand]:
    """A server that learns, of a model that says something else each time."""
    tiny_models.save(tiny_models.build_model(TOKENIZER, seed=0), TOKENIZER, tmp_path / "base")
    with served_text(tmp_path / "base", short_folder / "text.sock") as made:
        yield made


@pytest.fixture
def client(stand: TextStand, tmp_path: Path, short_folder: Path) -> Iterator[TestClient]:
    """Of a gateway over it."""
    with client_at(tmp_path, short_folder / "text.sock") as made:
        yield made


class Talker:
    """Somebody in a conversation."""

    def __init__(self, client: TestClient) -> None:
        self._client, self._count, self.named = client, 0, {"me": ME}
        self.named["conversation"] = self.post("begin").json()["conversation"]

    def post(self, what: str, **body: Any) -> Any:
        """The answer to a call of the page."""
        return self._client.post(f"/api/chat/{what}", json={**self.named, **body})

    def answer(self, text: str | None = None) -> dict[str, Any]:
        """What is answered; without a text to the last message once more."""
        told = self.post("say", **({} if text is None else {"text": text})).text
        found: dict[str, Any] = json.loads(told.partition("event: answer\ndata: ")[2].partition("\n")[0])
        return found

    def rate(self, what: str, turn: int, **body: Any) -> dict[str, Any]:
        """Say something of an answer."""
        self._count += 1
        found: dict[str, Any] = self.post(what, turn=turn, id=f"rating-{self._count}", **body).json()
        return found

    def said(self) -> list[tuple[str, str | None]]:
        """What was rated, and what it is better than."""
        rows = self._client.post("/api/chat/mine", json={"me": ME}).json()["ratings"]
        return [(one["response"], one["rejected"]) for one in rows]


def test_a_thumb_is_of_the_answer_that_it_stands_at(client: TestClient, stand: TextStand) -> None:
    talker = Talker(client)
    first, second = talker.answer("sum"), talker.answer()
    assert first["text"] != second["text"]
    assert talker.rate("thumb", second["turn"], up=True) == {"stored": True, "rewarded": False}
    assert talker.rate("thumb", first["turn"], up=False) == {"stored": True, "rewarded": True}
    assert talker.said() == [(second["text"], None), (first["text"], None)]
    (episode,) = stand.conversations.episodes
    assert episode.total_return == -1.0


def test_what_the_conversation_goes_on_with_has_the_rewards(client: TestClient, stand: TextStand) -> None:
    talker = Talker(client)
    first, second = talker.answer("sum"), talker.answer()
    talker.rate("prefer", second["turn"], better="second")
    talker.answer("sea")
    assert talker.rate("thumb", first["turn"], up=False) == {"stored": True, "rewarded": False}
    assert talker.rate("thumb", second["turn"], up=True) == {"stored": True, "rewarded": True}
    (episode,) = stand.conversations.episodes
    assert episode.total_return == 1.0


def test_a_choice_that_is_sent_again_is_the_same_choice(client: TestClient) -> None:
    talker = Talker(client)
    first, second = talker.answer("sum"), talker.answer()
    chosen = {"turn": second["turn"], "better": "first"}
    for name in ("one-choice", "one-choice", "same-choice"):
        reply = talker.post("prefer", id=name, **chosen)
        assert (reply.status_code, reply.json()) == (200, {"stored": True, "text": first["text"]})
    third = talker.answer("sea")
    assert talker.post("prefer", id="one-choice", **chosen).status_code == 200
    for name in ("one-choice", "another-choice"):
        refused = talker.post("prefer", id=name, **{**chosen, "better": "second"})
        assert (refused.status_code, refused.json()["field"]) == (409, "better")
        assert "the first one was chosen" in refused.json()["detail"]
    assert talker.said() == [(first["text"], second["text"])]
    assert talker.post("prefer", id="no-choice", turn=third["turn"], better="first").json()["field"] == "turn"


def test_a_choice_that_could_not_be_kept_is_none(client: TestClient) -> None:
    talker = Talker(client)
    first, second = talker.answer("sum"), talker.answer()
    talker.post("thumb", id="the-thumb", turn=first["turn"], up=True)
    refused = talker.post("prefer", id="the-thumb", turn=second["turn"], better="first")
    assert refused.status_code == 409
    kept = talker.post("prefer", id="the-choice", turn=second["turn"], better="second").json()
    assert kept == {"stored": True, "text": second["text"]}


@pytest.mark.parametrize("is_rated", [False, True])
def test_a_further_answer_is_held_against_the_one_that_was_better(client: TestClient, is_rated: bool) -> None:
    talker = Talker(client)
    first = talker.answer("sum")
    if is_rated:
        talker.rate("thumb", first["turn"], up=True)
    others = []
    for _ in range(2):
        others.append(talker.answer())
        kept = talker.rate("prefer", others[-1]["turn"], better="first")
        assert kept == {"stored": True, "text": first["text"]}
    assert len({one["text"] for one in (first, *others)}) == 3
    assert talker.said()[is_rated:] == [(first["text"], one["text"]) for one in others]
