"""The audit's verdict on made-up records: what is excused, what is not, and which record says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.log.audit_log import HeldEntry, HeldLog, LostFragments, LostSessions
from penstock.broker.log.replies import Commit, Totals
from penstock.launch.audit.books import Books, Journals, JournalSession, Lineage, read_lineage
from penstock.launch.audit.findings import Kind, Problem

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
def test_a_line_that_somebody_has_changed_counts_as_torn(tmp_path: Path, damage: dict[str, Any]) -> None:
    assert lineage(tmp_path, CLEAN_LINE | damage).torn == 1


def test_every_fragment_in_one_place_is_clean(tmp_path: Path) -> None:
    books = Books(journals(1, 2, 3, 4, 5), lineage(tmp_path, CLEAN_LINE), held((5, 5)))
    assert list(books.check()) == []
    assert +books.fragments == {"trained": 3, "stale": 1, "resident": 1}
    assert +books.journalled == {"trained": 3, "stale": 1, "resident": 1}


def test_what_an_actor_saw_acknowledged_and_no_book_has_is_lost(tmp_path: Path) -> None:
    (lost,) = problems(journals(1, 2, 3, 4, 5, 6), lineage(tmp_path, CLEAN_LINE), held((5, 5)))
    assert (lost.kind, lost.session, lost.first, lost.last) == (Kind.LOST, 7, 6, 6)


def test_a_session_that_went_on_behind_a_gap_has_lost_it_without_any_journal(tmp_path: Path) -> None:
    line = CLEAN_LINE | {"sessions": {"7": [[1, 1], [3, 3], [5, 5]]}}
    (lost,) = problems(Journals(), lineage(tmp_path, line), held())
    assert (lost.kind, lost.first, lost.last) == (Kind.LOST, 4, 4)


def test_redis_record_of_a_loss_excuses_exactly_what_it_names(tmp_path: Path) -> None:
    log = held((5, 5), lost_fragments=(LostFragments(session=7, first=6, last=7),))
    books = Books(journals(*range(1, 9)), lineage(tmp_path, CLEAN_LINE), log)
    (lost,) = books.check()
    assert (lost.first, lost.last) == (8, 8)
    assert books.journalled["log_lost"] == 2


def test_a_session_drawn_in_lost_seconds_is_excused_and_no_other(tmp_path: Path) -> None:
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


def test_what_a_resume_gave_up_is_named_by_the_line_it_fell_back_behind(tmp_path: Path) -> None:
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


def test_entries_kept_for_a_resume_are_looked_at_too(tmp_path: Path) -> None:
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


def test_a_commit_that_says_otherwise_than_its_line_is_named(tmp_path: Path) -> None:
    totals = Totals(trained=3, dropped={"stale": 1}, env_steps=24)
    good = Commit(checkpoint_id="1-1", manifest_sha256="", position=4, trim=0, totals=totals)
    chain = lineage(tmp_path, CLEAN_LINE)
    assert problems(Journals(), chain, held(commits=(good,))) == []
    bad = Commit(checkpoint_id="1-1", manifest_sha256="", position=4, trim=0, totals=Totals(trained=4))
    assert len(problems(Journals(), chain, held(commits=(bad,)), Kind.UNACCOUNTED)) == 2


def test_a_hole_in_the_log_needs_the_marker_of_a_re_opening(tmp_path: Path) -> None:
    chain = lineage(tmp_path, CLEAN_LINE)
    (hole,) = problems(Journals(), chain, held((7, 1), session=8), Kind.UNACCOUNTED)
    assert "entries 5..6 are gone" in hole.what
    assert problems(Journals(), chain, held((7, 0), (8, 1), session=8), Kind.UNACCOUNTED) == []
    (tail,) = problems(Journals(), chain, held((5, 1), session=8, number_before=6), Kind.UNACCOUNTED)
    assert "entry 6 is gone" in tail.what


def test_checkpoints_and_versions_only_rise(tmp_path: Path) -> None:
    second = CLEAN_LINE | {
        "checkpoint": "1-0", "parent": "1-1", "first": 5, "last": 5, "trained": 4, "exceptions": {},
        "sessions": {"8": [[1, 1]]}, "left_out": {}, "version": 1,
    }  # fmt: skip
    (order,) = problems(Journals(), lineage(tmp_path, CLEAN_LINE, second), held((5, 1), session=8))
    assert order.kind is Kind.ORDER
    torn = lineage(tmp_path, CLEAN_LINE, CLEAN_LINE | {"last": 5})
    assert any(one.kind is Kind.ORDER for one in torn.problems)
    assert problems(Journals(updates={9: 1}), lineage(tmp_path, CLEAN_LINE), held(publications={9: 2}))


def test_the_shadow_stream_is_in_none_of_the_counts(tmp_path: Path) -> None:
    line = CLEAN_LINE | {"sessions": {"7": [[1, 1], [3, 3], [5, 5]]}}
    assert problems(Journals(), lineage(tmp_path, line), held(shadow=((7, 4),))) == []
    told = journals(1, 2, 3, 4, 5)
    told.sessions[7].shadow.add(4)
    assert problems(told, lineage(tmp_path, line), held()) == []


def test_without_redis_the_lineage_is_judged_by_itself(tmp_path: Path) -> None:
    assert problems(journals(1, 2, 3, 4), lineage(tmp_path, CLEAN_LINE), None) == []
    (lost,) = problems(journals(1, 2, 3, 4, 5), lineage(tmp_path, CLEAN_LINE), None)
    assert "there is no log to look in" in lost.what
