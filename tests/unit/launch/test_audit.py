import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actor.link.ack_journal import SampleJournal, sample_files
from penstock.broker.log.audit_log import HeldEntry, HeldLog, LostFragments, LostSessions
from penstock.broker.log.replies import Commit, Totals
from penstock.launch.audit import findings
from penstock.launch.audit.audit_command import Samples, check_samples, read_samples_of
from penstock.launch.audit.books import Books, Journals, JournalSession, Lineage, SessionHistory, read_lineage
from penstock.launch.audit.findings import Kind, Problem
from penstock.learner.ledger import DIGEST_BYTES, LineageEntry
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.conversation import Column, ColumnFragments
from penstock.workloads.plugin.fragments import HeaderFields
from tests.support.language.tiny_models import TWO, turn

# ---- The audit's verdict on made-up records: what is excused, what is not, and which record says so.


DIGEST = "ab" * 32
CLEAN_LINE: dict[str, Any] = {
    "checkpoint": "1-1",
    "parent": "",
    "first": 1,
    "last": 4,
    "trained": 3,
    "env_steps": 24,
    "exceptions": {"stale": [[2, 2]]},
    "version": 2,
    "sessions": {"7": [[1, 1], [3, 4]]},
    "left_out": {"stale": {"7": [[2, 2]]}},
}


def lineage(tmp_path: Path, *lines: dict[str, Any], head: str = "") -> Lineage:
    """The chain of lines written to a file."""
    path = tmp_path / "lineage.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_lineage(path, head or (lines[-1]["checkpoint"] if lines else ""))


def journals(*sequences: int, session: int = 7) -> Journals:
    """What one actor recorded."""
    digests = dict.fromkeys(sequences, bytes.fromhex(DIGEST)[:8])
    return Journals(sessions={session: JournalSession("actor-0", digests)})


def held(*entries: tuple[int, int], session: int = 7, **over: Any) -> HeldLog:
    """A log with (number, sequence) entries; a sequence of 0 is a marker."""
    number = max((number for number, _ in entries), default=4)
    counters = {"number": number, "acked": number, "log_lost": 0, "trimmed": 0, "reopened": 0, "epoch": 1}
    given: dict[str, Any] = {
        "run": "run-a",
        "number_before": number,
        "counters": counters,
        "entries": tuple(
            HeldEntry(number=number, session=session if sequence else 0, sequence=sequence, sha256=DIGEST)
            for number, sequence in entries
        ),
        "shadow": (),
        "commits": (),
        "publications": {},
        "lost_fragments": (),
        "lost_sessions": (),
        "lost_is_whole": True,
        "closed": False,
    }
    return HeldLog(**(given | over))


def problems(found: Journals, chain: Lineage, log: HeldLog | None, kind: Kind | None = None) -> list[Problem]:
    """What is wrong, of one kind."""
    return [one for one in Books(found, chain, log).check() if kind in (None, one.kind)]


@pytest.mark.parametrize(
    "damage",
    [
        {"sessions": {"seven": [[1, 1]]}},
        {"sessions": {"7": "all"}},
        {"digests": {"8": ""}},
        {"digests": {"7": "no digits"}},
        {"left_out": {"stale": {"seven": [[2, 2]]}}},
        {"first": "the first"},
    ],
)
def test_a_line_that_somebody_has_changed_is_a_problem(tmp_path: Path, damage: dict[str, Any]) -> None:
    found = lineage(tmp_path, CLEAN_LINE | damage)
    assert found.torn == 0
    assert "line 1 of lineage.jsonl cannot be read: it is damaged" in str(found.problems[0])


def test_a_line_that_is_its_own_parent_ends_the_chain(tmp_path: Path) -> None:
    found = lineage(tmp_path, CLEAN_LINE | {"parent": CLEAN_LINE["checkpoint"]})
    assert "as its own ancestor" in str(found.problems[0])


def test_ranges_without_end_are_counted_and_not_walked(tmp_path: Path) -> None:
    endless = {"sessions": {"7": [[1, 2**60]]}, "digests": {"7": "00" * 8}, "last": 2**60}
    found = problems(journals(1), lineage(tmp_path, CLEAN_LINE | endless), None)
    assert any("has not one digest for each fragment" in str(one) for one in found)


