"""Feedback in its other forms, on each kind of database: pairs, files of Parquet, rewards that came late."""

import io
import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="feedback in Parquet needs the extra parquet")

import pyarrow as pa
from pyarrow import parquet

from gateway.feedback import parquet_tables
from gateway.feedback.feedback_rows import MAX_ROWS
from gateway.feedback.parquet_reader import REFUSED
from gateway.store.tables import Role
from tests.support.gateway.small_gateway import SmallGateway
from workloads.goals.traces.late_rewards import read_late
from workloads.language.feedback.examples import Preference, Scored
from workloads.language.feedback.reading import Source, read
from workloads.language.feedback.scale import parse_scale

AGENT = "/api/projects/alpha/agents/my_agent"
FEEDBACK, PAIRS, LATE = f"{AGENT}/feedback", f"{AGENT}/pairs", f"{AGENT}/late-rewards"
ONE = {"prompt": "What is 2 + 2?", "response": "4", "score": 0.9, "runId": "run-1"}
PAIR = {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5", "notes": "ä", "version": 3}
REWARDS = [{"episode": "monday", "step": step, "amount": 0.5} for step in (3, 3, 4)]
BINARY = {"Content-Type": parquet_tables.PARQUET}


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


def table_of(rows: list[dict[str, Any]]) -> bytes:
    """A file as somebody else's program writes it."""
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def test_which_of_two_is_better_is_stored_once(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    """As it was given; the key with another pair is a conflict, and a score under it, too."""
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
    """And nothing is stored: neither two answers that are the same, nor a pair with a score."""
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
    """As JSON lines and as Parquet; nothing in it is a bad row."""
    give_both(small_gateway, editor)
    for name, query in (("export.jsonl", ""), ("export.parquet", "?format=parquet")):
        reply = small_gateway.get(f"{FEEDBACK}{query}", editor)
        assert reply.status_code == 200, reply.text
        (tmp_path / name).write_bytes(reply.content)
        found = read(Source(place=str(tmp_path / name), scale=parse_scale("0:1")))
        assert (found.bad.count, [type(one) for one in found.examples]) == (0, [Scored, Preference])
        pair = found.examples[1]
        assert isinstance(pair, Preference)
        assert (pair.chosen, pair.rejected) == ("4", "5")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_export_of_both_forms_may_be_taken_in_elsewhere(
    small_gateway: SmallGateway, editor: dict[str, str], form: str
) -> None:
    """With all that was said; what has a key is stored once, however often it is sent."""
    give_both(small_gateway, editor)
    reply = small_gateway.get(f"{FEEDBACK}?format={form}", editor)
    headers = editor | {"Content-Type": reply.headers["content-type"]}
    there = FEEDBACK.replace("my_agent", "other")
    for _ in range(2):
        taken = small_gateway.client.post(there, content=reply.content, headers=headers)
        assert (taken.status_code, taken.json()) == (201, {"stored": 2}), taken.text
    once = stored(small_gateway)
    assert stored(small_gateway, "other") == [*once, once[0]]


def test_a_table_has_types_and_goes_on_behind_a_number(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    """A time is a time; behind the last row there is none."""
    give_both(small_gateway, editor)
    reply = small_gateway.get(f"{FEEDBACK}?format=parquet&limit=1", editor)
    assert reply.headers["content-type"] == parquet_tables.PARQUET
    table = parquet.read_table(io.BytesIO(reply.content))
    assert table.num_rows == 1
    assert str(table.schema.field("createdAt").type) == "timestamp[us, tz=UTC]"
    assert str(table.schema.field("score").type) == "double"
    (number,) = table["number"].to_pylist()
    rest = small_gateway.get(f"{FEEDBACK}?format=parquet&after={number + 1}", editor)
    assert parquet.read_table(io.BytesIO(rest.content)).num_rows == 0


def test_one_wrong_row_keeps_all_others_out(small_gateway: SmallGateway, editor: dict[str, str]) -> None:
    """It is named by its number and field; what is no table at all is refused in words."""
    good = {"prompt": "a", "response": "b", "score": 0.5}
    for bad, told in (
        ({"prompt": "a", "response": "b", "score": 7.0}, "row 2: score: "),
        ({"prompt": "a", "response": None, "score": 0.5}, "row 2: response: "),
        ({"prompt": "a", "response": "b", "score": float("nan")}, "row 2: score: "),
        (good | {"path": "/etc/passwd"}, "row 2: path: "),
        (good | {"notes": b"\xff"}, "row 2: notes: neither a text nor a number"),
        (good | {"notes": [{"deep": "x"}]}, "row 2: notes: "),
    ):
        content = table_of([dict.fromkeys(bad) | good, bad])
        reply = small_gateway.client.post(FEEDBACK, content=content, headers=editor | BINARY)
        assert reply.status_code == 422, reply.text
        assert reply.json()["detail"].startswith(told), reply.text
    for content in (
        b"",
        b"PAR1",
        b"PAR1" + b"\0" * 100 + b"PAR1",
        table_of([good])[:-20],
        b'{"prompt": "a"}',
    ):
        reply = small_gateway.client.post(FEEDBACK, content=content, headers=editor | BINARY)
        assert (reply.status_code, "no file in the format Parquet" in reply.text) == (422, True), reply.text
    many = table_of([good] * (MAX_ROWS + 1))
    reply = small_gateway.client.post(FEEDBACK, content=many, headers=editor | BINARY)
    assert (reply.status_code, f"at most {MAX_ROWS}" in reply.text) == (422, True)
    assert stored(small_gateway) == []


def written(table: pa.Table) -> bytes:
    """A file of a table."""
    sink = io.BytesIO()
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def test_tables_that_nobody_means_are_refused_in_words(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    """A million rows in ten kilobytes, columns within columns, two of a name, a name as long as a book."""
    good: dict[str, list[Any]] = {"prompt": ["a"], "response": ["b"], "score": [0.5]}
    nested = pa.string()
    for _ in range(400):
        nested = pa.list_(nested)
    arrays = [pa.array(values) for values in good.values()]
    tables = {
        "a million": pa.table({name: values * 1_000_000 for name, values in good.items()}),
        "nested": pa.table(good | {"notes": pa.nulls(1, nested)}),
        "a map": pa.table(good | {"notes": pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))}),
        "two of a name": pa.Table.from_arrays([*arrays, arrays[0]], [*good, "prompt"]),
        "a long name": pa.table(good | {"n" * 1_000_000: [b"\xff"]}),
        "a long name of a text": pa.table(good | {"n" * 1_000_000: ["x"]}),
    }
    for what, table in tables.items():
        content = written(table)
        reply = small_gateway.client.post(FEEDBACK, content=content, headers=editor | BINARY)
        assert (reply.status_code, reply.json()["error"]) == (422, "invalid"), what
        assert len(reply.text) < 1000, what
    assert stored(small_gateway) == []


def test_a_file_with_wrong_bytes_stores_a_table_or_nothing(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    """Wherever they are: no defect of the gateway, and rows only where it says that it stored them."""
    content, said = table_of([ONE] * 3), 0
    rng = random.Random(1)
    for _ in range(20):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(4, len(damaged) - 8)] = rng.randrange(256)
        reply = small_gateway.client.post(FEEDBACK, content=bytes(damaged), headers=editor | BINARY)
        assert reply.status_code in {201, 422}, reply.text
        said += reply.json().get("stored", 0)
    assert len(stored(small_gateway)) == said


def test_a_small_file_that_unfolds_into_gigabytes_is_refused(
    small_gateway: SmallGateway, editor: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that reads it, which has so much memory and no more; this one does not grow."""
    monkeypatch.setattr(parquet_tables, "READ_S", 600.0)  # its memory is tried, not the machine's speed
    once, every = pa.array(["x" * 20_000_000]), pa.array([0] * 1000, pa.int32())
    columns = {"prompt": pa.DictionaryArray.from_arrays(every, once), "response": ["b"] * 1000}
    sink = io.BytesIO()
    parquet.write_table(pa.table(columns | {"score": [0.5] * 1000}), sink, compression="zstd")
    content = sink.getvalue()
    assert len(content) < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = small_gateway.client.post(FEEDBACK, content=content, headers=editor | BINARY)
    assert (reply.status_code, "in the memory that there is" in reply.text) == (422, True), reply.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    assert stored(small_gateway) == []
    again = small_gateway.client.post(FEEDBACK, content=table_of([ONE]), headers=editor | BINARY)
    assert again.status_code == 201, again.text


def test_what_a_file_unfolds_into_is_bounded() -> None:
    """The reader stops at so many bytes, and says why."""
    content = table_of([{"prompt": "x" * 1000}] * 100)
    command = (sys.executable, "-P", "-m", "gateway.feedback.parquet_reader", "1000")
    stopped = subprocess.run((*command, "5000"), input=content, capture_output=True, check=False)
    assert (stopped.returncode, b"more than 5000 bytes" in stopped.stderr) == (REFUSED, True)
    whole = subprocess.run((*command, "500000"), input=content, capture_output=True, check=False)
    assert (whole.returncode, len(whole.stdout.splitlines())) == (0, 100)


def test_a_gateway_without_the_library_says_so(
    small_gateway: SmallGateway, editor: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, with what to do; JSON lines go on."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    exported = small_gateway.get(f"{FEEDBACK}?format=parquet", editor)
    sent = small_gateway.client.post(FEEDBACK, content=b"", headers=editor | BINARY)
    for reply in (exported, sent):
        assert (reply.status_code, "install pyarrow" in reply.json()["detail"]) == (409, True)
    assert small_gateway.get(FEEDBACK, editor).status_code == 200


def test_late_rewards_are_kept_shown_and_evaluated_by(
    small_gateway: SmallGateway, editor: dict[str, str], tmp_path: Path
) -> None:
    """Those of people and those that a server was too late for, together; an export is read as it is."""
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
    behind = small_gateway.get(f"{LATE}?after={rows[2]['number']}&format=parquet", editor)
    assert parquet.read_table(io.BytesIO(behind.content))["episode"].to_pylist() == ["tuesday"]


def test_a_late_reward_that_is_sent_again_counts_once(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    """Within a request and over several; its key with another one is a conflict, and nothing is kept."""
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
    """And nothing is stored."""
    body = {"rewards": [REWARDS[0] | change, REWARDS[1]]}
    reply = small_gateway.client.post(LATE, json=body, headers=editor)
    assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text
    assert small_gateway.registry.feedback("alpha/my_agent") == ()


def test_who_is_deleted_takes_their_pairs_and_late_rewards_along(
    small_gateway: SmallGateway, editor: dict[str, str]
) -> None:
    """Those in this project, of this rater; an owner reaches nothing of other projects or of servers."""
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
