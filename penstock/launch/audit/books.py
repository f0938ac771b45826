"""The accounts of a run: every fragment that a record names, and the one place where it went.

    journals (acknowledged to an actor) ─┐
    lineage (trained, dropped: why)      ├─► per session, sequence numbers as ranges ─► problems, or none
    log (resident; lost with Redis)      ┘

A fragment is in one place of lineage and log. It is lost when it was acknowledged and is in none: a journal
has it, or its session went on behind it. A loss by a Redis that went back in time is excused only by
that Redis's own record of the sequences, and counted as `log_lost`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.actor.link.ack_journal import Acknowledged, journal_files, read_journal
from penstock.broker.log.audit_log import HeldEntry, HeldLog
from penstock.launch.audit import findings
from penstock.launch.audit.findings import Kind, Problem, Ranges, problem_at, problems_of
from penstock.launch.audit.lineage import Lineage
from penstock.learner.ledger import DIGEST_BYTES, Drop, LineageEntry
from penstock.protocol.fragment import Beginning

# ---- The actors' own records (`actor.ack_journal`), read for an audit.

_SHADOW = "shadow"


@dataclass(slots=True)
class JournalSession:
    """What a session's actor was acknowledged: sequence → first bytes of the payload's digest."""

    actor: str
    digests: dict[int, bytes] = field(default_factory=dict)
    shadow: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Journals:
    """All records of actors. files, lines, torn: how many. updates: version → update that acted."""

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
        journals.problems.append(problem_at(Kind.ORDER, line.session, line.sequence, what))
    if line.sequence in session.digests:
        what = "acknowledged twice to the same actor"
        journals.problems.append(problem_at(Kind.DOUBLED, line.session, line.sequence, what))
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
            yield Problem(Kind.ORDER, what)


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
                yield problem_at(Kind.DOUBLED, self._session, sequence, what)
            self._reached[slot] = (episode, step, sequence)
        newest = max((version for version, _ in weights), default=0)
        held = max((self._versions.get(slot, 0) for slot, _, _ in slots), default=0)
        if 0 < newest < held:
            what = f"acted with weights {newest} after {held}"
            yield problem_at(Kind.ORDER, self._session, sequence, what)
        self._versions |= {slot: max(newest, self._versions.get(slot, 0)) for slot, _, _ in slots}


class Twins:
    """Finds a payload, made at one moment by one actor, under two names: sent again, renumbered."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], tuple[int, int]] = {}

    def look(
        self, actor: str, session: int, sequence: int, created_us: int, sha256: str
    ) -> Iterator[Problem]:
        if not created_us or not sha256:
            return
        other = self._seen.setdefault((actor, created_us, sha256[:16]), (session, sequence))
        if other != (session, sequence):
            what = f"the same experience as session {other[0]}, sequence {other[1]}"
            yield problem_at(Kind.DOUBLED, session, sequence, what)


TRAINED: Final = "trained"
RESIDENT: Final = "resident"
SHADOW: Final = "shadow"
LOG_LOST: Final = Drop.LOG_LOST.value
NOWHERE: Final = "nowhere"
_FOREVER: Final = 2**53


@dataclass(slots=True)
class RecordedRanges:
    """The ranges of one session's fragments that records name: place → ranges, one for each record."""

    of: defaultdict[str, Ranges] = field(default_factory=lambda: defaultdict(list))

    def all_ranges(self) -> Ranges:
        """Return the ranges of every place but the shadow stream."""
        return [one for place, found in self.of.items() if place != SHADOW for one in found]


