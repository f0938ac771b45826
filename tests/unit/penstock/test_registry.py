import hashlib
import math
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import event

from penstock.registry import feedback
from penstock.registry.canary import ClientReturn, Window
from penstock.registry.ratings import RatedConversation, Rating
from penstock.registry.records import (
    MAX_PINS,
    Evaluation,
    NewVersion,
    NotAllowed,
    Origin,
    SchemaMismatch,
    Traffic,
    UnknownVersion,
)
from penstock.registry.registry import REGISTRY, Registry, parse_url
from penstock.registry.weight_files import (
    FOLDER,
    LATEST,
    forget_kept,
    forget_unfinished,
    hold,
    kept_files,
    name_latest,
    path_of,
    read_kept,
    read_specification,
    write_kept,
)
from penstock.runtime.output_file import replace_file
from tests.support.storage.postgresql_server import with_registry

RECORDS: Final[dict[type, dict[str, Any]]] = {
    NewVersion: {
        "policy": "default", "version": 7, "run": "cartpole-v1-abc123", "update": 40, "sha256": "a" * 64,
        "size_bytes": 1024, "origin": Origin.BEST,
    },
    Traffic: {"policy": "default"},
    Evaluation: {"mean": 1.0, "std": 0.0, "episodes": 20},
    ClientReturn: {"client": "", "level": 0, "canary": True, "part": 0.5, "value": 0.0},
    Window: {"answers": 1},
    Rating: {"prompt": "p", "response": "a", "score": 1.0},
}  # fmt: skip
PINS: Final = {str(number): 1 for number in range(MAX_PINS + 1)}


@pytest.mark.parametrize(
    ("record", "change", "message"),
    [
        (NewVersion, {"policy": "My Policy"}, "policy='My Policy' is not an id"),
        (NewVersion, {"run": ""}, "run=''"),
        (NewVersion, {"version": 0}, "version=0"),
        (NewVersion, {"version": 2**53 + 1}, "version="),
        (NewVersion, {"update": -1}, "update=-1"),
        (NewVersion, {"size_bytes": -1}, "size_bytes=-1"),
        (NewVersion, {"sha256": "A" * 64}, "64 lower-case hexadecimal"),
        (NewVersion, {"configuration": "abc"}, "configuration='abc'"),
        (NewVersion, {"parent": 7}, "parent=7: must be below version=7"),
        (NewVersion, {"reason": "x" * 2000}, "reason of 2000 characters"),
        (Traffic, {"canary_share": 1.5}, "canary_share=1.5: must be between 0 and 1"),
        (Traffic, {"latest_share": float("nan")}, "latest_share=nan"),
        (Traffic, {"canary_share": 0.6, "latest_share": 0.5}, "more than 1 together"),
        (Traffic, {"experiment": "not one"}, "experiment="),
        (Traffic, {"pins": PINS}, "at most 256"),
        (Traffic, {"pins": {"": 1}}, "client key"),
        (Evaluation, {"mean": float("inf")}, "evaluation"),
        (Evaluation, {"std": -1.0}, "evaluation"),
        (Evaluation, {"episodes": 0}, "evaluation"),
        (ClientReturn, {"value": float("nan")}, "value=nan"),
        (ClientReturn, {"part": 0.0}, "part=0.0"),
        (ClientReturn, {"part": 1.0}, "part=1.0"),
        (ClientReturn, {"level": 3}, "level=3"),
        (Window, {"answers": 0}, "must not rise"),
        (Window, {"answers": 1, "failed": 2}, "must not rise"),
        (Window, {"answers": 2, "failed": 1, "not_finite": 2}, "must not rise"),
        (Window, {"slower": 1.5}, "must be"),
        (Window, {"slower": float("nan")}, "must be"),
        (Rating, {"score": None}, "give one of the two"),
        (Rating, {"rejected": "b"}, "give one of the two"),
        (Rating, {"score": math.nan}, "must be finite"),
        (Rating, {"score": math.inf}, "must be finite"),
    ],
)
def test_a_record_that_cannot_be_is_refused_by_name(
    record: type, change: dict[str, Any], message: str
) -> None:
    record(**RECORDS[record])
    with pytest.raises(ValueError, match=message):
        record(**RECORDS[record] | change)