def test_lines_that_nest_without_end_are_damaged_and_a_cut_one_is_torn(tmp_path: Path) -> None:
    deep = '{"a":' * 100_000 + "{}" + "}" * 100_000
    (tmp_path / "lineage.jsonl").write_text(f'{deep}\n{{"checkpoint": "1-')
    found = read_lineage(tmp_path / "lineage.jsonl", "")
    assert (found.torn, len(found.problems)) == (1, 1)


def test_a_run_with_every_fragment_in_one_place_is_clean(tmp_path: Path) -> None:
    books = Books(journals(1, 2, 3, 4, 5), lineage(tmp_path, CLEAN_LINE), held((5, 5)))
    assert list(books.check()) == []
    assert +books.fragments == {"trained": 3, "stale": 1, "resident": 1}
    assert +books.journalled == {"trained": 3, "stale": 1, "resident": 1}


def test_a_fragment_acknowledged_and_in_no_book_is_lost(tmp_path: Path) -> None:
    (lost,) = problems(journals(1, 2, 3, 4, 5, 6), lineage(tmp_path, CLEAN_LINE), held((5, 5)))
    assert (lost.kind, lost.session, lost.first, lost.last) == (Kind.LOST, 7, 6, 6)


def test_a_gap_in_a_session_is_a_loss_even_without_a_journal(tmp_path: Path) -> None:
    line = CLEAN_LINE | {"sessions": {"7": [[1, 1], [3, 3], [5, 5]]}}
    (lost,) = problems(Journals(), lineage(tmp_path, line), held())
    assert (lost.kind, lost.first, lost.last) == (Kind.LOST, 4, 4)


def test_redis_record_of_a_loss_excuses_exactly_the_named_fragments(tmp_path: Path) -> None:
    log = held((5, 5), lost_fragments=(LostFragments(session=7, first=6, last=7),))
    books = Books(journals(*range(1, 9)), lineage(tmp_path, CLEAN_LINE), log)
    (lost,) = books.check()
    assert (lost.first, lost.last) == (8, 8)
    assert books.journalled["log_lost"] == 2


def test_only_a_session_opened_in_lost_seconds_is_excused(tmp_path: Path) -> None:
    chain = lineage(tmp_path, CLEAN_LINE)
    log = held(lost_sessions=(LostSessions(first=8, last=9),))
    assert problems(journals(1, 2, session=9), chain, log) == []
    assert len(problems(journals(1, 2, session=10), chain, log, Kind.LOST)) == 1


def test_log_lost_without_a_loss_of_redis_is_lost(tmp_path: Path) -> None:
    line = CLEAN_LINE | {
        "exceptions": {"log_lost": [[2, 2]]},
        "left_out": {"log_lost": {"7": [[2, 2]]}},
    }
    (lost,) = problems(Journals(), lineage(tmp_path, line), held(), Kind.LOST)
    assert (lost.first, lost.what) == (2, "booked log_lost, and Redis knows of no loss")
    excused = held(lost_fragments=(LostFragments(session=7, first=2, last=None),))
    assert problems(Journals(), lineage(tmp_path, line), excused, Kind.LOST) == []


def test_experience_that_a_resume_gave_up_is_named_by_the_lineage(tmp_path: Path) -> None:
    abandoned = CLEAN_LINE | {"checkpoint": "1-2", "sessions": {"7": [[1, 1], [3, 4]]}}
    begun_again = {
        **CLEAN_LINE,
        "checkpoint": "2-1",
        "last": 5,
        "trained": 1,
        "given_up": [[1, 4]],
        "exceptions": {"log_lost": [[1, 4]]},
        "sessions": {"8": [[1, 1]]},
        "left_out": {},
    }
    chain = lineage(tmp_path, abandoned, begun_again)
    assert problems(journals(1, 2, 3, 4), chain, held((5, 1), session=8)) == []
    honest = lineage(tmp_path, abandoned, begun_again | {"given_up": []})
    assert len(problems(journals(1, 2, 3, 4), honest, held((5, 1), session=8), Kind.LOST)) == 1


