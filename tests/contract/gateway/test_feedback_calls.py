"""Feedback by HTTP, on each kind of database: stored once, exported, taken in, deleted on request."""

import json
from typing import Any

import pytest
from sqlalchemy import text

from penstock.gateway.routes.feedback_routes import MAX_EXPORTED_CHARS, MAX_TEXT
from penstock.gateway.store.tables import Role
from tests.support.gateway.small_gateway import SmallGateway

PATH = "/api/policies/feedback/my_agent"
LINES = "/api/projects/alpha/agents/my_agent/feedback"
ONE = {"prompt": "What is 2 + 2?", "response": "4", "score": 0.9, "runId": "run-1"}


@pytest.fixture
def editor(small_gateway: SmallGateway) -> dict[str, str]:
    """The header of a program that may give feedback in `alpha`."""
    small_gateway.person("ada", "alpha", Role.OWNER)
    return small_gateway.token("alpha")


def exported(gateway: SmallGateway, headers: dict[str, str]) -> list[dict[str, Any]]:
    """The lines of an export."""
    reply = gateway.get(LINES, headers)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_rating_is_stored_as_it_was_given(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    reply = small_gateway.client.post(PATH, json=ONE | {"notes": "ä"}, headers=editor)
    assert reply.status_code == 200, reply.text
    (kept,) = small_gateway.registry.ratings("alpha/my_agent")
    assert kept.public_id == reply.json()["id"]
    assert (kept.rating.prompt, kept.rating.response, kept.rating.score) == ("What is 2 + 2?", "4", 0.9)
    assert (kept.rating.run, kept.rating.notes, kept.rating.project) == ("run-1", "ä", "alpha")
    assert len(kept.rating.rater) == 32
    (line,) = exported(small_gateway, editor)
    assert line["raterId"] == kept.rating.rater


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"score": 1.5}, "score"),
        ({"score": -0.1}, "score"),
        ({"score": "good"}, "score"),
        ({"score": None}, "score"),
        ({"prompt": ""}, "prompt"),
        ({"response": "a\0b"}, "response"),
        ({"runId": "x" * 65}, "runId"),
        ({"notes": "a\0b"}, "notes"),
        ({"version": 2**64}, "version"),
        ({"path": "/etc/passwd"}, "path"),
    ],
)
def test_what_is_wrong_is_refused_by_field(
    small_gateway: SmallGateway, editor: dict[str, str], change: dict[str, Any], field: str
) -> None:
    reply = small_gateway.client.post(PATH, json=ONE | change, headers=editor)
    assert (reply.status_code, reply.json()["field"]) == (422, field)
    assert small_gateway.registry.ratings() == ()


def test_a_request_that_comes_again_stores_nothing_more(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    headers = editor | {"Idempotency-Key": "a-1"}
    first, second = (small_gateway.client.post(PATH, json=ONE, headers=headers) for _ in range(2))
    assert first.json() == second.json()
    other = small_gateway.client.post(PATH, json=ONE | {"score": 0.1}, headers=headers)
    assert other.status_code == 409
    assert len(small_gateway.registry.ratings()) == 1


def test_an_export_may_be_taken_in_elsewhere(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    for score in (0.5, 0.7):
        headers = editor | {"Idempotency-Key": str(score)}
        small_gateway.client.post(PATH, json=ONE | {"score": score}, headers=headers)
    text = small_gateway.get(LINES, editor).text
    there = LINES.replace("my_agent", "other")
    for _ in range(2):
        reply = small_gateway.client.post(there, content=text, headers=editor)
        assert (reply.status_code, reply.json()) == (201, {"stored": 2})
    scores = [kept.rating.score for kept in small_gateway.registry.ratings("alpha/other")]
    assert scores == [0.5, 0.7]


@pytest.mark.parametrize("said", [("response", "notes"), ("chosen", "rejected")])
def test_long_ratings_come_a_few_at_a_time(
    small_gateway: SmallGateway, editor: dict[str, str], said: tuple[str, str]
) -> None:
    longest: dict[str, Any] = {name: name[0] * MAX_TEXT for name in ("prompt", *said)}
    if "response" in said:
        longest["score"] = 0.5
    sent = 2 * MAX_EXPORTED_CHARS // (3 * MAX_TEXT)
    lines = "\n".join([json.dumps(longest)] * sent)
    reply = small_gateway.client.post(LINES, content=lines, headers=editor)
    assert reply.json() == {"stored": sent}
    numbers, after = list[int](), 0
    while text := small_gateway.get(f"{LINES}?after={after}", editor).text:
        assert len(text) <= MAX_EXPORTED_CHARS + 3 * MAX_TEXT
        numbers += [json.loads(line)["number"] for line in text.splitlines()]
        after = numbers[-1]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == sent


def test_one_wrong_line_keeps_all_others_out(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    good = json.dumps(ONE)
    for bad in ('{"prompt": 1}', "{", '{"score": NaN}', "[" * 50_000, '"text"'):
        reply = small_gateway.client.post(LINES, content=f"{good}\n{bad}\n", headers=editor)
        assert reply.status_code == 422, reply.text
        assert reply.json()["detail"].startswith("line 2: "), reply.text
    assert small_gateway.registry.ratings() == ()


def test_a_person_s_ratings_are_deleted_on_request(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    ada = small_gateway.bearer("ada")
    small_gateway.client.post(PATH, json=ONE, headers=ada)
    small_gateway.client.post(PATH, json=ONE | {"rater": "user-7"}, headers=editor)
    small_gateway.client.post(PATH, json=ONE | {"rater": "user-8"}, headers=editor)
    answer = small_gateway.client.delete("/api/me/feedback", headers=ada).json()
    assert answer == {"deleted": 1, "lateRewards": 0, "trainedFrom": []}
    lines = exported(small_gateway, editor)
    assert len({line["raterId"] for line in lines}) == 2
    path = f"/api/projects/alpha/raters/{lines[0]['raterId']}"
    assert small_gateway.client.delete(path, headers=editor).status_code == 403
    assert small_gateway.client.delete(path, headers=ada).json()["deleted"] == 1
    assert exported(small_gateway, editor) == lines[1:]
    assert small_gateway.actions("alpha").count("ratings deleted") == 2


def test_what_the_audit_cannot_have_is_not_done(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    ada, line = small_gateway.bearer("ada"), json.dumps(ONE)
    assert small_gateway.client.post(PATH, json=ONE, headers=ada).status_code == 200

    def rename(old: str, new: str) -> None:
        small_gateway.accounts.run(
            lambda session, _: session.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))
        )

    rename("audit", "away")
    assert small_gateway.client.post(LINES, content=line, headers=editor).status_code >= 500
    assert small_gateway.client.delete("/api/me/feedback", headers=ada).status_code >= 500
    rename("away", "audit")
    assert len(small_gateway.registry.ratings("alpha/my_agent")) == 1
    assert small_gateway.client.post(LINES, content=line, headers=editor).json() == {"stored": 1}
    assert small_gateway.client.delete("/api/me/feedback", headers=ada).json()["deleted"] == 1
    assert len(small_gateway.registry.ratings("alpha/my_agent")) == 1


@pytest.mark.parametrize("agent", ["..", "a b", "x" * 40, "a%2fb", "%00", "-a"])
def test_an_agent_s_name_is_a_name(small_gateway: SmallGateway, editor: dict[str, str], agent: str) -> None:
    reply = small_gateway.client.post(f"/api/policies/feedback/{agent}", json=ONE, headers=editor)
    assert reply.status_code in {404, 405, 422}
    assert small_gateway.registry.ratings() == ()