class Books:
    """Accounts built from the three records: call `check`, then read `fragments` and `journalled`."""

    def __init__(self, journals: Journals, lineage: Lineage, log: HeldLog | None) -> None:
        self._journals, self._lineage, self._log = journals, lineage, log
        self._places: defaultdict[int, RecordedRanges] = defaultdict(RecordedRanges)
        self.fragments: Counter[str] = Counter()
        self.journalled: Counter[str] = Counter()
        self._excuses = _excuses(lineage, log)
        self._note_lineage()
        self._note_log()

    def check(self) -> Iterator[Problem]:
        """Yield every problem; fills `fragments` and `journalled`."""
        yield from self._journals.problems
        yield from self._lineage.problems
        for session in sorted({*self._places, *self._journals.sessions}):
            yield from self._check_session(session)
        yield from self._check_digests()
        if self._log is not None:
            yield from _check_experience(self._log.entries, self._journals.updates)
            yield from check_versions(self._journals.updates, list(self._log.publications.items()))
            yield from _check_counters(self._log, self._lineage)
            yield from self._check_retained(self._log)

    # ---- where things are

    def _note_lineage(self) -> None:
        for line in self._lineage.lines:
            for session, found in line.sessions.items():
                self._places[int(session)].of[TRAINED] += _pairs(found)
            for reason, sessions in line.left_out.items():
                for session, found in sessions.items():
                    self._places[int(session)].of[reason] += _pairs(found)

    def _note_log(self) -> None:
        if self._log is None:
            return
        for entry in self._log.entries:
            if entry.session and entry.number > self._lineage.position:
                self._places[entry.session].of[RESIDENT].append((entry.sequence, entry.sequence))
        for session, sequence in self._log.shadow:
            self._places[session].of[SHADOW].append((sequence, sequence))

    # ---- sessions

    def _check_session(self, session: int) -> Iterator[Problem]:
        place, journal = self._places[session], self._journals.sessions.get(session)
        found = place.all_ranges()
        yield from problems_of(Kind.DOUBLED, session, findings.overlaps(found), self._where_twice(place))
        held = findings.merge(found)
        shadow = findings.merge([*place.of[SHADOW], *findings.of_numbers(journal.shadow if journal else ())])
        acked = findings.subtract(findings.of_numbers(journal.digests), shadow) if journal else []
        # A session's log holds 1..s in order, so every sequence before a known one was acknowledged as well.
        through = max((last for _, last in [*held, *acked]), default=0)
        absent = findings.subtract(findings.subtract([(1, through)] if through else [], held), shadow)
        excuses = self._lost_with_redis(session)
        excused = findings.intersect(absent, excuses)
        lost = findings.subtract(absent, excused) if self._lineage.names_fragments else []
        yield from problems_of(
            Kind.LOST, session, findings.intersect(lost, acked), self._nowhere("acknowledged")
        )
        behind = findings.subtract(lost, acked)
        yield from problems_of(Kind.LOST, session, behind, self._nowhere("its session went on behind it"))
        if self._log is not None:
            booked = findings.subtract(findings.merge(place.of.get(LOG_LOST, [])), excuses)
            what = "booked log_lost, and Redis knows of no loss"
            yield from problems_of(Kind.LOST, session, booked, what)
        self._count(place, excused, lost, acked, shadow)

    def _count(
        self, place: RecordedRanges, excused: Ranges, lost: Ranges, acked: Ranges, shadow: Ranges
    ) -> None:
        places = {name: findings.merge(found) for name, found in place.of.items() if name != SHADOW}
        places[LOG_LOST] = findings.merge([*places.get(LOG_LOST, []), *excused])
        places[NOWHERE] = lost
        for name, found in places.items():
            self.fragments[name] += findings.count(found)
            self.journalled[name] += findings.count(findings.intersect(found, acked))
        self.fragments[SHADOW] += findings.count(shadow)

    def _lost_with_redis(self, session: int) -> Ranges:
        """Return the sequences of a session that Redis recorded as lost, or a resume gave up.

        Only a resume with --allow-loss gives sequences up.
        """
        found = list(self._excuses.get(session, []))
        if self._log is not None and any(one.first <= session <= one.last for one in self._log.lost_sessions):
            found.append((1, _FOREVER))
        return findings.merge(found)

    def _where_twice(self, place: RecordedRanges) -> str:
        twice = [name for name, found in place.of.items() if findings.overlaps(found)]
        return f"more than once in {', '.join(twice)}" if twice else f"in {' and in '.join(sorted(place.of))}"

    def _nowhere(self, why: str) -> str:
        return f"{why}, and neither in the lineage" + (
            " (there is no log to look in)" if self._log is None else " nor in the log"
        )

    # ---- payloads

    def _check_digests(self) -> Iterator[Problem]:
        trained = {} if self._log is None else _wanted(self._log.entries)
        for line in self._lineage.lines:
            for session, digests in line.digests.items():
                yield from self._compare_line(line, int(session), bytes.fromhex(digests), trained)
        if self._log is None:
            return
        for entry in self._log.entries:
            journal = self._journals.sessions.get(entry.session)
            known = journal.digests.get(entry.sequence) if journal is not None else None
            yield from _compare(entry, known, "what its actor recorded")
            if entry.session and not entry.sha256 and entry.number > self._log.counters["trimmed"]:
                what = f"entry {entry.number} of the log has no payload"
                yield problem_at(Kind.LOST, entry.session, entry.sequence, what)

    def _compare_line(
        self, line: LineageEntry, session: int, digests: bytes, held: dict[tuple[int, int], HeldEntry]
    ) -> Iterator[Problem]:
        sequences = list(findings.numbers(line.sessions[str(session)]))
        if len(digests) != DIGEST_BYTES * len(sequences):
            what = f"checkpoint {line.checkpoint}: session {session} has not one digest for each fragment"
            yield Problem(Kind.UNACCOUNTED, what)
            return
        journal = self._journals.sessions.get(session)
        known = {} if journal is None else journal.digests
        for index, sequence in enumerate(sequences):
            digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if known.get(sequence, digest) != digest:
                what = "what was trained is not what its actor recorded"
                yield problem_at(Kind.CHANGED, session, sequence, what)
            if (session, sequence) in held:
                yield from _compare(held[session, sequence], digest, "what was trained")

    # ---- the log behind the position

    def _check_retained(self, log: HeldLog) -> Iterator[Problem]:
        """Yield a problem for entries kept for a resume that the lineage lacks.

        Also for any entry that the log has twice.
        """
        twice = [key for key, found in _by_name(log.entries).items() if len(found) > 1]
        for session, sequence in twice:
            yield Problem(
                kind=Kind.DOUBLED, session=session, first=sequence, last=sequence, what="twice in the log"
            )
        if not self._lineage.names_fragments:
            return
        retained: defaultdict[int, list[int]] = defaultdict(list)
        for entry in log.entries:
            if entry.session and entry.number <= self._lineage.position:
                retained[entry.session].append(entry.sequence)
        for session, sequences in retained.items():
            held = findings.merge(self._places[session].all_ranges())
            unnamed = findings.subtract(findings.of_numbers(sequences), held)
            what = "in the log behind the position, and no checkpoint names it"
            yield from problems_of(Kind.UNACCOUNTED, session, unnamed, what)