def test_a_fragment_in_two_lines_or_in_line_and_log_is_doubled(tmp_path: Path) -> None:
    second = CLEAN_LINE | {
        "checkpoint": "1-2", "parent": "1-1", "first": 5, "last": 5, "trained": 4, "exceptions": {},
        "sessions": {"7": [[4, 4]]}, "left_out": {},
    }  # fmt: skip
    (doubled,) = problems(Journals(), lineage(tmp_path, CLEAN_LINE, second), held((5, 4)), Kind.DOUBLED)
    assert (doubled.session, doubled.first, doubled.last) == (7, 4, 4)
    (doubled,) = problems(Journals(), lineage(tmp_path, CLEAN_LINE), held((5, 3)), Kind.DOUBLED)
    assert doubled.first == 3
    assert "resident" in doubled.what


def test_entries_kept_for_a_resume_are_checked_too(tmp_path: Path) -> None:
    log = held((3, 3), (4, 3), session=7)
    (doubled,) = problems(Journals(), lineage(tmp_path, CLEAN_LINE), log)
    assert (doubled.kind, doubled.first, doubled.what) == (Kind.DOUBLED, 3, "twice in the log")
    (unnamed,) = problems(Journals(), lineage(tmp_path, CLEAN_LINE), held((4, 1), session=8))
    assert (unnamed.kind, unnamed.session) == (Kind.UNACCOUNTED, 8)


def test_lines_that_do_not_add_up_are_named(tmp_path: Path) -> None:
    for change, words in (
        ({"trained": 4}, "do not make up"),
        ({"sessions": {"7": [[1, 1], [3, 3]]}}, "3 entries trained, 2 fragments named"),
        ({"left_out": {}}, "1 entries dropped as stale, 0 fragments named"),
        ({"first": 2}, "begins at entry 2"),
    ):
        found = problems(Journals(), lineage(tmp_path, CLEAN_LINE | change), held(), Kind.UNACCOUNTED)
        assert any(words in one.what for one in found), words


def test_a_commit_that_contradicts_its_line_is_named(tmp_path: Path) -> None:
    totals = Totals(trained=3, dropped={"stale": 1}, env_steps=24)
    good = Commit(checkpoint_id="1-1", manifest_sha256="", position=4, trim=0, totals=totals)
    chain = lineage(tmp_path, CLEAN_LINE)
    assert problems(Journals(), chain, held(commits=(good,))) == []
    bad = Commit(checkpoint_id="1-1", manifest_sha256="", position=4, trim=0, totals=Totals(trained=4))
    assert len(problems(Journals(), chain, held(commits=(bad,)), Kind.UNACCOUNTED)) == 2


def test_a_gap_in_the_log_needs_the_marker_of_a_reopening(tmp_path: Path) -> None:
    chain = lineage(tmp_path, CLEAN_LINE)
    (hole,) = problems(Journals(), chain, held((7, 1), session=8), Kind.UNACCOUNTED)
    assert "entries 5..6 are gone" in hole.what
    assert problems(Journals(), chain, held((7, 0), (8, 1), session=8), Kind.UNACCOUNTED) == []
    (tail,) = problems(Journals(), chain, held((5, 1), session=8, number_before=6), Kind.UNACCOUNTED)
    assert "entry 6 is gone" in tail.what


def test_checkpoint_and_version_numbers_only_rise(tmp_path: Path) -> None:
    second = CLEAN_LINE | {
        "checkpoint": "1-0", "parent": "1-1", "first": 5, "last": 5, "trained": 4, "exceptions": {},
        "sessions": {"8": [[1, 1]]}, "left_out": {}, "version": 1,
    }  # fmt: skip
    (order,) = problems(Journals(), lineage(tmp_path, CLEAN_LINE, second), held((5, 1), session=8))
    assert order.kind is Kind.ORDER
    torn = lineage(tmp_path, CLEAN_LINE, CLEAN_LINE | {"last": 5})
    assert any(one.kind is Kind.ORDER for one in torn.problems)
    assert problems(Journals(updates={9: 1}), lineage(tmp_path, CLEAN_LINE), held(publications={9: 2}))


