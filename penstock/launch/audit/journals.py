"""The actors' own records (`actor.ack_journal`), read for an audit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.actor.link.ack_journal import Acknowledged, journal_files, read_journal
from penstock.launch.audit.findings import Kind, Problem
from penstock.learner.ledger import DIGEST_BYTES
from penstock.protocol.slot_starts import Beginning

_SHADOW = "shadow"


@dataclass(slots=True)
class JournalSession:
    """The acknowledgements that one session's actor received.

    Sequence → first bytes of the payload's digest.
    """

    actor: str
    digests: dict[int, bytes] = field(default_factory=dict)
    shadow: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Journals:
    """All records of actors.

    files, lines, torn: how many. updates: version → update of weights that acted.
    """

    sessions: dict[int, JournalSession] = field(default_factory=dict)
    files: int = 0
    lines: int = 0
    torn: int = 0
    updates: dict[int, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_journals(folders: Sequence[Path], run: str) -> Journals:
    """Read every line of `run` in the folders; "": of any run."""
    journals = Journals()
    for path in journal_files(folders):
        journals.files += 1
        _read_file(journals, path, run)
    return journals


def _read_file(journals: Journals, path: Path, run: str) -> None:
    histories: dict[int, SessionHistory] = {}
    seen = Twins()
    for line in read_journal(path):
        if line is None:
            journals.torn += 1
        elif run in ("", line.run):
            journals.lines += 1
            _note(journals, line)
            history = histories.setdefault(line.session, SessionHistory(line.session))
            journals.problems += history.follow(line.sequence, line.slots, line.weights)
            journals.problems += seen.look(
                line.actor, line.session, line.sequence, line.created_us, line.sha256
            )


def _note(journals: Journals, line: Acknowledged) -> None:
    session = journals.sessions.setdefault(line.session, JournalSession(line.actor))
    if session.actor != line.actor:
        what = f"acknowledged to {session.actor} and to {line.actor}"
        journals.problems.append(_one(Kind.ORDER, line.session, line.sequence, what))
    if line.sequence in session.digests:
        what = "acknowledged twice to the same actor"
        journals.problems.append(_one(Kind.DOUBLED, line.session, line.sequence, what))
    session.digests[line.sequence] = bytes.fromhex(line.sha256)[:DIGEST_BYTES]
    if line.kind == _SHADOW:
        session.shadow.add(line.sequence)
    journals.problems += check_versions(journals.updates, line.weights)


def check_versions(updates: dict[int, int], weights: Sequence[tuple[int, int]]) -> Iterator[Problem]:
    """Note the update of each version; yields a problem for a version of two updates."""
    for version, update in weights:
        known = updates.setdefault(version, update)
        if known != update:
            what = f"weight version {version} is of update {known} and of update {update}: used twice"
            yield Problem(kind=Kind.ORDER, what=what)


class SessionHistory:
    """Experience of a session only moves forward: episode and first step of a slot rise with the sequence.

    So do the weights that a slot acted with. Slots may differ: each episode that a policy server acts for
    takes newer weights where its own experience is cut.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._reached: dict[int, tuple[int, int, int]] = {}
        self._versions: dict[int, int] = {}

    def follow(
        self, sequence: int, slots: Sequence[Beginning], weights: Sequence[tuple[int, int]]
    ) -> Iterator[Problem]:
        """Check the next fragment; yields a problem where it repeats experience or its weights went back."""
        for slot, episode, step in slots:
            at_episode, at_step, at = self._reached.get(slot, (-1, -1, 0))
            if (episode, step) <= (at_episode, at_step):
                what = (
                    (
                        f"slot {slot}, episode {episode}, first step {step}: this experience is in sequence "
                        f"{at} already"
                    )
                    if (episode, step) == (at_episode, at_step)
                    else f"slot {slot} goes back to episode {episode}, step {step}, behind sequence {at}"
                )
                yield _one(Kind.DOUBLED, self._session, sequence, what)
            self._reached[slot] = (episode, step, sequence)
        newest = max((version for version, _ in weights), default=0)
        held = max((self._versions.get(slot, 0) for slot, _, _ in slots), default=0)
        if 0 < newest < held:
            what = f"acted with weights {newest} after {held}"
            yield _one(Kind.ORDER, self._session, sequence, what)
        self._versions |= {slot: max(newest, self._versions.get(slot, 0)) for slot, _, _ in slots}


class Twins:
    """Finds the same payload made at the same moment by the same actor under two names.

    Sent again, renumbered.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], tuple[int, int]] = {}

    def look(
        self, actor: str, session: int, sequence: int, created_us: int, sha256: str
    ) -> Iterator[Problem]:
        """Check the next fragment of any session."""
        if not created_us or not sha256:
            return
        other = self._seen.setdefault((actor, created_us, sha256[:16]), (session, sequence))
        if other != (session, sequence):
            what = f"the same experience as session {other[0]}, sequence {other[1]}"
            yield _one(Kind.DOUBLED, session, sequence, what)


def _one(kind: Kind, session: int, sequence: int, what: str) -> Problem:
    return Problem(kind=kind, session=session, first=sequence, last=sequence, what=what)
