import json
import random
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from penstock.gateway.frame.requests import ApiError
from penstock.gateway.frame.route_access import Access
from penstock.gateway.store.tables import Role
from penstock.gateway.upstream import Upstream
from penstock.registry.ratings import RatedConversation, Rating, Tally
from penstock.registry.records import NewVersion, Origin, Status
from penstock.registry.registry import Registry
from penstock.workloads.chat.http import chat_routes
from penstock.workloads.chat.http.chat_api import (
    INPUT,
    LEAST,
    MOST_OF_ONE,
    AnswerBook,
    MessageLimit,
    RatingRequests,
    TalkCounts,
    VersionCounts,
)
from penstock.workloads.chat.http.chat_routes import shown_name, site, versions_of
from penstock.workloads.chat.loop_state import (
    LoopOrder,
    LoopState,
    Step,
    folder_of,
    read_head_weights,
    write_state,
)
from penstock.workloads.language.pretraining import tiny_models
from tests.support.chat.chat_stand import beside, chat_app, client_at, served_judge, upstream_at, upstream_of
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway
from tests.support.language.text_stand import TOKENIZER, TextStand, make_model, served_text

DAY_S = 86_400.0
FIRST_S = 20_000 * DAY_S  # 2024-10-04


def rated(conversation: str, rater: str, *, well: bool = True) -> RatedConversation:
    return RatedConversation(conversation=conversation, rater=rater, is_well=well)


def counted(
    book: AnswerBook, *given: RatedConversation, days: int = 30, people: int = 20
) -> list[TalkCounts]:
    return book.by_day_and_person(given, most_days=days, most_people=people)


def test_conversations_are_counted_once_and_outlive_the_book(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path / "made")
    book.note("a", 0, 3, fallback=False)
    book.note("a", 1, 3, fallback=False, blocked="output")
    book.note("a", 2, 4, fallback=False)
    book.note("b", 0, 0, fallback=True)
    again = AnswerBook(tmp_path / "made")
    assert again.counts() == [
        VersionCounts(version=4, conversations=1, answers=1, fallbacks=0, blocked=0),
        VersionCounts(version=3, conversations=1, answers=2, fallbacks=0, blocked=1),
        VersionCounts(version=0, conversations=1, answers=1, fallbacks=1, blocked=0),
    ]
    assert again.blocked() == {"output": 1}
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0, "it is its user's alone"


def test_a_turn_shown_for_rating_is_no_part_of_a_conversation(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path / "made")
    for conversation, turn in (("a", 0), ("b", 0), ("b", 1)):
        book.note(conversation, turn, 3, fallback=False)
    for _ in range(2):
        book.note_asked("a", 0)
        book.note_asked("b", 1)
    (found,) = book.counts()
    assert (found.conversations, found.answers, found.asked) == (1, 3, 2)


def test_a_conversation_without_an_answer_is_not_counted(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path / "made")
    book.note("a", 0, 3, fallback=False, blocked=f"{INPUT}rule", person="ann")
    book.note("b", 0, 3, fallback=False, person="bob")
    book.note("b", 1, 3, fallback=False, blocked=f"{INPUT}rule", person="bob")
    book.note("c", 0, 3, fallback=False, blocked="output", person="cid")
    (version,) = book.counts()
    assert (version.conversations, version.answers, version.blocked) == (2, 2, 3)
    found = counted(book, rated("a", "ann"), rated("b", "bob"), rated("c", "cid"))
    assert sum(one.conversations for one in found if one.by == "day") == 2
    assert [one.name for one in found if one.by == "person"] == ["bob", "cid"]


