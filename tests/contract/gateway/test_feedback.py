import json
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from penstock.gateway.routes.feedback_routes import MAX_EXPORTED_CHARS, MAX_ROWS, MAX_TEXT
from penstock.gateway.routes.satisfaction_routes import LEAST
from penstock.gateway.store.tables import Role
from penstock.workloads.goals.log_evaluation import read_late
from penstock.workloads.language.feedback import Preference, Scored, Source, parse_scale, read
from tests.support.gateway.small_gateway import SmallGateway

# ---- Feedback by HTTP, on each kind of database: stored once, exported, taken in, deleted on request.


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


def test_a_rating_is_stored_unchanged(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
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
def test_wrong_input_is_refused_by_field(
    small_gateway: SmallGateway, editor: dict[str, str], change: dict[str, Any], field: str
) -> None:
    reply = small_gateway.client.post(PATH, json=ONE | change, headers=editor)
    assert (reply.status_code, reply.json()["field"]) == (422, field)
    assert small_gateway.registry.ratings() == ()


def test_a_repeated_request_stores_nothing_more(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    headers = editor | {"Idempotency-Key": "a-1"}
    first, second = (small_gateway.client.post(PATH, json=ONE, headers=headers) for _ in range(2))
    assert first.json() == second.json()
    other = small_gateway.client.post(PATH, json=ONE | {"score": 0.1}, headers=headers)
    assert other.status_code == 409
    assert len(small_gateway.registry.ratings()) == 1


def test_another_project_imports_an_export(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
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
def test_long_ratings_are_listed_a_few_at_a_time(
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


def test_an_import_takes_blank_lines_lists_and_conversations(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    talk = [{"role": "user", "content": "two and two?"}]
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    rows = [ONE, ONE | {"prompt": talk, "response": answers["chosen"]}, {"prompt": talk} | answers]
    lines = [json.dumps(row) for row in rows]
    contents = ["\n\r\n".join(["", *lines, " "]), json.dumps(rows, indent=1), "\ufeff" + json.dumps(rows)]
    for content in contents:
        reply = small_gateway.client.post(LINES, content=content.encode(), headers=editor)
        assert (reply.status_code, reply.json()) == (201, {"stored": 3}), reply.text
    kept = [one.rating for one in small_gateway.registry.ratings()]
    said = [(one.prompt, one.response, one.rejected) for one in kept]
    both = [(talk, "chosen", None), (talk, "chosen", "rejected")]
    assert said == [(ONE["prompt"], ONE["response"], None), *both] * 3
    once = small_gateway.client.post(PATH, json=rows[1], headers=editor)
    assert once.status_code == 200, once.text
    assert exported(small_gateway, editor)[-1]["prompt"] == talk
    two = {"prompt": talk, "chosen": answers["chosen"] * 2, "rejected": "no"}
    prompts: list[Any] = [[], [{}], "", {}, [talk]]
    wrongs = [(ONE | {"prompt": prompt}, "prompt") for prompt in prompts]
    for wrong, place in [(two, "chosen"), *wrongs]:
        reply = small_gateway.client.post(LINES, content=json.dumps([ONE, wrong]), headers=editor)
        assert (reply.status_code, reply.json()["field"]) == (422, place)
        assert reply.json()["detail"].startswith(f"item 2: {place}: "), reply.text
    many = f"[{'0,' * 3_000_000}0]"
    assert small_gateway.client.post(LINES, content=many, headers=editor).status_code == 413


def test_rows_of_an_import_with_one_key_are_stored_and_counted_once(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    keyed = json.dumps(ONE | {"request": "k"})
    reply = small_gateway.client.post(LINES, content=f"{keyed}\n{json.dumps(ONE)}\n{keyed}", headers=editor)
    assert (reply.status_code, reply.json()) == (201, {"stored": 2})
    assert len(small_gateway.registry.ratings()) == 2
    other = json.dumps(ONE | {"request": "k", "score": 0.1})
    for content in (other, f"{json.dumps(ONE)}\n{other}"):
        assert small_gateway.client.post(LINES, content=content, headers=editor).status_code == 409
    assert len(small_gateway.registry.ratings()) == 2


def test_a_database_that_others_keep_locked_is_answered_with_when_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.registry.registry.BUSY_S", 0.01)
    monkeypatch.setattr("penstock.registry.registry.RETRY_S", 0.1)
    gateway = SmallGateway.in_folder(tmp_path)
    gateway.person("ada", "alpha", Role.OWNER)
    ada, holder = gateway.bearer("ada"), sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    for path, sent in ((PATH, {"json": ONE}), (LINES, {"content": json.dumps(ONE)})):
        reply = gateway.client.post(path, headers=ada, **sent)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1"), reply.text
    assert "feedback import" not in gateway.actions()
    holder.close()
    assert gateway.client.post(PATH, json=ONE, headers=ada).status_code == 200


def test_one_wrong_line_refuses_the_whole_request(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
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


def test_what_changes_nothing_leaves_no_row_in_the_audit(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    ada, viewer = small_gateway.bearer("ada"), small_gateway.token("alpha", Role.VIEWER)
    small_gateway.person("bob", "alpha", Role.VIEWER)
    before, project = small_gateway.actions(), "/api/projects/alpha"
    calls: list[tuple[str, str, dict[str, str], Any]] = [
        ("DELETE", "/api/me/feedback", viewer, {}),
        ("DELETE", f"{project}/raters/nobody", ada, {}),
        ("PUT", f"{project}/members/{small_gateway.people['bob']}", ada, {"json": {"role": "viewer"}}),
        ("POST", LINES, editor, {"content": b"\n"}),
    ]
    for method, path, headers, sent in calls:
        assert small_gateway.client.request(method, path, headers=headers, **sent).status_code < 300, path
    long = f"{project}/raters/{'x' * 20_000}"
    assert small_gateway.client.delete(long, headers=ada).status_code == 422
    assert small_gateway.actions() == before


def test_an_action_that_cannot_be_audited_is_not_done(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
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
def test_an_agents_name_must_be_valid(
    small_gateway: SmallGateway, editor: dict[str, str], agent: str
) -> None:
    reply = small_gateway.client.post(f"/api/policies/feedback/{agent}", json=ONE, headers=editor)
    assert reply.status_code in {404, 405, 422}
    assert small_gateway.registry.ratings() == ()


# ---- Feedback in its other forms, on each kind of database: pairs, rewards that came late.


AGENT = "/api/projects/alpha/agents/my_agent"
FEEDBACK, PAIRS, LATE = f"{AGENT}/feedback", f"{AGENT}/pairs", f"{AGENT}/late-rewards"
PAIR = {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5", "notes": "ä", "version": 3}
REWARDS = [{"episode": "monday", "step": step, "amount": 0.5} for step in (3, 3, 4)]


def stored(gateway: SmallGateway, agent: str = "my_agent") -> list[dict[str, Any]]:
    """What the registry has of an agent."""
    fields = ("prompt", "response", "score", "rejected", "version", "notes", "run", "key")
    return [
        {name: getattr(one.rating, name) for name in fields}
        for one in gateway.registry.ratings(f"alpha/{agent}")
    ]


def test_a_preference_is_stored_once(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
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
def test_an_invalid_pair_is_refused_by_field(
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


def test_reward_models_are_trained_from_an_export_of_both_forms(
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


def test_another_project_imports_an_export_of_both_forms(
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


def test_one_wrong_row_refuses_the_whole_request(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
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


def test_late_rewards_are_stored_shown_and_used_in_evaluations(
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


def test_a_repeated_late_reward_counts_once(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
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
def test_an_invalid_late_reward_is_refused_by_field(
    small_gateway: SmallGateway, editor: dict[str, str], change: dict[str, Any], field: str
) -> None:
    body = {"rewards": [REWARDS[0] | change, REWARDS[1]]}
    reply = small_gateway.client.post(LATE, json=body, headers=editor)
    assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
    assert small_gateway.registry.feedback("alpha/my_agent") == ()


def test_deleting_a_rater_deletes_their_pairs_and_late_rewards(
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


# ---- Links for feedback: rated once each, without an account, until they end.


LINKS = "/api/projects/alpha/agents/my_agent/links"
ITEMS = [{"prompt": f"question {number}", "response": "4", "runId": "run-1"} for number in range(2)]
LINKS_PAIR = {"prompt": "2 + 2?", "responses": ["4", "5"], "version": 3, "conversation": "c-1"}


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


def test_the_holder_of_a_link_rates_each_response_once(
    small_gateway: SmallGateway, ada: dict[str, str]
) -> None:
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


def test_a_key_of_a_caller_takes_no_place_of_a_link(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
    link = made(small_gateway, ada)
    for item, key in enumerate(f"link{blank}{link['id']}{blank}{{}}" for blank in "/ "):
        keyed = {"Idempotency-Key": key.format(item)}
        small_gateway.client.post(PATH, json=ONE, headers=ada | keyed)
        row = json.dumps(ONE | {"request": key.format(item)})
        small_gateway.client.post(LINKS.replace("links", "feedback"), content=row, headers=ada)
        assert rated(small_gateway, link, item, 0.9).status_code == 200
    export = small_gateway.get(LINES, ada).text
    there = LINES.replace("my_agent", "other")
    for _ in range(2):
        assert small_gateway.client.post(there, content=export, headers=ada).status_code == 201
    keys = [one.rating.request_key for one in small_gateway.registry.ratings("alpha/other")]
    assert len(keys) == len(set(keys)) == 3


def test_the_holder_of_a_link_chooses_between_two_responses(
    small_gateway: SmallGateway, ada: dict[str, str]
) -> None:
    link = made(small_gateway, ada, items=[LINKS_PAIR, *ITEMS, LINKS_PAIR])
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
def test_a_rating_that_does_not_fit_its_item_is_refused_by_field(
    small_gateway: SmallGateway, ada: dict[str, str], body: dict[str, Any], field: str
) -> None:
    link = made(small_gateway, ada, items=[LINKS_PAIR, ITEMS[0]])
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
def test_responses_that_cannot_be_rated_make_no_link(
    small_gateway: SmallGateway, ada: dict[str, str], change: dict[str, Any], field: str
) -> None:
    reply = small_gateway.client.post(LINKS, json={"items": [ITEMS[0], LINKS_PAIR | change]}, headers=ada)
    assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
    assert small_gateway.get(LINKS, ada).json() == {"links": []}


def test_a_link_expires_and_can_be_revoked(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
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


def test_the_secret_of_a_link_is_stored_as_a_digest(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
    link = made(small_gateway, ada)
    listed = small_gateway.get(LINKS, ada).json()["links"]
    assert [one["id"] for one in listed] == [link["id"]]
    assert link["link"] not in str(listed)


def test_a_list_of_links_holds_no_texts(small_gateway: SmallGateway, ada: dict[str, str]) -> None:
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


# ---- How content people are with a version, by HTTP, on each kind of database.


GIVE = "/api/policies/feedback/my_agent"
TELL = "/api/projects/alpha/agents/my_agent/conversations"
ASK = "/api/projects/alpha/agents/my_agent/satisfaction"


@pytest.fixture
def satisfaction_editor(small_gateway: SmallGateway) -> dict[str, str]:
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
    small_gateway: SmallGateway, satisfaction_editor: dict[str, str]
) -> None:
    assert told(small_gateway, satisfaction_editor, 7, 0, 40) == 40
    assert told(small_gateway, satisfaction_editor, 7, 30, 50) == 10
    for number in range(10):
        rate(small_gateway, satisfaction_editor, 0.0, version=7, conversation=f"c{number}")
        rate(small_gateway, satisfaction_editor, 1.0, version=7, conversation=f"c{number}")
    rate(small_gateway, satisfaction_editor, 0.5, version=7, conversation="c10")
    rate(small_gateway, satisfaction_editor, 1.0, version=7, conversation="c11", key="tone")
    rate(small_gateway, satisfaction_editor, 1.0, conversation="c12")
    (found,) = asked(small_gateway, satisfaction_editor)
    assert (found["conversations"], found["rated"], found["thumbsUp"]) == (50, 11, 10)
    assert (found["ratingRate"], found["satisfaction"]) == (11 / 50, 10 / 50)
    # Wilson's interval of 10 in 50, worked out by hand.
    assert (found["low"], found["high"]) == pytest.approx((0.112438, 0.330373), abs=1e-5)
    (tone,) = asked(small_gateway, satisfaction_editor, "?key=tone")
    assert (tone["rated"], tone["thumbsUp"]) == (1, 1)


def test_too_few_conversations_give_no_satisfaction(
    small_gateway: SmallGateway, satisfaction_editor: dict[str, str]
) -> None:
    told(small_gateway, satisfaction_editor, 7, 0, LEAST - 1)
    rate(small_gateway, satisfaction_editor, 1.0, version=7, conversation="c0")
    for _ in range(LEAST):
        rate(small_gateway, satisfaction_editor, 1.0, version=8)
    newest, before = asked(small_gateway, satisfaction_editor)
    assert [one["verdict"] for one in (newest, before)] == ["cannot tell", "cannot tell"]
    assert (newest["satisfaction"], newest["rated"], newest["ratingRate"]) == (None, LEAST, None)
    assert (before["satisfaction"], before["conversations"]) == (None, LEAST - 1)
    assert told(small_gateway, satisfaction_editor, 7, LEAST - 1, LEAST) == 1
    assert asked(small_gateway, satisfaction_editor)[1]["verdict"] == "told"


def test_conversations_of_other_projects_are_not_counted(
    small_gateway: SmallGateway, satisfaction_editor: dict[str, str]
) -> None:
    told(small_gateway, satisfaction_editor, 7, 0, 3)
    stranger = small_gateway.token("beta")
    assert small_gateway.get(ASK, stranger).status_code == 404
    assert small_gateway.get(ASK.replace("my_agent", "other"), satisfaction_editor).json()["versions"] == []
    for wrong, field in (
        ({"version": 0, "conversations": ["a"]}, "version"),
        ({"version": 7, "conversations": []}, "conversations"),
        ({"version": 7, "conversations": ["x" * 129]}, "conversations.0"),
        ({"version": 7, "conversations": ["x"] * 1001}, "conversations"),
    ):
        reply = small_gateway.client.post(TELL, json=wrong, headers=satisfaction_editor)
        assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