def _excuses(lineage: Lineage, log: HeldLog | None) -> dict[int, Ranges]:
    """Return session → sequences that Redis recorded as lost, or that a resume with --allow-loss gave up."""
    found: defaultdict[int, Ranges] = defaultdict(list)
    for one in log.lost_fragments if log is not None else ():
        found[one.session].append((one.first, _FOREVER if one.last is None else one.last))
    given_up = findings.merge(one for line in lineage.lines for one in line.given_up)
    for line in lineage.others:
        if findings.intersect([(line.first, line.last)], given_up):
            for sessions in (line.sessions, *line.left_out.values()):
                for session, of in sessions.items():
                    found[int(session)] += _pairs(of)
    return found


def _check_experience(entries: Iterable[HeldEntry], updates: dict[int, int]) -> Iterator[Problem]:
    histories: dict[int, SessionHistory] = {}
    twins = Twins()
    seen: set[tuple[int, int]] = set()
    for entry in entries:
        name = (entry.session, entry.sequence)
        if not entry.session or name in seen:
            continue
        seen.add(name)
        history = histories.setdefault(entry.session, SessionHistory(entry.session))
        yield from history.follow(entry.sequence, entry.slots, entry.weights)
        yield from twins.look(entry.actor, *name, entry.created_us, entry.sha256)
        yield from check_versions(updates, entry.weights)


def _check_counters(log: HeldLog, lineage: Lineage) -> Iterator[Problem]:
    """Compare the counters of the scripts with the entries, and the commit with its line."""
    counters, position = log.counters, lineage.position
    if counters["acked"] != counters["number"] + counters["log_lost"]:
        what = (
            f"{counters['acked']} acknowledged are not {counters['number']} entries and "
            f"{counters['log_lost']} lost before they were one"
        )
        yield Problem(Kind.UNACCOUNTED, what)
    yield from _check_holes(log, position)
    if not log.commits or not lineage.lines:
        return
    commit, line = log.commits[-1], lineage.lines[-1]
    dropped: Counter[str] = Counter()
    for one in lineage.lines:
        dropped.update({reason: findings.count(found) for reason, found in one.exceptions.items()})
    whole = lineage.lines[0].first == 1
    if (commit.position, commit.totals.trained) != (line.last, line.trained):
        what = (
            f"checkpoint {commit.checkpoint_id} was committed with position {commit.position} and "
            f"{commit.totals.trained} trained, its line says {line.last} and {line.trained}"
        )
        yield Problem(Kind.UNACCOUNTED, what)
    if whole and +Counter(commit.totals.dropped) != +dropped:
        what = f"committed as dropped: {commit.totals.dropped}, in the lineage: {dict(dropped)}"
        yield Problem(Kind.UNACCOUNTED, what)


def _check_holes(log: HeldLog, position: int) -> Iterator[Problem]:
    """Find entries missing behind the position; a marker ends a hole that is none (`open_log.lua`)."""
    last = position
    for entry in log.entries:
        if entry.number <= position:
            continue
        if entry.number > last + 1 and entry.session:
            yield _hole(last + 1, entry.number - 1)
        last = entry.number
    if log.number_before > last:
        yield _hole(last + 1, log.number_before)


def _hole(first: int, last: int) -> Problem:
    entries = f"entry {first} is" if first == last else f"entries {first}..{last} are"
    return Problem(Kind.UNACCOUNTED, f"{entries} gone from the log, and no checkpoint has consumed them")


def _compare(entry: HeldEntry, digest: bytes | None, than: str) -> Iterator[Problem]:
    if digest is not None and entry.sha256 and bytes.fromhex(entry.sha256)[:DIGEST_BYTES] != digest:
        what = f"the payload of entry {entry.number} is not {than}"
        yield problem_at(Kind.CHANGED, entry.session, entry.sequence, what)


def _by_name(entries: Iterable[HeldEntry]) -> dict[tuple[int, int], list[HeldEntry]]:
    found: defaultdict[tuple[int, int], list[HeldEntry]] = defaultdict(list)
    for entry in entries:
        if entry.session:
            found[entry.session, entry.sequence].append(entry)
    return found


def _wanted(entries: Iterable[HeldEntry]) -> dict[tuple[int, int], HeldEntry]:
    return {name: found[0] for name, found in _by_name(entries).items()}


def _pairs(found: Iterable[Iterable[int]]) -> Ranges:
    return [(first, last) for first, last in found]