def test_two_shares_may_add_up_to_one() -> None:
    for share in range(101):
        Traffic(policy="default", canary_share=share / 100, latest_share=1.0 - share / 100)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("registry", {"torch", "redis", "grpc", "gymnasium", "numpy"}),
        ("routing", {"torch", "redis", "grpc", "numpy", "sqlalchemy"}),
        ("canary", {"torch", "redis", "grpc", "numpy", "sqlalchemy"}),
    ],
)
def test_the_registry_loads_few_modules(module: str, absent: set[str]) -> None:
    code = f"import penstock.registry.{module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set() == absent & set(done.stdout.split())


MADE_BEFORE = Path(__file__).parents[2] / "processes/train/solved_run/registry.sqlite"
"""A registry of revision 0010 that another program made."""


def tables(file: Path) -> dict[str, str]:
    uri = f"file:{file}?mode=ro&immutable=1"
    made = sqlite3.connect(uri, uri=True).execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {name: " ".join(sql.split()) for name, sql in made}


def words(sql: str) -> list[str]:
    return sorted(sql.replace(",", " ").replace("(", " ( ").replace(")", " ) ").split())


def test_tables_of_an_older_registry_match_the_models(tmp_path: Path) -> None:
    Registry.open(f"sqlite:///{tmp_path}/registry.sqlite", migrate=True).close()
    made, before = tables(tmp_path / "registry.sqlite"), tables(MADE_BEFORE)
    assert set(made) == set(before)
    for name, sql in before.items():
        assert words(sql) == words(made[name]), name


def test_tables_that_are_there_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/a.sqlite"
    Registry.open(url, migrate=True).close()
    monkeypatch.setattr(REGISTRY.tables, "create_all", lambda *_: pytest.fail("they are made again"))
    for migrate in (True, False):
        with Registry.open(url, migrate=migrate) as registry:
            assert () == registry.list("default")


def test_missing_tables_are_not_made_without_permission(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    with pytest.raises(SchemaMismatch, match="no such file: open it once with migrate=True"):
        Registry.open(f"sqlite:///{file}")
    assert not file.exists()
    sqlite3.connect(file).execute("CREATE TABLE something (x)")
    with pytest.raises(SchemaMismatch, match="its tables are absent, this program needs 0010"):
        Registry.open(f"sqlite:///{file}")


@pytest.mark.parametrize("opened", [partial(Registry.open, migrate=True), Registry.open, Registry.read])
@pytest.mark.parametrize("revision", ["0009", "9999"])
def test_tables_of_another_revision_are_refused(
    tmp_path: Path, opened: Callable[[str], Registry], revision: str
) -> None:
    file = tmp_path / "a.sqlite"
    Registry.open(f"sqlite:///{file}", migrate=True).close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.close()
    before = file.read_bytes()
    message = (
        f"registry sqlite(.pysqlite)?:///{file}: its tables are of revision {revision}, this program needs "
        "0010: use the Penstock that made them, or another registry"
    )
    with pytest.raises(SchemaMismatch, match=message):
        opened(f"sqlite:///{file}")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "not a URL"),
        ("registry.sqlite", "not a URL"),
        ("mysql://ada:secret@host/registry", "'mysql' is not supported: use sqlite:///FILE or postgresql://"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_a_url_of_another_store_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)
    for scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        assert parse_url(f"{scheme}://host/registry").drivername == "postgresql+psycopg"


BLOB = b"weights" * 100
DIGEST = hashlib.sha256(BLOB).hexdigest()


def test_written_bytes_are_read_by_their_digest(tmp_path: Path) -> None:
    write_kept(tmp_path, 7, BLOB)
    assert read_kept(tmp_path, 7, DIGEST) == BLOB
    assert kept_files(tmp_path) == {7}
    with pytest.raises(ValueError, match=r"7\.safetensors: damaged: its SHA-256 is .*retire this one"):
        read_kept(tmp_path, 7, "0" * 64)
    path_of(tmp_path, 7).write_bytes(BLOB[:-1])
    with pytest.raises(ValueError, match="damaged"):
        read_kept(tmp_path, 7, DIGEST)
    with pytest.raises(ValueError, match=r"8\.safetensors: No such file.*is the version not retired"):
        read_kept(tmp_path, 8, DIGEST)


