"""Tokens that were trained are tokens that a server sampled: each way in which they are not is found."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import pytest

from penstock.actor.link.ack_journal import SampleJournal, sample_files
from penstock.launch.audit.audit_command import Samples, check_samples, read_samples_of
from penstock.launch.audit.books import Journals, JournalSession, Lineage
from penstock.launch.audit.findings import Kind, Problem
from penstock.learner.ledger import DIGEST_BYTES, LineageEntry
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.conversation import Column, ColumnFragments
from penstock.workloads.plugin.fragments import HeaderFields
from tests.support.language.columns import TWO, turn

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


def problems(samples: Samples, *trained: Fragment, published: int = 3) -> list[Problem]:
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


def test_what_was_sampled_sent_and_trained_is_clean(tmp_path: Path) -> None:
    samples = record(tmp_path, [*ANSWERS, (5, 5)], fragment())
    assert problems(samples, fragment()) == []
    assert samples.counts() == {"answers": 3, "sent": 2, "trained": 2}


@pytest.mark.promise("token-trained-conversations-sampled")
def test_a_token_that_changed_after_it_was_drawn_is_found(tmp_path: Path) -> None:
    changed = replace(TWO, ids=(*TWO.ids[:3], 8, *TWO.ids[4:]))
    (problem,) = problems(record(tmp_path, ANSWERS, fragment(changed)), fragment(changed))
    assert problem.kind is Kind.CHANGED
    assert "conversation 0123abcd-1: tokens of version 3 were not sampled" in problem.what


@pytest.mark.promise("token-trained-conversations-sampled")
def test_a_payload_that_changed_behind_the_server_is_found(tmp_path: Path) -> None:
    changed = replace(TWO, ids=(*TWO.ids[:3], 8, *TWO.ids[4:]))
    (problem,) = problems(record(tmp_path, ANSWERS, fragment()), fragment(changed))
    assert (problem.kind, problem.session, problem.first) == (Kind.CHANGED, 1, 1)
    assert problem.what == "trained, and not what its server has sent"


def test_another_version_than_the_one_that_sampled_is_found(tmp_path: Path) -> None:
    found = problems(record(tmp_path, ANSWERS, fragment(), version=2), fragment())
    assert [one.kind for one in found] == [Kind.CHANGED] * 2


def test_tokens_that_are_sent_or_trained_twice_are_found(tmp_path: Path) -> None:
    twice = problems(record(tmp_path / "sent", ANSWERS, fragment(), fragment()), fragment(), fragment())
    assert [one.kind for one in twice] == [Kind.CHANGED] * 2
    (once,) = problems(record(tmp_path / "trained", ANSWERS, fragment()), fragment(), fragment())
    assert (once.kind, once.first) == (Kind.CHANGED, 2)


def test_a_version_that_was_never_published_is_found(tmp_path: Path) -> None:
    (problem,) = problems(record(tmp_path, ANSWERS, fragment()), fragment(), published=2)
    assert problem.what == "tokens are of weight version 3, the newest published is 2"


def test_turns_of_several_versions_are_told_apart(tmp_path: Path) -> None:
    column = Column(ids=TWO.ids, turns=(turn(3, -1, -2, version=3), turn(8, -3, version=4)))
    journal = SampleJournal(tmp_path, "r", "server-0", "0123abcd")
    for version, ids in ((3, (9, 2)), (4, (11,))):
        journal.sampled(CONVERSATION, version, [ids])
    journal.sent(CONVERSATION, fragment(column))
    journal.close()
    assert problems(read_samples_of([tmp_path], "r"), fragment(column), published=4) == []


def test_a_rollout_worker_beside_the_server_is_not_asked_for_a_record(tmp_path: Path) -> None:
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
