"""The API of the page over a real server of text: what it refuses, and what it says is learned."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from fastapi.testclient import TestClient

from penstock.gateway.frame.route_access import Access
from penstock.gateway.store.tables import Role
from penstock.gateway.upstream import Upstream
from penstock.registry.records import NewVersion, Origin
from penstock.registry.registry import Registry
from penstock.workloads.chat.http.chat_routes import site
from penstock.workloads.chat.loop_state import (
    LoopOrder,
    LoopState,
    Step,
    folder_of,
    read_head_weights,
    write_state,
)
from tests.support.chat.chat_stand import beside, chat_app, served_judge, upstream_at, upstream_of
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway
from tests.support.language.text_stand import make_model

ME = "somebody-1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return make_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def client(base: Path, tmp_path: Path, short_folder: Path) -> Iterator[TestClient]:
    """Of a gateway over a server that learns nothing."""
    with over(upstream_of(base, tmp_path, short_folder / "text.sock")) as made:
        yield made


@pytest.mark.promise("account-rater-page-chat")
def test_people_with_accounts_sign_in_and_are_one_whatever_their_browsers_say(
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
            talk = {"me": browser, "conversation": post(client, "begin", me=browser).json()["conversation"]}
            assert "event: answer" in post(client, "say", text="sum", **talk).text
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


def post(client: TestClient, what: str, /, agent: str = "", **body: Any) -> Any:
    """The answer to a call of the page."""
    return client.post(f"/api/chat/{what}", params={"agent": agent} if agent else {}, json=body)


def test_a_rating_of_what_is_not_learned_from_says_so(client: TestClient) -> None:
    talk = {"me": ME, "conversation": post(client, "begin", me=ME).json()["conversation"]}
    assert "event: answer" in post(client, "say", text="sum", **talk).text
    kept = post(client, "thumb", turn=0, id="the-thumb", up=True, **talk).json()
    assert kept == {"stored": True, "rewarded": False}
    assert len(post(client, "mine", me=ME).json()["ratings"]) == 1


def test_what_is_wrong_is_refused_by_its_field(client: TestClient) -> None:
    talk = {"me": ME, "conversation": post(client, "begin", me=ME).json()["conversation"]}
    other = {**talk, "me": "somebody-2"}
    rating: dict[str, Any] = {"turn": 0, "id": "a-rating"}
    for reply, status, field in (
        (post(client, "say", text="sum", **other), 404, "conversation"),
        (post(client, "say", **talk), 409, "text"),
        (post(client, "say", text=" ", **talk), 422, "text"),
        (post(client, "thumb", up=True, **rating, **talk), 404, "turn"),
        (post(client, "stars", key="safety", stars=6, **rating, **talk), 422, "stars"),
        (post(client, "stars", key="charm", stars=1, **rating, **talk), 422, "key"),
        (post(client, "begin", me="x"), 422, "me"),
    ):
        assert (reply.status_code, reply.json()["field"]) == (status, field), reply.text
    reply = client.post("/api/chat/begin", content="{}", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    assert client.get("/chat/none.js").status_code == 404


def test_decisions_that_cannot_be_are_refused_by_what_stands_in_the_way(client: TestClient) -> None:
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


def test_what_counts_is_changed_with_a_reason_that_stands_among_the_decisions(
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


def test_satisfaction_is_told_by_day_and_by_person_until_somebody_leaves(client: TestClient) -> None:
    for me, thumbs in (("somebody-1", (True, False)), ("somebody-2", (True,)), ("somebody-3", ())):
        for number in range(2):
            talk = {"me": me, "conversation": post(client, "begin", me=me).json()["conversation"]}
            assert "event: answer" in post(client, "say", text="sum", **talk).text
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
            talk = {"me": ME, "conversation": post(client, "begin", agent, me=ME).json()["conversation"]}
            assert "event: answer" in post(client, "say", agent, text="sum", **talk).text
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


def test_who_leaves_is_forgotten_also_where_a_server_is_away(
    base: Path, tmp_path: Path, short_folder: Path
) -> None:
    (tmp_path / "other").mkdir()
    main = upstream_of(base, tmp_path, short_folder / "a.sock")
    with over(main, coder=upstream_at(tmp_path / "other", short_folder / "nobody.sock")) as client:
        talk = {"me": ME, "conversation": post(client, "begin", me=ME).json()["conversation"]}
        assert "event: answer" in post(client, "say", text="sum", **talk).text
        post(client, "thumb", turn=0, id="the-thumb", up=True, **talk)
        assert post(client, "begin", "coder", me=ME).status_code == 503
        assert post(client, "forget", me=ME).json() == {"deleted": 1}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a reward model with an ensemble."""
    with served_judge(tmp_path_factory.mktemp("judge")) as address:
        yield address


@pytest.mark.promise("turn-somebody-asked-about")
def test_somebody_is_asked_where_heads_disagree_and_that_counts_for_no_version(
    client: TestClient, judged: str, tmp_path: Path
) -> None:
    beside(tmp_path, judged)
    asked, others, known = list[str](), list[str](), 0
    # The model has a second for each answer, which a busy machine may not give.
    for number, words in enumerate(product(("sum", "3", "sea", "done"), repeat=3)):
        me = f"somebody-{number}"
        talk = {"me": me, "conversation": post(client, "begin", me=me).json()["conversation"]}
        told = answer_of(post(client, "say", text=" ".join(words), **talk).text)
        if told["expected"]:
            known += 1
            assert set(told["expected"]) == {"thumb", "relevance", "preferred"}
            assert all(0 < share < 1 for share in told["expected"].values())
        post(client, "thumb", turn=0, id=f"the-thumb-{number}", up=True, **talk)
        (asked if told["asked"] else others).append(talk["conversation"])
        if asked and known > 25:
            break
    assert asked
    (row,) = client.get("/api/chat/overview").json()["versions"]
    counts = [row[name] for name in ("answers", "asked", "conversations", "rated", "thumbsUp")]
    assert counts == [len(asked) + len(others), len(asked), len(others), len(others), len(others)]
    with Registry.read(f"sqlite:///{tmp_path / 'registry.sqlite'}") as registry:
        sources = [kept.rating.source for kept in registry.ratings("default")]
    assert (sources.count("chat-asked"), sources.count("chat")) == (len(asked), len(others))


def test_a_correction_is_better_than_what_was_answered(client: TestClient, tmp_path: Path) -> None:
    talk = {"me": ME, "conversation": post(client, "begin", me=ME).json()["conversation"]}
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
    """What the last event says of an answer."""
    return dict(json.loads(events.split("event: answer\ndata: ")[1]))


def version(number: int) -> NewVersion:
    """One that the registry knows, and no server."""
    return NewVersion(
        policy="default",
        version=number,
        run="run",
        update=number,
        sha256=f"{number}" * 64,
        size_bytes=1,
        origin=Origin.FINAL,
    )