def test_a_half_written_file_is_no_version(tmp_path: Path) -> None:
    write_kept(tmp_path, 1, BLOB)
    for unfinished in ("2.safetensors.tmp", "2.safetensors.77-1.tmp"):
        (tmp_path / "policies" / unfinished).write_bytes(BLOB[:5])
    (tmp_path / "policies" / "final.safetensors").write_bytes(BLOB)
    assert kept_files(tmp_path) == {1}
    forget_unfinished(tmp_path)
    forget_kept(tmp_path, 1)
    forget_kept(tmp_path, 1)
    assert [path.name for path in (tmp_path / "policies").iterdir()] == ["final.safetensors"]


def test_concurrent_replacements_of_a_file_do_not_interfere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, sync = tmp_path / "paused.json", os.fsync
    other = threading.Thread(target=replace_file, args=(file, b"of the other"))

    def first_sync(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        other.start()
        other.join()
        assert file.read_bytes() == b"of the other"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", first_sync)
    replace_file(file, b"mine")
    assert file.read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["paused.json"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    learner = hold(tmp_path)
    assert learner is not None
    assert hold(tmp_path) is None
    learner.close()
    other = hold(tmp_path)
    assert other is not None
    other.close()


def test_a_folder_without_a_description_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="whose learner has begun"):
        read_specification(tmp_path)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "policy.json").write_text('{"run": "a"}')
    with pytest.raises(ValueError, match="cannot be read as the description of a run"):
        read_specification(tmp_path)


def test_latest_is_the_newest_kept_version(tmp_path: Path) -> None:
    latest = tmp_path / FOLDER / LATEST
    for version in (3, 9, 5):
        write_kept(tmp_path, version, b"%d" % version)
    assert latest.read_bytes() == b"9"
    forget_kept(tmp_path, 9)
    assert latest.read_bytes() == b"5"
    for version in (3, 5):
        forget_kept(tmp_path, version)
    assert not latest.is_symlink()
    (tmp_path / FOLDER / "final.safetensors").write_bytes(b"end")
    name_latest(tmp_path, "final.safetensors")
    assert latest.read_bytes() == b"end"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """With two versions of one policy, and one of another."""
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/registry.sqlite"), migrate=True) as opened:
        for policy, version in (("a", 3), ("a", 8), ("b", 5)):
            new = RECORDS[NewVersion] | {"policy": policy, "version": version}
            opened.register(NewVersion(**new), by="test")
        yield opened


def test_a_version_is_found_by_its_name_which_stays_with_it(registry: Registry) -> None:
    registry.name("a", 3, "v15")
    registry.name("a", 3, "v15")
    registry.name("a", 8, "v20.2")
    registry.name("b", 5, "v15")
    assert registry.number("a", "v15") == 3
    assert registry.labels("a") == registry.arms("a").labels == {"v15": 3, "v20.2": 8}
    assert registry.labels("c") == {}
    with pytest.raises(UnknownVersion, match="is called 'v99'"):
        registry.number("a", "v99")
    with pytest.raises(NotAllowed, match="is that of version 3"):
        registry.name("a", 8, "v15")
    with pytest.raises(UnknownVersion):
        registry.name("a", 4, "v16")
    assert registry.labels("a") == {"v15": 3, "v20.2": 8}


@pytest.mark.parametrize("label", ["", "15", "1v", "latest", "active", "v 1", "v/1", "ö", "v" * 64, "v1\n"])
def test_a_number_or_an_arm_is_no_label(registry: Registry, label: str) -> None:
    with pytest.raises(ValueError, match="label="):
        registry.name("a", 3, label)


def test_late_rewards_are_read_in_order_from_where_a_reader_stopped(registry: Registry) -> None:
    registry.add_feedback("default", [("s-1-x", 0, 1.5), ("s-1-x", 1, -2.0)])
    registry.add_feedback("other", [("s-2-y", 0, 9.0)])
    registry.add_feedback("default", [("s-3-z", 7, 0.25)])
    first = registry.feedback("default", limit=2)
    rest = registry.feedback("default", after=first[-1].number)
    assert [(row.episode, row.step, row.amount) for row in (*first, *rest)] == [
        ("s-1-x", 0, 1.5),
        ("s-1-x", 1, -2.0),
        ("s-3-z", 7, 0.25),
    ]


