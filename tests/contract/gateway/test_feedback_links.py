"""Links for feedback: rated once each, without an account, until they end."""

import tracemalloc
from typing import Any

import pytest

from penstock.gateway.routes.feedback_routes import MAX_TEXT
from penstock.gateway.store.tables import Role
from tests.support.gateway.small_gateway import SmallGateway

LINKS = "/api/projects/alpha/agents/my_agent/links"
ITEMS = [{"prompt": f"question {number}", "response": "4", "runId": "run-1"} for number in range(2)]
PAIR = {"prompt": "2 + 2?", "responses": ["4", "5"], "version": 3, "conversation": "c-1"}


@pytest.fixture
def ada(small_gateway: SmallGateway) -> dict[str, str]:
    """The header of an owner of `alpha`."""
    small_gateway.person("ada", "alpha", Role.OWNER)
    return small_gateway.bearer("ada")


def made(gateway: SmallGateway, headers: dict[str, str], **change: Any) -> dict[str, Any]:
    """A new link."""
    reply = gateway.client.post(LINKS, json={"items": ITEMS, "rater": "user-7"} | change, headers=headers)
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def rated(gateway: SmallGateway, link: dict[str, Any], item: int, score: float) -> Any:
    """The answer to a score by the holder of a link."""
    return said(gateway, link, {"item": item, "score": score})


def said(gateway: SmallGateway, link: dict[str, Any], body: dict[str, Any]) -> Any:
    """The answer to what the holder of a link says."""
    return gateway.client.post("/api/link/ratings", json=body, headers={"Penstock-Link": link["link"]})


def test_its_holder_rates_each_response_once(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
    link = made(small_gateway, ada)
    path, _, secret = link["page"].partition("#")
    assert small_gateway.get(path, {}).headers["content-type"].startswith("text/html")
    seen = small_gateway.get("/api/link", {"Penstock-Link": secret}).json()
    assert seen["items"] == [{"prompt": one["prompt"], "response": "4"} for one in ITEMS]
    assert "alpha" not in str(seen)
    assert "user-7" not in str(seen)
    first, again = rated(small_gateway, link, 0, 0.9), rated(small_gateway, link, 0, 0.9)
    assert first.status_code == 200, first.text
    assert first.json() == again.json()
    assert rated(small_gateway, link, 0, 0.1).status_code == 409
    assert rated(small_gateway, link, 1, 0.2).status_code == 200
    assert rated(small_gateway, link, 2, 0.2).json()["field"] == "item"
    kept = small_gateway.registry.ratings("alpha/my_agent")
    assert [one.rating.score for one in kept] == [0.9, 0.2]
    assert len({one.rating.rater for one in kept}) == 1
    assert "user-7" not in str(kept)


def test_its_holder_chooses_between_two_responses(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
    link = made(small_gateway, ada, items=[PAIR, *ITEMS, PAIR])
    seen = small_gateway.get("/api/link", {"Penstock-Link": link["link"]}).json()
    shown = {"prompt": "2 + 2?", "responses": ["4", "5"]}
    assert seen["items"] == [shown, *({"prompt": one["prompt"], "response": "4"} for one in ITEMS), shown]
    first, again = (said(small_gateway, link, {"item": 0, "chosen": 1, "notes": "ä"}) for _ in range(2))
    assert first.status_code == 200, first.text
    assert first.json() == again.json()
    assert said(small_gateway, link, {"item": 0, "chosen": 0, "notes": "ä"}).status_code == 409
    assert said(small_gateway, link, {"item": 3, "chosen": 0}).status_code == 200
    assert rated(small_gateway, link, 1, 0.5).status_code == 200
    kept = [one.rating for one in small_gateway.registry.ratings("alpha/my_agent")]
    assert [(one.response, one.rejected, one.score) for one in kept] == [
        ("5", "4", None),
        ("4", "5", None),
        ("4", None, 0.5),
    ]
    assert (kept[0].prompt, kept[0].version, kept[0].conversation) == ("2 + 2?", 3, "c-1")
    assert (kept[0].notes, len({one.rater for one in kept})) == ("ä", 1)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"item": 0}, "chosen"),
        ({"item": 0, "score": 0.5}, "chosen"),
        ({"item": 0, "score": 0.5, "chosen": 0}, "chosen"),
        ({"item": 0, "chosen": 2}, "chosen"),
        ({"item": 0, "chosen": -1}, "chosen"),
        ({"item": 0, "chosen": True}, "chosen"),
        ({"item": 0, "chosen": "4"}, "chosen"),
        ({"item": 1}, "score"),
        ({"item": 1, "chosen": 0}, "score"),
        ({"item": 1, "score": 0.5, "chosen": 0}, "score"),
        ({"item": 1, "score": 1.5}, "score"),
        ({"item": 0, "chosen": 0, "rejected": "6"}, "rejected"),
        ({"item": 2, "chosen": 0}, "item"),
    ],
)
def test_what_does_not_fit_an_item_is_refused_by_field(
    small_gateway: SmallGateway, ada: dict[str, str], body: dict[str, Any], field: str
) -> None:
    link = made(small_gateway, ada, items=[PAIR, ITEMS[0]])
    reply = said(small_gateway, link, body)
    assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
    assert small_gateway.registry.ratings() == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"responses": ["4"]}, "items.1.responses"),
        ({"responses": ["4", "5", "6"]}, "items.1.responses"),
        ({"responses": ["4", ""]}, "items.1.responses.1"),
        ({"responses": ["4", "a\0b"]}, "items.1.responses.1"),
        ({"responses": ["4", "4"]}, "items.1"),
        ({"responses": None}, "items.1"),
        ({"response": "4"}, "items.1"),
        ({"score": 0.5}, "items.1.score"),
    ],
)
def test_what_cannot_be_rated_makes_no_link(
    small_gateway: SmallGateway, ada: dict[str, str], change: dict[str, Any], field: str
) -> None:
    reply = small_gateway.client.post(LINKS, json={"items": [ITEMS[0], PAIR | change]}, headers=ada)
    assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
    assert small_gateway.get(LINKS, ada).json() == {"links": []}