def test_a_conversation_is_of_the_day_and_of_the_person_that_began_it(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path)
    for name, person, at_s in (
        ("a", "ann", FIRST_S),
        ("b", "bob", FIRST_S + DAY_S - 1),
        ("b", "bob", FIRST_S + DAY_S + 1),
        ("c", "ann", FIRST_S + DAY_S),
        ("d", "ann", FIRST_S),
        ("e", "eve", FIRST_S),
    ):
        book.note(name, 0, 3, fallback=False, person=person, at_s=at_s)
    given = (rated("a", "ann"), rated("c", "ann", well=False), rated("e", "eve"))
    found = counted(book, *given)
    assert found == [
        TalkCounts(by="day", name="2024-10-05", conversations=1, rated=1, well=0),
        TalkCounts(by="day", name="2024-10-04", conversations=4, rated=2, well=2),
        TalkCounts(by="person", name="ann", conversations=3, rated=2, well=1),
        TalkCounts(by="person", name="eve", conversations=1, rated=1, well=1),
    ]
    assert counted(book, *given, days=1, people=1) == [found[0], found[2]]


def test_requested_and_unknown_ratings_count_for_nobody(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path)
    book.note("asked", 0, 3, fallback=False, person="ann")
    book.note_asked("asked", 0)
    book.note("nameless", 0, 3, fallback=False)
    book.note("of-bob", 0, 3, fallback=False, person="bob")
    given = (rated("nameless", "", well=False), rated("of-bob", "bob"))
    found = counted(book, *given, rated("asked", "ann"), rated("elsewhere", "eve"))
    assert [(one.by, one.conversations, one.rated, one.well) for one in found] == [
        ("day", 2, 2, 1),
        ("person", 1, 1, 1),
    ]


def test_a_forgotten_person_is_in_no_count(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path)
    for name, person in (("a", "ann"), ("b", "ann"), ("c", "bob")):
        book.note(name, 0, 3, fallback=True, blocked="output", person=person)
    book.note_asked("b", 0)
    book.forget("ann")
    book.forget("nobody")
    found = counted(book, rated("a", "ann"), rated("c", "bob"))
    assert [(one.by, one.conversations) for one in found] == [("day", 1), ("person", 1)]
    (version,) = book.counts()
    assert (version.conversations, version.answers, version.asked) == (1, 1, 0)
    assert b"ann" not in (tmp_path / "chat.sqlite").read_bytes()