@pytest.mark.promise("clients-cannot-exhaust-server")
def test_a_caller_replaces_its_own_oldest_rewards_only(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MAX_KEPT_PER_CALLER", 10)
    registry.add_feedback("default", [("s-1-x", step, 0.0) for step in range(5)], caller="quiet")
    for first in range(100, 160, 7):
        late = [("s-2-y", step, 0.0) for step in range(first, first + 7)]
        registry.add_feedback("default", late, caller="loud")
    kept = [(row.episode, row.step) for row in registry.feedback("default")]
    assert [step for episode, step in kept if episode == "s-1-x"] == list(range(5))
    assert [step for episode, step in kept if episode == "s-2-y"] == list(range(153, 163))


def test_the_largest_project_makes_room_for_others(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MAX_KEPT", 20)
    registry.add_feedback("al/quiet", [("s-1-x", step, 0.0) for step in range(5)], caller="ada")
    registry.add_feedback("alone", [("s-1-x", step, 0.0) for step in range(5)])
    for step in range(100):
        policy, caller = f"alpha/agent-{step % 7}", f"user-{step}"
        registry.add_feedback(policy, [("s-2-y", step, 0.0)], caller=caller)
    kept = {
        policy: [row.step for row in registry.feedback(policy)]
        for policy in ("al/quiet", "alone", *(f"alpha/agent-{number}" for number in range(7)))
    }
    assert kept.pop("al/quiet") == kept.pop("alone") == list(range(5))
    assert sorted(step for steps in kept.values() for step in steps) == list(range(90, 100))


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (("x" * 49, 0, 0.0), "of 49 characters"),
        (("", 0, 0.0), "of 0 characters"),
        (("s-1-x", 2**63, 0.0), "step=9223372036854775808"),
        (("s-1-x", 0, float("nan")), "amount=nan"),
    ],
)
def test_one_reward_out_of_bounds_refuses_all_of_its_call(
    registry: Registry, reward: tuple[str, int, float], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        registry.add_feedback("default", [("s-1-x", 1, 1.0), reward])
    assert not registry.feedback("default")


CHAT = [{"role": "user", "content": "two and two?"}]


def test_ratings_are_read_unchanged(registry: Registry) -> None:
    given = [
        Rating(prompt="p", response="a", score=0.0, key="thumb", source="ada", conversation="c-1", version=7),
        Rating(prompt="p", response="b", score=-1.0),
        Rating(prompt=CHAT, response="four", rejected="five"),
    ]
    registry.add_ratings("default", given[:2])
    registry.add_ratings("other", given[2:])
    first = registry.ratings(limit=1)
    rest = registry.ratings(after=first[0].number)
    of_one = registry.ratings("default")
    assert given == [kept.rating for kept in (*first, *rest)]
    assert given[:2] == [kept.rating for kept in of_one]
    assert "other" == rest[-1].policy


def test_many_ratings_are_written_in_few_statements(registry: Registry) -> None:
    statements = list[str]()

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        statements.append(statement)

    event.listen(registry.database._engine, "before_cursor_execute", note)
    new = [Rating(prompt=CHAT, response=f"{one}", score=0.5, request_key=f"k{one}") for one in range(3000)]
    kept = registry.add_ratings("default", new)
    assert [one.rating for one in kept] == new
    assert kept == registry.add_ratings("default", new) == registry.ratings("default", limit=3000)
    assert len(statements) < 30


def test_the_newest_score_of_a_conversation_counts(registry: Registry) -> None:
    def rating(conversation: str, score: float, **other: Any) -> Rating:
        said: dict[str, Any] = {"key": "thumb", "rater": "ann", "conversation": conversation, **other}
        return Rating(prompt="p", response="a", score=score, **said)

    given = [
        rating("c-1", 1.0, version=7),
        rating("c-1", -1.0, version=8, rater="bob"),
        rating("c-2", -1.0),
        rating("c-2", 1.0),
        rating("c-2", -1.0, source="asked"),
        rating("c-2", -1.0, key="safety"),
        rating("c-3", 1.0, source="asked"),
        rating("", 1.0),
    ]
    registry.add_ratings("default", given)
    registry.add_ratings("other", [rating("c-9", 1.0)])
    found = registry.rated_conversations("default", "thumb", above=0.5, without="asked")
    everybody = registry.rated_conversations("default", "thumb", above=0.5)
    registry.delete_ratings("", "ann")
    left = registry.rated_conversations("default", "thumb", above=0.5)
    bobs = RatedConversation(conversation="c-1", rater="bob", is_well=False)
    assert found == (bobs, RatedConversation(conversation="c-2", rater="ann", is_well=True))
    assert [(one.conversation, one.is_well) for one in everybody] == [
        ("c-1", False),
        ("c-2", False),
        ("c-3", True),
    ]
    assert left == (bobs,)