def test_the_shadow_stream_is_not_counted(tmp_path: Path) -> None:
    line = CLEAN_LINE | {"sessions": {"7": [[1, 1], [3, 3], [5, 5]]}}
    assert problems(Journals(), lineage(tmp_path, line), held(shadow=((7, 4),))) == []
    told = journals(1, 2, 3, 4, 5)
    told.sessions[7].shadow.add(4)
    assert problems(told, lineage(tmp_path, line), held()) == []


def test_without_redis_only_the_lineage_is_checked(tmp_path: Path) -> None:
    assert problems(journals(1, 2, 3, 4), lineage(tmp_path, CLEAN_LINE), None) == []
    (lost,) = problems(journals(1, 2, 3, 4, 5), lineage(tmp_path, CLEAN_LINE), None)
    assert "there is no log to look in" in lost.what


# ---- The experience of a session, and the weights that each slot acted with, only move forward.


def test_weights_of_a_slot_that_go_back_are_found() -> None:
    history = SessionHistory(session=1)
    assert list(history.follow(1, [(0, 0, 0)], [(7, 7)])) == []
    assert list(history.follow(2, [(0, 0, 4)], [(8, 8)])) == []
    (problem,) = history.follow(3, [(0, 0, 8)], [(7, 7)])
    assert problem.kind is Kind.ORDER


def test_episodes_of_a_policy_server_take_newer_weights_each_in_its_own_time() -> None:
    history = SessionHistory(session=1)
    assert list(history.follow(1, [(0, 1, 0)], [(8, 8)])) == []
    assert list(history.follow(2, [(1, 2, 0)], [(7, 7)])) == []
    assert list(history.follow(3, [(1, 2, 4)], [(8, 8)])) == []


# ---- Ranges are sets: every operation agrees with Python's.


Numbers = st.sets(st.integers(1, 40))
Loose = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)).map(lambda one: (one[0], sum(one))))


def members(found: findings.Ranges) -> set[int]:
    """The numbers, each of which must be in one range only."""
    listed = list(findings.numbers(found))
    assert len(listed) == len(set(listed))
    return set(listed)


@given(Numbers, Numbers)
def test_subtract_and_intersect_agree_with_sets(left: set[int], right: set[int]) -> None:
    a, b = findings.of_numbers(left), findings.of_numbers(right)
    assert members(findings.subtract(a, b)) == left - right
    assert members(findings.intersect(a, b)) == left & right
    assert findings.merge(findings.subtract(a, b)) == findings.subtract(a, b)
    assert findings.count(a) == len(left)


@given(Loose)
def test_overlaps_are_numbers_in_several_ranges(loose: findings.Ranges) -> None:
    times = Counter(findings.numbers(loose))
    assert members(findings.overlaps(loose)) == {number for number, count in times.items() if count > 1}
    assert members(findings.merge(loose)) == set(times)


# ---- Tokens that were trained are tokens that a server sampled: each way in which they are not is found.


CONVERSATION: Final = "0123abcd-1"
ANSWERS: Final = ((9, 2), (11,))
"""What `TWO` sampled, under version 3."""


def fragment(column: Column = TWO) -> Fragment:
    """Of one column."""
    fields = HeaderFields(run="r", session=1, sequence=1, weights=Publication(version=3, update=2), round=0)
    return ColumnFragments(fragment_schema(Discrete(12), Discrete(12)), 1, 0).cut([column], fields)[0]


def record(folder: Path, answers: Sequence[Sequence[int]], *sent: Fragment, version: int = 3) -> Samples:
    """What a server has written of these answers and fragments, read again."""
    journal = SampleJournal(folder, "r", "server-0", "0123abcd")
    for ids in answers:
        journal.sampled(CONVERSATION, version, [ids])
    for one in sent:
        journal.sent(CONVERSATION, one)
    journal.close()
    return read_samples_of([folder], "r")


def samples_problems(samples: Samples, *trained: Fragment, published: int = 3) -> list[Problem]:
    """Where the learner has booked these, from session 1 of that server."""
    digests = b"".join(sha256(one.payload).digest()[:DIGEST_BYTES] for one in trained)
    line = LineageEntry(
        checkpoint="c",
        parent="",
        first=1,
        last=len(trained),
        trained=len(trained),
        env_steps=0,
        exceptions={},
        version=published,
        sessions={"1": [(1, len(trained))]} if trained else {},
        digests={"1": digests.hex()} if trained else {},
    )
    journals = Journals(sessions={1: JournalSession("server-0")})
    return list(check_samples(samples, journals, Lineage(lines=(line,)), None))