def test_one_answer_in_five_requests_a_rating_and_it_is_the_least_certain() -> None:
    draw, asking, knows_nothing = random.Random(1), RatingRequests(), RatingRequests()
    assert not any(knows_nothing.is_wanted(one) for one in (None, 0.1) for _ in range(100))
    seen = [(one, asking.is_wanted(one)) for one in (draw.gauss(0.2, 0.05) for _ in range(1000))]
    assert not any(is_asked for _, is_asked in seen[:LEAST])
    asked, others = ([one for one, given in seen[LEAST:] if given is wanted] for wanted in (True, False))
    assert 0.15 < len(asked) / len(seen) < 0.25
    assert sorted(asked)[len(asked) // 10] > sorted(others)[9 * len(others) // 10]


ME = "somebody-1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def stand(base: Path, short_folder: Path) -> Iterator[TextStand]:
    """A server of text that learns nothing."""
    with served_text(base, short_folder / "text.sock", learns=False) as made:
        yield made


@pytest.fixture
def client(stand: TextStand, tmp_path: Path, short_folder: Path) -> Iterator[TestClient]:
    """Of a gateway over it."""
    with client_at(tmp_path, short_folder / "text.sock") as made:
        yield made


def post(client: TestClient, what: str, /, agent: str = "", **body: Any) -> Any:
    return client.post(f"/api/chat/{what}", params={"agent": agent} if agent else {}, json=body)


def begun(client: TestClient, me: str = ME, agent: str = "") -> dict[str, Any]:
    """Whoever has begun a conversation, and which."""
    return {"me": me, "conversation": post(client, "begin", agent, me=me).json()["conversation"]}


def talked(client: TestClient, me: str = ME, agent: str = "") -> dict[str, Any]:
    """Whoever has had an answer in a conversation, and in which."""
    talk = begun(client, me, agent)
    assert "event: answer" in post(client, "say", agent, text="sum", **talk).text
    return talk


def test_a_person_with_endless_conversations_leaves_room_for_others(
    client: TestClient, stand: TextStand
) -> None:
    other = begun(client, "somebody-2")
    own = [post(client, "begin", me=ME) for _ in range(2 * MOST_OF_ONE + 6)]
    assert {reply.status_code for reply in own} == {200}
    assert len(stand.conversations.episodes) == MOST_OF_ONE + 1
    assert "event: answer" in post(client, "say", text="sum", **other).text
    first, last = (reply.json()["conversation"] for reply in (own[0], own[-1]))
    assert post(client, "say", text="sum", me=ME, conversation=first).status_code == 404
    assert "event: answer" in post(client, "say", text="sum", me=ME, conversation=last).text


def test_a_thumb_gives_one_reward_however_often_sent(client: TestClient, stand: TextStand) -> None:
    talk = talked(client)
    (episode,) = stand.conversations.episodes
    for name, up, total in (
        ("thumb-one", True, 1.0),
        ("thumb-two", False, -1.0),
        ("thumb-one", True, -1.0),
        ("thumb-three", False, -1.0),
        ("n" * 160, True, 1.0),
    ):
        kept = post(client, "thumb", turn=0, id=name, up=up, **talk)
        assert (kept.status_code, kept.json()) == (200, {"stored": True, "rewarded": False})
        assert episode.total_return == total, name


@pytest.mark.parametrize("name", ["loop.json", "weights.json"])
def test_a_damaged_file_of_the_loop_is_reported_with_a_remedy(
    client: TestClient, tmp_path: Path, name: str
) -> None:
    folder_of(tmp_path).mkdir()
    (folder_of(tmp_path) / name).write_text("{")
    reply = client.get("/api/chat/overview")
    assert reply.status_code == 409
    assert f"{name}: cannot be read" in reply.json()["detail"]


def test_the_overview_is_shown_while_the_server_is_halted(
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


@pytest.mark.promise("account-rater-page-chat")
def test_a_person_with_an_account_is_one_rater_in_all_browsers(
    base: Path, tmp_path: Path, short_folder: Path
) -> None:
    gateway = SmallGateway.at(
        f"sqlite:///{tmp_path / 'accounts.sqlite'}", f"sqlite:///{tmp_path / 'other.sqlite'}", tmp_path
    )
    gateway.person("owner", "alpha", Role.OWNER)
    owner = gateway.client.post(
        "/api/projects/alpha/invitations", json={"role": "viewer"}, headers=gateway.bearer("owner")
    )
    run = upstream_of(base, tmp_path, short_folder / "text.sock")
    with over(run, gateway=gateway) as client:
        assert client.get("/chat").status_code == 200
        assert post(client, "begin", me=ME).status_code == 401
        person = {"name": "ann", "password": PASSWORD}
        joined = client.post("/api/auth/sign-up", json={**person, "invitation": owner.json()["invitation"]})
        assert (joined.status_code, joined.json()) == (201, {"project": "alpha"})
        wrong = {"grant_type": "password", "username": "ann", "password": "another one entirely"}
        assert client.post("/api/auth/token", data=wrong).status_code == 401
        given = client.post("/api/auth/token", data={**wrong, "password": PASSWORD}).json()
        client.headers["Authorization"] = f"Bearer {given['access_token']}"
        assert client.get("/api/me").json() == {"name": "ann", "project": "alpha", "role": "viewer"}
        for number, browser in enumerate(("browser-one", "browser-two")):
            talk = talked(client, browser)
            post(client, "thumb", turn=0, id=f"the-thumb-{number}", up=True, **talk)
        assert len(post(client, "mine", me="browser-three").json()["ratings"]) == 2
        assert client.get("/api/chat/overview").status_code == 403
        renewed = {"grant_type": "refresh_token", "refresh_token": given["refresh_token"]}
        assert client.post("/api/auth/token", data=renewed).status_code == 200
        assert client.post("/api/auth/sign-out").status_code == 204
        assert post(client, "mine", me=ME).status_code == 401
    with Registry.read(f"sqlite:///{tmp_path / 'registry.sqlite'}") as registry:
        (rater,) = {kept.rating.rater for kept in registry.ratings("default")}
    assert rater.startswith("user/")


@contextmanager
def over(
    run: AbstractContextManager[Upstream],
    gateway: SmallGateway | None = None,
    **agents: AbstractContextManager[Upstream],
) -> Iterator[TestClient]:
    """Of a gateway over these runs. gateway: whose accounts are asked for; None: nobody is."""
    with ExitStack() as stack:
        others = {name: stack.enter_context(one) for name, one in agents.items()}
        app = chat_app(stack.enter_context(run), others, gateway)
        yield stack.enter_context(TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False))


def test_a_wrong_field_is_refused_by_name(client: TestClient, tmp_path: Path) -> None:
    folder_of(tmp_path).mkdir()
    new, talk = begun(client), talked(client)
    rating: dict[str, Any] = {"turn": 0, "id": "a-rating"}
    for reply, status, field in (
        (post(client, "say", text="sum", **{**talk, "me": "somebody-2"}), 404, "conversation"),
        (post(client, "say", **new), 409, "text"),
        (post(client, "say", text=" ", **talk), 422, "text"),
        (post(client, "thumb", up=True, **rating, **new), 404, "turn"),
        (post(client, "stars", key="safety", stars=6, **rating, **talk), 422, "stars"),
        (post(client, "stars", key="charm", stars=1, **rating, **talk), 422, "key"),
        (post(client, "begin", me="x"), 422, "me"),
    ):
        assert (reply.status_code, reply.json()["field"]) == (status, field), reply.text
    for reply, field in (
        (post(client, "say", text="su\0m", **talk), "text"),
        (post(client, "correct", text="su\0m", **rating, **talk), "text"),
        (post(client, "promote", version=1, reason="I\0"), "reason"),
        (post(client, "pause", reason="I\0"), "reason"),
        (post(client, "weigh", weights={"thumb": 2}, reason="I\0"), "reason"),
    ):
        assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
        assert "NUL" in reply.json()["detail"], "no database holds it"
    reply = client.post("/api/chat/begin", content="{}", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    assert client.get("/chat/none.js").status_code == 404


def test_impossible_decisions_are_refused_with_the_obstacle(client: TestClient) -> None:
    why: dict[str, Any] = {"reason": "I say so"}
    for reply, status, field in (
        (post(client, "promote", version=7, **why), 404, "version"),
        (post(client, "rollback", version=7, **why), 404, "version"),
        (post(client, "promote", version=0, **why), 422, "version"),
        (post(client, "promote", version=7), 422, "reason"),
        (post(client, "promote", version=7, reason=" "), 422, "reason"),
        (post(client, "pause", **why), 409, None),
        (post(client, "resume"), 409, None),
        (post(client, "abandon", **why), 409, None),
        (post(client, "abandon"), 422, "reason"),
        (post(client, "weigh", weights={"safety": 2}, **why), 409, None),
        (post(client, "weigh", weights={}, **why), 422, "weights"),
        (post(client, "weigh", weights={"safety": -1}, **why), 422, "weights.safety"),
        (post(client, "weigh", weights={"safety": 2}), 422, "reason"),
    ):
        assert (reply.status_code, reply.json().get("field")) == (status, field), reply.text
    decided = {
        f"/api/chat/{name}"
        for name in ("promote", "rollback", "pause", "resume", "abandon", "weigh", "overview", "satisfaction")
    }
    access = {path: access for (_, path), access in site().access.items()}
    assert {access[path] for path in decided} == {Access.EDITOR}


def test_both_versions_of_a_trial_are_counted_over_the_same_time(client: TestClient, tmp_path: Path) -> None:
    numbers, book = (7, 9), client.app.state.apis[""].book  # type: ignore[attr-defined]

    def talks(count: int, at_s: float | None, registry: Registry) -> None:
        for number, which in product(range(count), numbers):
            talk = f"{count}-{number}-{which}"
            book.note(talk, 0, which, fallback=False, at_s=at_s)
            thumb = Rating(prompt="a", response="b", key="thumb", score=1.0, conversation=talk, version=which)
            registry.add_ratings("default", [thumb])

    with Registry.open(f"sqlite:///{tmp_path / 'registry.sqlite'}", migrate=True) as registry:
        for number in numbers:
            registry.register(version(number), by="test")
        registry.promote("default", numbers[0], "the first", by="test")
        talks(5, FIRST_S, registry)
        registry.promote("default", numbers[1], "tried", by="test", to=Status.CANARY, canary_share=0.5)
        talks(3, None, registry)
    seen = client.get("/api/chat/overview").json()
    names = ("version", "conversations", "rated", "thumbsUp")
    assert [[one[name] for name in names] for one in seen["trial"]["versions"]] == [
        [9, 3, 3, 3], [7, 3, 3, 3],
    ]  # fmt: skip
    assert {one["version"]: one["conversations"] for one in seen["versions"]}.items() >= {7: 8}.items()
    assert seen["ordinals"] == {"7": 1, "9": 2}
    assert [(one["action"], one["to"]) for one in seen["decisions"]][:2] == [
        ("promoted", "canary"), ("promoted", "active"),
    ]  # fmt: skip
    assert client.get("/api/chat/ready").json() == {"unreachable": ""}


def test_a_decision_names_who_made_it_and_the_loop_waits(client: TestClient, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.sqlite'}"
    with Registry.open(url) as registry:
        registry.register(version(1), by="test")
        registry.register(version(2), by="test")
    for number in (1, 2):
        done = post(client, "promote", version=number, reason="better").json()
        assert done == {"version": number, "status": "active"}
    assert post(client, "rollback", version=2, reason="worse").json()["status"] == "rolled_back"
    assert post(client, "rollback", version=1, reason="worse").status_code == 409
    with Registry.read(url) as registry:
        assert {one.by for one in registry.events("default") if one.action.value != "registered"} == {"page"}
    write_state(folder_of(tmp_path), LoopState(order=LoopOrder(labels=9).shown()))
    assert post(client, "pause", reason="holidays").json() == {"paused": True}
    seen = client.get("/api/chat/overview").json()
    assert seen["loop"]["paused"] == {"reason": "holidays", "by": "page", "until_s": None}
    assert (seen["loop"]["step"], seen["loop"]["labelsWanted"]) == ("waiting", 9)
    assert post(client, "resume").json() == {"paused": False}
    assert client.get("/api/chat/overview").json()["loop"]["paused"] is None


def test_a_round_that_fails_is_shown_with_its_cause_and_given_up(client: TestClient, tmp_path: Path) -> None:
    folder, order = folder_of(tmp_path), LoopOrder().shown()
    write_state(folder, LoopState(order=order))
    refused = post(client, "abandon", reason="why not")
    assert (refused.status_code, refused.json()["detail"][:22]) == (409, "round 1 has not begun:")
    write_state(folder, LoopState(order=order, number=4, step=Step.TRAINING, failure="no memory", tries=3))
    assert post(client, "abandon", reason="it fails").json() == {"abandoned": 4}
    seen = client.get("/api/chat/overview").json()["loop"]
    assert (seen["failure"], seen["tries"]) == ("no memory", 3)
    assert seen["abandoned"] == {"number": 4, "reason": "it fails", "by": "page"}
    write_state(folder, LoopState(order=order, number=5, step=Step.TRAINING))
    assert client.get("/api/chat/overview").json()["loop"]["abandoned"] is None


def test_weights_are_changed_with_a_reason_that_the_decisions_show(
    client: TestClient, tmp_path: Path
) -> None:
    write_state(folder_of(tmp_path), LoopState(order=LoopOrder(weights=("thumb=2",)).shown()))
    with Registry.open(f"sqlite:///{tmp_path / 'registry.sqlite'}") as registry:
        registry.register(version(1), by="test")
    done = post(client, "weigh", weights={"safety": 2.5}, reason="children read it").json()
    every = {"thumb": 2.0, "relevance": 1.0, "helpfulness": 1.0, "safety": 2.5, "preferred": 0.0}
    assert done == {"weights": every}
    for weights in ({"charm": 1}, dict.fromkeys(every, 0)):
        refused = post(client, "weigh", weights=weights, reason="why not")
        assert (refused.status_code, refused.json()["field"]) == (422, "weights"), refused.text
    nan = '{"weights": {"thumb": NaN}, "reason": "x"}'
    reply = client.post("/api/chat/weigh", content=nan, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["field"]) == (422, "weights.thumb")
    seen = client.get("/api/chat/overview").json()
    assert seen["loop"]["weights"] == every
    decided = [(one["action"], one["weights"], one["by"], one["reason"]) for one in seen["decisions"]]
    assert decided[0] == ("weighed", {"safety": 2.5}, "page", "children read it")
    assert [one[0] for one in decided] == ["weighed", "registered"]
    assert read_head_weights(folder_of(tmp_path)).standing == {"safety": 2.5}


def test_satisfaction_is_shown_by_day_and_person_until_a_person_is_forgotten(client: TestClient) -> None:
    for me, thumbs in (("somebody-1", (True, False)), ("somebody-2", (True,)), ("somebody-3", ())):
        for number in range(2):
            talk = talked(client, me)
            for up in thumbs[number : number + 1]:
                post(client, "thumb", turn=0, id=f"{me}-{number}", up=up, **talk)
    found = client.get("/api/chat/satisfaction").json()
    assert {one["satisfaction"] for one in found["rows"]} == {None}
    rows = [
        [one[name] for name in ("by", "name", "conversations", "rated", "thumbsUp")] for one in found["rows"]
    ]
    days = [row[2:] for row in rows if row[0] == "day"]
    assert [sum(column) for column in zip(*days, strict=True)] == [6, 3, 2]  # two days where it is midnight
    people = [row[1:] for row in rows if row[0] == "person"]
    assert sorted(people) == [["somebo…", 2, 1, 1], ["somebo…", 2, 2, 1]]
    assert post(client, "forget", me="somebody-1").json() == {"deleted": 2}
    left = client.get("/api/chat/satisfaction").json()["rows"]
    assert sum(one["conversations"] for one in left if one["by"] == "day") == 4
    assert [one["name"] for one in left if one["by"] == "person"] == ["somebo…"]
    (row,) = client.get("/api/chat/overview").json()["versions"]
    assert (row["conversations"], row["thumbsUp"]) == (4, 1)


def test_each_agent_has_its_policy_and_its_ratings(base: Path, tmp_path: Path, short_folder: Path) -> None:
    (tmp_path / "other").mkdir()
    main = upstream_of(base, tmp_path, short_folder / "a.sock", policy="talker")
    other = upstream_of(base, tmp_path / "other", short_folder / "b.sock", policy="helper")
    with over(main, coder=other) as client:
        assert client.get("/api/chat/agents").json() == {"agents": ["", "coder"]}
        assert post(client, "begin", "nobody", me=ME).json()["field"] == "agent"
        for agent in ("", "coder"):
            talk = talked(client, agent=agent)
            post(client, "thumb", agent, turn=0, id="the-thumb", up=True, **talk)
            elsewhere = post(client, "say", "" if agent else "coder", text="sum", **talk)
            assert elsewhere.json()["field"] == "conversation"
        kept = [one["policy"] for one in post(client, "mine", me=ME).json()["ratings"]]
        assert kept == ["talker", "helper"]
        rows = client.get("/api/chat/overview", params={"agent": "coder"}).json()["versions"]
        assert [one["thumbsUp"] for one in rows] == [1]
        assert post(client, "forget", me=ME).json() == {"deleted": 2}
    for folder, policy in ((tmp_path, "talker"), (tmp_path / "other", "helper")):
        with Registry.read(f"sqlite:///{folder / 'registry.sqlite'}") as registry:
            assert registry.ratings(policy) == ()


def test_a_person_is_forgotten_also_while_a_server_is_away(
    base: Path, tmp_path: Path, short_folder: Path
) -> None:
    (tmp_path / "other").mkdir()
    main = upstream_of(base, tmp_path, short_folder / "a.sock")
    with over(main, coder=upstream_at(tmp_path / "other", short_folder / "nobody.sock")) as client:
        talk = talked(client)
        post(client, "thumb", turn=0, id="the-thumb", up=True, **talk)
        assert post(client, "begin", "coder", me=ME).status_code == 503
        assert post(client, "forget", me=ME).json() == {"deleted": 1}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_judge(tmp_path_factory.mktemp("judge")) as address:
        yield address


@pytest.mark.promise("turn-somebody-asked-about")
def test_a_rating_is_requested_where_heads_disagree_and_counts_for_no_version(
    client: TestClient, judged: str, tmp_path: Path
) -> None:
    beside(tmp_path, judged)
    asked, others = list[str](), list[str]()
    # The model has a second for each answer, which a busy machine may not give.
    for number, words in enumerate(product(("sum", "3", "sea", "done"), repeat=3)):
        me = f"somebody-{number}"
        talk = begun(client, me)
        told = answer_of(post(client, "say", text=" ".join(words), **talk).text)
        assert told["expected"] is None, "who rates is not to know"
        post(client, "thumb", turn=0, id=f"the-thumb-{number}", up=True, **talk)
        (asked if told["asked"] else others).append(talk["conversation"])
        if asked:
            break
    assert asked
    (row,) = client.get("/api/chat/overview").json()["versions"]
    counts = [row[name] for name in ("answers", "asked", "conversations", "rated", "thumbsUp")]
    assert counts == [len(asked) + len(others), len(asked), len(others), len(others), len(others)]
    with Registry.read(f"sqlite:///{tmp_path / 'registry.sqlite'}") as registry:
        sources = [kept.rating.source for kept in registry.ratings("default")]
    assert (sources.count("chat-asked"), sources.count("chat")) == (len(asked), len(others))


def test_a_correction_is_preferred_to_the_answer(client: TestClient, tmp_path: Path) -> None:
    talk = begun(client)
    said = answer_of(post(client, "say", text="sum", **talk).text)["text"]
    given: dict[str, Any] = {"turn": 0, "id": "the-correction", **talk}
    assert post(client, "correct", text=said, **given).json()["field"] == "text"
    assert post(client, "correct", text=" ", **given).json()["field"] == "text"
    for _ in range(2):
        assert post(client, "correct", text="It is four.", **given).json() == {"stored": True}
    with Registry.read(f"sqlite:///{tmp_path / 'registry.sqlite'}") as registry:
        (kept,) = registry.ratings("default")
    assert (kept.rating.key, kept.rating.response, kept.rating.rejected) == ("corrected", "It is four.", said)


def answer_of(events: str) -> dict[str, Any]:
    return dict(json.loads(events.split("event: answer\ndata: ")[1]))


def version(number: int) -> NewVersion:
    """One that the registry knows, and no server."""
    about: dict[str, Any] = {"run": "run", "update": number, "size_bytes": 1, "origin": Origin.FINAL}
    return NewVersion(policy="default", version=number, sha256=f"{number}" * 64, **about)


def test_a_person_over_the_limit_waits_and_others_do_not() -> None:
    clock = [0.0]
    limit = MessageLimit(2, lambda: clock[0])
    limit.count("ann")
    clock[0] = 10.0
    limit.count("ann")
    for _ in range(5):
        with pytest.raises(ApiError) as refused:
            limit.count("ann")
        assert (refused.value.status, refused.value.retry_s) == (429, 50.0)
    limit.count("bob")
    clock[0] = 60.0
    limit.count("ann")
    with pytest.raises(ApiError):
        limit.count("ann")


def test_satisfaction_is_over_all_conversations() -> None:
    newest, older = versions_of(
        [
            VersionCounts(version=8, conversations=40, answers=80, fallbacks=0, blocked=1),
            VersionCounts(version=7, conversations=29, answers=58, fallbacks=0, blocked=1),
        ],
        [Tally(version=7, rated=29, well=29), Tally(version=8, rated=10, well=10)],
        None,
    )
    assert (newest["version"], newest["satisfaction"], newest["ratingRate"]) == (8, 0.25, 0.25)
    assert newest["low"] < 0.25 < newest["high"]
    assert (older["satisfaction"], older["low"], older["blocked"]) == (None, None, 1)


def test_the_browsers_name_is_shown_in_part() -> None:
    assert shown_name("0123456789abcdef") == "012345…"
    assert shown_name("user/7") == "user/7"
    assert shown_name("token/3/0123456789abcdef") == "token/3/012345…"


@pytest.fixture
def talker(tmp_path: Path, short_folder: Path) -> Iterator["Talker"]:
    """Somebody at a server that learns, of a model that says something else each time."""
    tiny_models.save(tiny_models.build_model(TOKENIZER, seed=0), TOKENIZER, tmp_path / "base")
    socket = short_folder / "text.sock"
    with served_text(tmp_path / "base", socket) as stand, client_at(tmp_path, socket) as client:
        yield Talker(client, stand)


class Talker:
    """Somebody in a conversation."""

    def __init__(self, client: TestClient, stand: TextStand) -> None:
        self._client, self._count, self._stand, self.named = client, 0, stand, begun(client)

    def post(self, what: str, **body: Any) -> Any:
        return post(self._client, what, **self.named, **body)

    def answer(self, text: str | None = None) -> dict[str, Any]:
        """What is answered; without a text to the last message once more."""
        return answer_of(self.post("say", **({} if text is None else {"text": text})).text)

    def rate(self, what: str, turn: int, **body: Any) -> dict[str, Any]:
        self._count += 1
        found: dict[str, Any] = self.post(what, turn=turn, id=f"rating-{self._count}", **body).json()
        return found

    def said(self) -> list[tuple[str, str | None]]:
        """What was rated, and what it is better than."""
        rows = post(self._client, "mine", me=ME).json()["ratings"]
        return [(one["response"], one["rejected"]) for one in rows]

    def total_return(self) -> float:
        (episode,) = self._stand.conversations.episodes
        return episode.total_return


def test_a_thumb_rates_the_answer_next_to_it(talker: Talker) -> None:
    first, second = talker.answer("sum"), talker.answer()
    assert first["text"] != second["text"]
    assert talker.rate("thumb", first["turn"], up=False) == {"stored": True, "rewarded": False}
    assert talker.rate("thumb", second["turn"], up=True) == {"stored": True, "rewarded": True}
    assert talker.said() == [(first["text"], None), (second["text"], None)]
    assert talker.total_return() == 1.0


def test_the_answer_that_continues_the_conversation_gets_the_rewards(talker: Talker) -> None:
    first, second = talker.answer("sum"), talker.answer()
    talker.rate("prefer", second["turn"], better="second")
    talker.answer("sea")
    assert talker.rate("thumb", first["turn"], up=False) == {"stored": True, "rewarded": False}
    assert talker.rate("thumb", second["turn"], up=True) == {"stored": True, "rewarded": True}
    assert talker.total_return() == 1.0


def test_a_choice_that_is_sent_again_is_the_same_choice(talker: Talker) -> None:
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


def test_a_choice_that_was_not_stored_does_not_count(talker: Talker) -> None:
    first, second = talker.answer("sum"), talker.answer()
    talker.post("thumb", id="the-thumb", turn=first["turn"], up=True)
    refused = talker.post("prefer", id="the-thumb", turn=second["turn"], better="first")
    assert refused.status_code == 409
    kept = talker.post("prefer", id="the-choice", turn=second["turn"], better="second").json()
    assert kept == {"stored": True, "text": second["text"]}


@pytest.mark.parametrize("is_rated", [False, True])
def test_a_further_answer_is_compared_with_the_better_one(talker: Talker, is_rated: bool) -> None:
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
