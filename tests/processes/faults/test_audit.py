"""`penstock audit` on the records of a real run.

Clean as they are, and each way of tampering is found and named.

One run of real processes (Redis, broker, learner, actors with journals) is made once; the learner is killed
so that part of the log is not in any checkpoint. Each test tampers with a copy.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.actor.link.ack_journal import journal_files
from penstock.broker.log import keys
from penstock.launch.audit.audit_command import audit
from penstock.launch.audit.findings import AuditResult, Kind
from penstock.protocol.fragment import header_bytes, parse_header
from tests.support.fleet.fleet import Fleet, Shape
from tests.support.run import harness
from tests.support.run.harness import command
from tests.support.storage.redis_server import RedisServer, find_binaries

Entry = tuple[int, dict[bytes, bytes]]


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with several checkpoints, entries behind them in the log, and everything stopped."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    folder.mkdir()
    digests = f"actor.ack_journal={folder / 'journals'}"
    with Fleet(folder, Shape(actors=2, settings=(digests,))) as fleet:
        fleet.start_all()
        lineage = folder / "lineage.jsonl"
        fleet.wait(lambda: lineage.exists() and len(lineage.read_text().splitlines()) >= 4, "4 checkpoints")
        fleet.kill("learner")
        client = redis.Redis.from_url(fleet.redis_url)
        fleet.wait(lambda: _newest(client) >= _position(client) + 8, "entries that are in no checkpoint")
        client.close()
        for role in ("actor", "broker", "redis"):
            fleet.drain([name for name in fleet.members if name.startswith(role)])
    return folder


class Copy:
    """A copy of the ended run with a server on its log."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self.folder = folder
        self.server = server
        self.redis: Any = redis.Redis.from_url(server.url)
        self.position = _position(self.redis)

    def audit(self) -> AuditResult:
        return audit(self.folder, redis=self.server.url, journals=(self.folder / "journals",))

    def entries(self) -> list[Entry]:
        found = self.redis.xrange(keys.LOG)
        return [(int(name.partition(b"-")[0]), values) for name, values in found]

    def resident(self) -> Entry:
        return next(one for one in self.entries() if one[0] > self.position)

    def append(self, values: dict[bytes, bytes], payload: bytes) -> None:
        number = int(self.redis.hincrby(keys.STATE, "number", 1))
        self.redis.hincrby(keys.STATE, "acked", 1)
        self.redis.set(keys.payload(number), payload)
        self.redis.xadd(keys.LOG, values, id=keys.entry_id(number))

    def rewrite_lineage(self, change: Callable[[list[str]], list[str]]) -> None:
        path = self.folder / "lineage.jsonl"
        path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))

    def rewrite_journal(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        path = journal_files([self.folder / "journals"])[0]
        lines = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def copy(ended_run: Path, tmp_path: Path, short_folder: Path) -> Iterator[Copy]:
    folder = tmp_path / "run"
    shutil.copytree(ended_run, folder)
    binary = max(find_binaries(), key=lambda one: tuple(map(int, one.version.split("."))))
    for name in ("appendonly.aof", "appendonlydir"):
        source = folder / "redis" / name
        if source.exists():
            shutil.move(source, short_folder / name)
    with harness.redis(short_folder, binary=binary) as server:
        yield Copy(folder, server)


def test_the_audit_of_a_killed_run_is_clean_and_names_its_records(ended_run: Path) -> None:
    before = {path: path.read_bytes() for path in ended_run.rglob("*") if path.is_file()}
    process = command("audit", str(ended_run), "--json")
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(process.stdout)
    assert report["clean"]
    assert report["problems"] == []
    assert report["journalled"]["trained"] > 0
    assert report["journalled"]["resident"] >= 8
    assert set(report["journalled"]) == {"trained", "resident"}
    assert "2 files" in report["sources"]["journals"]
    assert "a copy of" in report["sources"]["log"]
    assert report["counters"]["acked"] == sum(report["fragments"].values())
    assert before == {path: path.read_bytes() for path in ended_run.rglob("*") if path.is_file()}


def test_the_list_is_printed_and_the_last_line_names_the_fault(copy: Copy) -> None:
    number, values = copy.resident()
    copy.redis.xdel(keys.LOG, keys.entry_id(number))
    header = parse_header(values[b"h"])
    process = command("audit", str(copy.folder), "--redis", copy.server.url)
    assert process.returncode == 1
    assert f"lost: session {header.session}, sequence {header.sequence}" in process.stdout
    assert "1 lost" in process.stderr.splitlines()[-1]


def test_a_log_entry_that_is_gone_is_lost(copy: Copy) -> None:
    number, values = copy.resident()
    copy.redis.xdel(keys.LOG, keys.entry_id(number))
    header = parse_header(values[b"h"])
    assert _named(copy.audit(), Kind.LOST) == {(header.session, header.sequence)}
    assert f"entry {number} is gone" in _words(copy.audit(), Kind.UNACCOUNTED)


def test_a_payload_that_is_gone_is_lost(copy: Copy) -> None:
    number, values = copy.resident()
    copy.redis.delete(keys.payload(number))
    assert _named(copy.audit(), Kind.LOST) == _names([(number, values)])


def test_an_entry_stored_twice_is_doubled(copy: Copy) -> None:
    number, values = copy.resident()
    copy.append(values, copy.redis.get(keys.payload(number)))
    verdict = copy.audit()
    assert _named(verdict, Kind.DOUBLED) == _names([(number, values)])
    assert _named(verdict, Kind.LOST) == set()


def test_a_fragment_that_two_checkpoints_name_is_doubled(copy: Copy) -> None:
    # Not the file's last line: the learner may have been killed before it committed that one.
    oldest, *_, newest = _chain(copy)
    session, ((first, _), *_) = next(iter(oldest["sessions"].items()))
    again = newest | {"left_out": {"stale": {session: [[first, first]]}}}

    def drop_again(lines: list[str]) -> list[str]:
        return [json.dumps(again) if json.loads(line) == newest else line for line in lines]

    copy.rewrite_lineage(drop_again)
    assert _named(copy.audit(), Kind.DOUBLED) == {(int(session), first)}


def test_experience_sent_again_under_a_new_number_is_doubled(copy: Copy) -> None:
    number, values = copy.resident()
    header = replace(parse_header(values[b"h"]), session=999, sequence=1)
    copy.append(values | {b"h": header_bytes(header)}, copy.redis.get(keys.payload(number)))
    verdict = copy.audit()
    assert _named(verdict, Kind.DOUBLED) == {(999, 1)}
    assert "the same experience as" in _words(verdict, Kind.DOUBLED)


def test_experience_repeated_within_a_session_is_doubled(copy: Copy) -> None:
    def repeat(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        last, before = lines[-1], lines[-2]
        return [*lines[:-1], last | {"slots": before["slots"]}]

    copy.rewrite_journal(repeat)
    assert "this experience is in sequence" in _words(copy.audit(), Kind.DOUBLED)


def test_a_payload_that_changed_in_the_log_is_named(copy: Copy) -> None:
    number, values = copy.resident()
    payload = bytearray(copy.redis.get(keys.payload(number)))
    payload[0] ^= 1
    copy.redis.set(keys.payload(number), bytes(payload))
    assert _named(copy.audit(), Kind.CHANGED) == _names([(number, values)])


def test_a_payload_that_changed_before_it_was_trained_is_named(copy: Copy) -> None:
    lines = (copy.folder / "lineage.jsonl").read_text().splitlines()
    digests = json.loads(lines[1])["digests"]
    session = next(iter(digests))
    first = json.loads(lines[1])["sessions"][session][0][0]
    wrong = json.loads(lines[1]) | {"digests": digests | {session: "00" * 8 + digests[session][16:]}}
    copy.rewrite_lineage(lambda found: [found[0], json.dumps(wrong), *found[2:]])
    assert (int(session), first) in _named(copy.audit(), Kind.CHANGED)


@pytest.mark.parametrize("which", [0, -1])
def test_a_lineage_line_that_is_gone_leaves_its_fragments_lost(copy: Copy, which: int) -> None:
    gone = _chain(copy)[which]
    copy.rewrite_lineage(
        lambda lines: [line for line in lines if json.loads(line)["checkpoint"] != gone["checkpoint"]]
    )
    verdict = copy.audit()
    assert f"no line for checkpoint {gone['checkpoint']}" in _words(verdict, Kind.UNACCOUNTED)
    if which != -1:  # what the newest consumed is in the log still
        session, ((first, _), *_rest) = next(iter(gone["sessions"].items()))
        assert (int(session), first) in _named(verdict, Kind.LOST)


def test_an_acknowledgement_that_was_never_stored_is_lost(copy: Copy) -> None:
    lost = set()

    def further(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        last = lines[-1]
        # Beyond what the log has: the actor may not have journalled its last acknowledgements.
        sequence = max(q for s, q in _names(copy.entries()) | {(0, 0)} if s in (last["session"], 0)) + 1
        lost.add((last["session"], max(sequence, last["sequence"] + 1)))
        return [*lines, last | {"sequence": max(lost)[1], "slots": [], "created_us": 0}]

    copy.rewrite_journal(further)
    assert _named(copy.audit(), Kind.LOST) == lost


def test_a_sequence_acknowledged_twice_is_doubled(copy: Copy) -> None:
    copy.rewrite_journal(lambda lines: [*lines, lines[-1]])
    assert "acknowledged twice" in _words(copy.audit(), Kind.DOUBLED)


def test_a_version_that_was_given_twice_is_named(copy: Copy) -> None:
    def reuse(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        version, update = lines[-1]["weights"][0]
        return [*lines[:-1], lines[-1] | {"weights": [[version, update + 1]]}]

    copy.rewrite_journal(reuse)
    assert "used twice" in _words(copy.audit(), Kind.ORDER)


@pytest.mark.parametrize("counter", ["acked", "log_lost", "number"])
def test_a_counter_that_went_wrong_is_named(copy: Copy, counter: str) -> None:
    copy.redis.hincrby(keys.STATE, counter, 1)
    assert _words(copy.audit(), Kind.UNACCOUNTED)


def _chain(copy: Copy) -> list[dict[str, Any]]:
    by_id = {
        (line := json.loads(text))["checkpoint"]: line
        for text in (copy.folder / "lineage.jsonl").read_text().splitlines()
    }
    head = json.loads(copy.redis.lindex(keys.COMMITS, -1))["checkpoint_id"]
    chain = []
    while head:
        chain.append(by_id[head])
        head = by_id[head]["parent"]
    return chain[::-1]


def _names(entries: list[Entry]) -> set[tuple[int, int]]:
    headers = [parse_header(values[b"h"]) for _, values in entries]
    return {(header.session, header.sequence) for header in headers}


def _named(verdict: AuditResult, kind: Kind) -> set[tuple[int, int]]:
    assert not verdict.clean
    return {
        (one.session, sequence)
        for one in verdict.problems
        if one.kind is kind and one.session
        for sequence in range(one.first, one.last + 1)
    }


def _words(verdict: AuditResult, kind: Kind) -> str:
    return "\n".join(one.what for one in verdict.problems if one.kind is kind)


def _position(client: Any) -> int:
    commit = client.lindex(keys.COMMITS, -1)
    return int(json.loads(commit)["position"]) if commit else 0


def _newest(client: Any) -> int:
    return int(client.hget(keys.STATE, "number") or 0)