def test_it_ends(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
    small_gateway.person("bob", "alpha", Role.EDITOR)
    late, revoked, orphan = (
        made(small_gateway, ada),
        made(small_gateway, ada, days=30),
        made(small_gateway, small_gateway.bearer("bob"), days=30),
    )
    path = f"/api/projects/alpha/links/{revoked['id']}"
    assert small_gateway.client.delete(path, headers=ada).status_code == 204
    bob = f"/api/projects/alpha/members/{small_gateway.people['bob']}"
    assert small_gateway.client.delete(bob, headers=ada).status_code == 204
    assert rated(small_gateway, late, 0, 0.5).status_code == 200
    small_gateway.clock.pass_time(days=7)
    answers = [rated(small_gateway, one, 0, 0.5) for one in (late, revoked, orphan)]
    assert [one.status_code for one in answers] == [404, 404, 404]
    assert len({one.text for one in answers}) == 1
    unknown = small_gateway.get("/api/link", {"Penstock-Link": "psl_" + 43 * "a"})
    assert unknown.text == answers[0].text
    assert len(small_gateway.registry.ratings()) == 1


def test_its_secret_is_kept_as_a_digest(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
    link = made(small_gateway, ada)
    listed = small_gateway.get(LINKS, ada).json()["links"]
    assert [one["id"] for one in listed] == [link["id"]]
    assert link["link"] not in str(listed)


def test_a_list_of_links_holds_none_of_their_texts(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
    item, count = {"prompt": "p" * MAX_TEXT, "response": "r" * MAX_TEXT}, 20
    for _ in range(count):
        assert small_gateway.client.post(LINKS, json={"items": [item, item]}, headers=ada).status_code == 201
    small_gateway.get(LINKS, ada)
    tracemalloc.start()
    try:
        found = small_gateway.get(LINKS, ada).json()["links"]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [one["items"] for one in found] == [2] * count
    assert most < count * MAX_TEXT
