"""Feedback in its other forms, on each kind of database: pairs, rewards that came late."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.routes.feedback_routes import MAX_ROWS
from penstock.gateway.store.tables import Role
from penstock.workloads.goals.log_evaluation import read_late
from penstock.workloads.language.feedback import Preference, Scored, Source, parse_scale, read
from tests.support.gateway.small_gateway import SmallGateway

AGENT = "/api/projects/alpha/agents/my_agent"
FEEDBACK, PAIRS, LATE = f"{AGENT}/feedback", f"{AGENT}/pairs", f"{AGENT}/late-rewards"
ONE = {"prompt": "What is 2 + 2?", "response": "4", "score": 0.9, "runId": "run-1"}
PAIR = {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5", "notes": "ä", "version": 3}
REWARDS = [{"episode": "monday", "step": step, "amount": 0.5} for step in (3, 3, 4)]


@pytest.fixture
def editor(small_gateway: SmallGateway) -> dict[str, str]:
    """The header of a program that may give feedback in `alpha`."""
    small_gateway.person("ada", "alpha", Role.OWNER)
    return small_gateway.token("alpha")


def stored(gateway: SmallGateway, agent: str = "my_agent") -> list[dict[str, Any]]:
    """What the registry has of an agent."""
    fields = ("prompt", "response", "score", "rejected", "version", "notes", "run", "key")
    return [
        {name: getattr(one.rating, name) for name in fields}
        for one in gateway.registry.ratings(f"alpha/{agent}")
    ]


def test_which_of_two_is_better_is_stored_once(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    headers = editor | {"Idempotency-Key": "p-1"}
    first, second = (small_gateway.client.post(PAIRS, json=PAIR, headers=headers) for _ in range(2))
    assert first.status_code == 201, first.text
    assert first.json() == second.json()
    swapped = PAIR | {"chosen": "5", "rejected": "4"}
    assert small_gateway.client.post(PAIRS, json=swapped, headers=headers).status_code == 409
    scored = small_gateway.client.post("/api/policies/feedback/my_agent", json=ONE, headers=headers)
    assert scored.status_code == 409
    (kept,) = stored(small_gateway)
    assert (kept["response"], kept["rejected"], kept["score"]) == ("4", "5", None)
    assert (kept["version"], kept["notes"]) == (3, "ä")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rejected": "4"}, "rejected"),
        ({"rejected": None}, "rejected"),
        ({"chosen": ""}, "chosen"),
        ({"score": 0.5}, "score"),
        ({"response": "4"}, "response"),
        ({"rejected": "a\0b"}, "rejected"),
        ({"version": 0}, "version"),
    ],
)
def test_what_is_no_pair_is_refused_by_field(
    small_gateway: SmallGateway, editor: dict[str, str], change: dict[str, Any], field: str
) -> None:
    reply = small_gateway.client.post(PAIRS, json=PAIR | change, headers=editor)
    assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
    assert stored(small_gateway) == []


def give_both(gateway: SmallGateway, editor: dict[str, str]) -> None:
    """A score and a pair."""
    assert gateway.client.post("/api/policies/feedback/my_agent", json=ONE, headers=editor).status_code == 200
    headers = editor | {"Idempotency-Key": "p-1"}
    assert gateway.client.post(PAIRS, json=PAIR, headers=headers).status_code == 201


def test_an_export_of_both_forms_is_what_reward_models_are_trained_from(
    small_gateway: SmallGateway, editor: dict[str, str], tmp_path: Path
) -> None:
    give_both(small_gateway, editor)
    reply = small_gateway.get(FEEDBACK, editor)
    assert reply.status_code == 200, reply.text
    (tmp_path / "export.jsonl").write_bytes(reply.content)
    found = read(Source(place=str(tmp_path / "export.jsonl"), scale=parse_scale("0:1")))
    assert (found.bad.count, [type(one) for one in found.examples]) == (0, [Scored, Preference])
    pair = found.examples[1]
    assert isinstance(pair, Preference)
    assert (pair.chosen, pair.rejected) == ("4", "5")


def test_an_export_of_both_forms_may_be_taken_in_elsewhere(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    give_both(small_gateway, editor)
    reply = small_gateway.get(FEEDBACK, editor)
    headers = editor | {"Content-Type": reply.headers["content-type"]}
    there = FEEDBACK.replace("my_agent", "other")
    for _ in range(2):
        taken = small_gateway.client.post(there, content=reply.content, headers=headers)
        assert (taken.status_code, taken.json()) == (201, {"stored": 2}), taken.text
    once = stored(small_gateway)
    assert stored(small_gateway, "other") == [*once, once[0]]


def test_one_wrong_row_keeps_all_others_out(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    good = {"prompt": "a", "response": "b", "score": 0.5}
    for bad, detail in (
        ({"prompt": "a", "response": "b", "score": 7.0}, "line 2: score: "),
        ({"prompt": "a", "response": None, "score": 0.5}, "line 2: response: "),
        ({"prompt": "a", "response": "b", "score": float("nan")}, "line 2: score: "),
        (good | {"path": "/etc/passwd"}, "line 2: path: "),
        (good | {"notes": [{"deep": "x"}]}, "line 2: notes: "),
    ):
        content = f"{json.dumps(good)}\n{json.dumps(bad)}\n"
        reply = small_gateway.client.post(FEEDBACK, content=content, headers=editor)
        assert reply.status_code == 422, reply.text
        assert reply.json()["detail"].startswith(detail), reply.text
    reply = small_gateway.client.post(FEEDBACK, content=b"PAR1\0", headers=editor)
    assert (reply.status_code, "line 1: not JSON" in reply.text) == (422, True), reply.text
    many = f"{json.dumps(good)}\n" * (MAX_ROWS + 1)
    reply = small_gateway.client.post(FEEDBACK, content=many, headers=editor)
    assert (reply.status_code, f"at most {MAX_ROWS}" in reply.text) == (413, True)
    assert stored(small_gateway) == []


def test_late_rewards_are_kept_shown_and_evaluated_by(
    small_gateway: SmallGateway, editor: dict[str, str], tmp_path: Path
) -> None:
    reply = small_gateway.client.post(LATE, json={"rewards": REWARDS}, headers=editor)
    assert (reply.status_code, reply.json()) == (201, {"stored": 3})
    small_gateway.registry.add_feedback("alpha/my_agent", [("tuesday", 0, -1.0)], caller="a server")
    small_gateway.registry.add_feedback("beta/my_agent", [("theirs", 0, 9.0)])
    text = small_gateway.get(LATE, editor).text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["episode"], row["step"], row["amount"]) for row in rows] == [
        ("monday", 3, 0.5),
        ("monday", 3, 0.5),
        ("monday", 4, 0.5),
        ("tuesday", 0, -1.0),
    ]
    (tmp_path / "late.jsonl").write_text(text)
    assert read_late(str(tmp_path / "late.jsonl"), "") == {
        ("monday", 3): 1.0,
        ("monday", 4): 0.5,
        ("tuesday", 0): -1.0,
    }
    behind = small_gateway.get(f"{LATE}?after={rows[2]['number']}", editor).text
    assert [json.loads(line)["episode"] for line in behind.splitlines()] == ["tuesday"]


def test_a_late_reward_that_is_sent_again_counts_once(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    keyed = [one | {"request": f"k-{number // 2}"} for number, one in enumerate(REWARDS[:2] * 2)]
    for _ in range(2):
        assert small_gateway.client.post(LATE, json={"rewards": keyed}, headers=editor).status_code == 201
    assert len(small_gateway.registry.feedback("alpha/my_agent")) == 2
    other = {"rewards": [REWARDS[2], keyed[0] | {"amount": 0.7}]}
    assert small_gateway.client.post(LATE, json=other, headers=editor).status_code == 409
    assert len(small_gateway.registry.feedback("alpha/my_agent")) == 2
    there = small_gateway.client.post(LATE.replace("my_agent", "other"), json=other, headers=editor)
    assert there.status_code == 201


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amount": 1e7}, "rewards.0.amount"),
        ({"amount": "1"}, "rewards.0.amount"),
        ({"step": -1}, "rewards.0.step"),
        ({"step": 2**63}, "rewards.0.step"),
        ({"step": 1.5}, "rewards.0.step"),
        ({"episode": ""}, "rewards.0.episode"),
        ({"episode": "x" * 49}, "rewards.0.episode"),
        ({"episode": "a\0b"}, "rewards.0.episode"),
        ({"rater": "eve"}, "rewards.0.rater"),
    ],
)
def test_a_late_reward_that_is_none_is_refused_by_field(
    small_gateway: SmallGateway, editor: dict[str, str], change: dict[str, Any], field: str
) -> None:
    body = {"rewards": [REWARDS[0] | change, REWARDS[1]]}
    reply = small_gateway.client.post(LATE, json=body, headers=editor)
    assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
    assert small_gateway.registry.feedback("alpha/my_agent") == ()


def test_who_is_deleted_takes_their_pairs_and_late_rewards_along(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    ada, beta = small_gateway.bearer("ada"), small_gateway.token("beta")
    for rater in ("user-7", "user-8"):
        small_gateway.client.post(PAIRS, json=PAIR | {"rater": rater}, headers=editor)
        small_gateway.client.post(LATE, json={"rewards": REWARDS, "rater": rater}, headers=editor)
    small_gateway.client.post(LATE.replace("alpha", "beta"), json={"rewards": REWARDS}, headers=beta)
    small_gateway.registry.add_feedback("beta/my_agent", [("theirs", 0, 9.0)], caller="a-server")
    first = json.loads(small_gateway.get(FEEDBACK, editor).text.splitlines()[0])["raterId"]
    gone = small_gateway.client.delete(f"/api/projects/alpha/raters/{first}", headers=ada).json()
    assert gone == {"deleted": 1, "lateRewards": 3, "trainedFrom": []}
    assert len(small_gateway.registry.feedback("alpha/my_agent")) == 3
    small_gateway.client.delete("/api/projects/alpha/raters/a-server", headers=ada)
    assert len(small_gateway.registry.feedback("beta/my_agent")) == 4
    small_gateway.client.post(LATE, json={"rewards": REWARDS}, headers=ada)
    assert small_gateway.client.delete("/api/me/feedback", headers=ada).json()["lateRewards"] == 3