def test_fragments_sampled_sent_and_trained_are_clean(tmp_path: Path) -> None:
    samples = record(tmp_path, [*ANSWERS, (5, 5)], fragment())
    assert samples_problems(samples, fragment()) == []
    assert samples.counts() == {"answers": 3, "sent": 2, "trained": 2}


@pytest.mark.promise("token-trained-conversations-sampled")
def test_a_token_that_changed_after_it_was_drawn_is_found(tmp_path: Path) -> None:
    changed = replace(TWO, ids=(*TWO.ids[:3], 8, *TWO.ids[4:]))
    (problem,) = samples_problems(record(tmp_path, ANSWERS, fragment(changed)), fragment(changed))
    assert problem.kind is Kind.CHANGED
    assert "conversation 0123abcd-1: tokens of version 3 were not sampled" in problem.what


@pytest.mark.promise("token-trained-conversations-sampled")
def test_a_payload_changed_after_the_server_sent_it_is_found(tmp_path: Path) -> None:
    changed = replace(TWO, ids=(*TWO.ids[:3], 8, *TWO.ids[4:]))
    (problem,) = samples_problems(record(tmp_path, ANSWERS, fragment()), fragment(changed))
    assert (problem.kind, problem.session, problem.first) == (Kind.CHANGED, 1, 1)
    assert problem.what == "trained, and not what its server has sent"


def test_a_version_other_than_the_sampling_one_is_found(tmp_path: Path) -> None:
    found = samples_problems(record(tmp_path, ANSWERS, fragment(), version=2), fragment())
    assert [one.kind for one in found] == [Kind.CHANGED] * 2


def test_tokens_that_are_sent_or_trained_twice_are_found(tmp_path: Path) -> None:
    twice = samples_problems(
        record(tmp_path / "sent", ANSWERS, fragment(), fragment()), fragment(), fragment()
    )
    assert [one.kind for one in twice] == [Kind.CHANGED] * 2
    (once,) = samples_problems(record(tmp_path / "trained", ANSWERS, fragment()), fragment(), fragment())
    assert (once.kind, once.first) == (Kind.CHANGED, 2)


def test_a_version_that_was_never_published_is_found(tmp_path: Path) -> None:
    (problem,) = samples_problems(record(tmp_path, ANSWERS, fragment()), fragment(), published=2)
    assert problem.what == "tokens are of weight version 3, the newest published is 2"


def test_turns_of_several_versions_are_distinguished(tmp_path: Path) -> None:
    column = Column(ids=TWO.ids, turns=(turn(3, -1, -2, version=3), turn(8, -3, version=4)))
    journal = SampleJournal(tmp_path, "r", "server-0", "0123abcd")
    for version, ids in ((3, (9, 2)), (4, (11,))):
        journal.sampled(CONVERSATION, version, [ids])
    journal.sent(CONVERSATION, fragment(column))
    journal.close()
    assert samples_problems(read_samples_of([tmp_path], "r"), fragment(column), published=4) == []


def test_a_rollout_worker_next_to_the_server_needs_no_record(tmp_path: Path) -> None:
    samples = record(tmp_path, [])
    samples.actors = {"server-0"}
    line = LineageEntry(
        checkpoint="c",
        parent="",
        first=1,
        last=1,
        trained=1,
        env_steps=0,
        exceptions={},
        version=3,
        sessions={"2": [(1, 1)]},
        digests={"2": "00" * DIGEST_BYTES},
    )
    journals = Journals(sessions={2: JournalSession("actor-0")})
    assert list(check_samples(samples, journals, Lineage(lines=(line,)), None)) == []


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_that_a_crash_tore_is_counted(tmp_path: Path, cut: int) -> None:
    record(tmp_path, ANSWERS)
    (path,) = sample_files([tmp_path])
    path.write_bytes(path.read_bytes()[:-cut])
    samples = read_samples_of([tmp_path], "r")
    assert samples.answers + samples.torn >= 2
    assert samples.torn == (cut > 1)
