"""What one person may do to others and to what is learned, over a real server of text."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from fastapi.testclient import TestClient

from penstock.workloads.chat.http import chat_routes
from penstock.workloads.chat.http.chat_api import MOST_OF_ONE
from penstock.workloads.chat.loop_state import folder_of
from tests.support.chat.chat_stand import chat_app, client_at, upstream_at
from tests.support.language.text_address import served_text
from tests.support.language.text_stand import TextStand, make_model

ME, ROOM = "somebody-1", MOST_OF_ONE + 3


@pytest.fixture
def stand(tmp_path: Path, short_folder: Path) -> Iterator[TextStand]:
    """A server of text that learns nothing, with room for a few conversations more than one person has."""
    base = make_model(tmp_path / "base")
    with served_text(base, short_folder / "text.sock", learns=False, max_episodes=ROOM) as made:
        yield made


@pytest.fixture
def client(stand: TextStand, tmp_path: Path, short_folder: Path) -> Iterator[TestClient]:
    """Of a gateway over it."""
    with client_at(tmp_path, short_folder / "text.sock") as made:
        yield made


def post(client: TestClient, what: str, **body: Any) -> Any:
    """The answer to a call of the page."""
    return client.post(f"/api/chat/{what}", json=body)


def test_who_begins_without_end_leaves_room_for_others(client: TestClient, stand: TextStand) -> None:
    other = {
        "me": "somebody-2",
        "conversation": post(client, "begin", me="somebody-2").json()["conversation"],
    }
    own = [post(client, "begin", me=ME) for _ in range(2 * ROOM)]
    assert {reply.status_code for reply in own} == {200}
    assert len(stand.conversations.episodes) == MOST_OF_ONE + 1
    assert "event: answer" in post(client, "say", text="sum", **other).text
    first, last = (reply.json()["conversation"] for reply in (own[0], own[-1]))
    assert post(client, "say", text="sum", me=ME, conversation=first).status_code == 404
    assert "event: answer" in post(client, "say", text="sum", me=ME, conversation=last).text


def test_a_thumb_is_one_reward_whatever_is_sent_again(client: TestClient, stand: TextStand) -> None:
    talk = {"me": ME, "conversation": post(client, "begin", me=ME).json()["conversation"]}
    assert "event: answer" in post(client, "say", text="sum", **talk).text
    (episode,) = stand.conversations.episodes
    for name, up, total in (
        ("thumb-one", True, 1.0),
        ("thumb-two", False, -1.0),
        ("thumb-one", True, -1.0),
        ("thumb-three", False, -1.0),
        ("n" * 160, True, 1.0),
    ):
        assert post(client, "thumb", turn=0, id=name, up=up, **talk).status_code == 200
        assert episode.total_return == total, name


def test_text_that_no_database_holds_is_refused_by_its_field(client: TestClient, tmp_path: Path) -> None:
    folder_of(tmp_path).mkdir()
    talk = {"me": ME, "conversation": post(client, "begin", me=ME).json()["conversation"]}
    assert "event: answer" in post(client, "say", text="sum", **talk).text
    for reply, field in (
        (post(client, "say", text="su\0m", **talk), "text"),
        (post(client, "correct", turn=0, id="a-rating", text="su\0m", **talk), "text"),
        (post(client, "promote", version=1, reason="I\0"), "reason"),
        (post(client, "pause", reason="I\0"), "reason"),
        (post(client, "weigh", weights={"thumb": 2}, reason="I\0"), "reason"),
    ):
        assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
        assert "NUL" in reply.json()["detail"]


@pytest.mark.parametrize("name", ["loop.json", "weights.json"])
def test_a_damaged_file_of_the_loop_is_told_with_a_remedy(
    client: TestClient, tmp_path: Path, name: str
) -> None:
    folder_of(tmp_path).mkdir()
    (folder_of(tmp_path) / name).write_text("{")
    reply = client.get("/api/chat/overview")
    assert reply.status_code == 409
    assert f"{name}: cannot be read" in reply.json()["detail"]


def test_what_is_known_without_the_server_is_shown_while_it_is_halted(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_routes, "DESCRIBE_S", 1.0)
    with ExitStack() as stack:
        silent = stack.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(str(short_folder / "text.sock"))
        silent.listen()
        run = stack.enter_context(upstream_at(tmp_path, short_folder / "text.sock"))
        known = run.settings()
        assert known is not None
        run = replace(run, settings=lambda: replace(known, policy="default"))
        made = TestClient(chat_app(run, {}, None), base_url="http://127.0.0.1", raise_server_exceptions=False)
        seen = stack.enter_context(made).get("/api/chat/overview")
    assert seen.status_code == 200
    assert seen.json()["unreachable"] == "its server did not describe itself within 1 s"
