"""The accounts of a run: every fragment that a record names, and the one place where it went.

    journals (acknowledged to an actor) ─┐
    lineage (trained, dropped: why)      ├─► per session, sequence numbers as ranges ─► problems, or none
    log (resident; lost with Redis)      ┘

A fragment is in one place of lineage and log. It is lost when it was acknowledged and is in none: a journal
has it, or its session went on behind it. A loss by a Redis that went back in time is excused only by
that Redis's own record of the sequences, and counted as `log_lost`.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from penstock.actor.link.ack_journal import (
    Acknowledged,
    is_torn,
    journal_files,
    read_journal,
)
from penstock.broker.log.audit_log import HeldEntry, HeldLog
from penstock.launch.audit import findings
from penstock.launch.audit.findings import Kind, Problem, Ranges, problem_at, problems_of
from penstock.learner.ledger import DIGEST_BYTES, Drop, LineageEntry
from penstock.protocol.fragment import Beginning

# ---- The learner's own record, `lineage.jsonl`.

_LINE: Final = TypeAdapter(LineageEntry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The lines of a file.

    lines: of the chain, oldest first. others: every other line. torn: lines that a crash cut.

    names_fragments: every line of the chain names the sessions that it consumed (older versions did not).
    """

    lines: tuple[LineageEntry, ...] = ()
    others: tuple[LineageEntry, ...] = ()
    torn: int = 0
    names_fragments: bool = True
    problems: tuple[Problem, ...] = ()

    @property
    def position(self) -> int:
        """Return the last entry that the newest checkpoint has consumed."""
        return self.lines[-1].last if self.lines else 0


def read_lineage(path: Path, head: str) -> Lineage:
    """Return the chain that ends with checkpoint `head`; "": no checkpoint was committed.

    The chain is that of parents behind the newest committed checkpoint. A line names the log entries that a
    checkpoint added to its parent's, and their sessions. Lines off the chain belong to checkpoints that were
    never committed, or that a resume fell back behind.
    """
    lines: dict[str, LineageEntry] = {}
    nameless: set[str] = set()
    torn = 0
    problems: list[Problem] = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            value: dict[str, Any] = json.loads(text)
            line = _LINE.validate_python(value)
            _check_names(line)
        except (ValueError, TypeError, RecursionError):
            if is_torn(text):
                torn += 1
            else:
                problems.append(damaged(path, number))
            continue
        if lines.get(line.checkpoint, line) != line:
            what = f"checkpoint {line.checkpoint}: two different lines in {path.name}"
            problems.append(Problem(Kind.ORDER, what))
        lines[line.checkpoint] = line
        if "sessions" not in value:
            nameless.add(line.checkpoint)
    chain = _chain(lines, head, problems)
    on_chain = {line.checkpoint for line in chain}
    return Lineage(
        lines=tuple(chain),
        others=tuple(line for name, line in lines.items() if name not in on_chain),
        torn=torn,
        names_fragments=not on_chain & nameless,
        problems=(*problems, *_check(chain)),
    )


def damaged(path: Path, number: int) -> Problem:
    """Return the problem of a line that cannot be read although no crash has cut it."""
    what = f"line {number} of {path.name} cannot be read: it is damaged, or of another version"
    return Problem(Kind.UNACCOUNTED, what)


def _check_names(line: LineageEntry) -> None:
    """Raise ValueError for sessions that are not numbers, and digests that are malformed or of no session."""
    for session in (*line.sessions, *(name for of in line.left_out.values() for name in of)):
        int(session)
    for session, digests in line.digests.items():
        if session not in line.sessions:
            raise ValueError(f"digests of session {session}, of which nothing was trained")
        bytes.fromhex(digests)


def _chain(lines: Mapping[str, LineageEntry], head: str, problems: list[Problem]) -> list[LineageEntry]:
    """Return the lines from the oldest to `head`; a missing one is a problem, and passed over."""
    chain: list[LineageEntry] = []
    passed: set[str] = set()
    wanted = head
    while wanted:
        if wanted in passed:
            problems.append(Problem(Kind.ORDER, f"checkpoint {wanted} is in the lineage as its own ancestor"))
            break
        line = lines.get(wanted)
        if line is None:
            first = chain[-1].first if chain else math.inf
            older = [name for name, one in lines.items() if name < wanted and one.last < first]
            line = lines[max(older)] if older else None
            gap = f"{line.last + 1 if line else 1}..{first - 1}" if chain else "of the newest checkpoint"
            what = f"the lineage has no line for checkpoint {wanted}: where entries {gap} went is not known"
            problems.append(Problem(Kind.UNACCOUNTED, what))
            if line is None:
                break
        chain.append(line)
        passed.add(line.checkpoint)
        wanted = line.parent
    return chain[::-1]


def _check(chain: list[LineageEntry]) -> Iterator[Problem]:
    before = LineageEntry(checkpoint="", parent="", first=0, last=0, trained=0, env_steps=0, exceptions={})
    for line in chain:
        # With another parent a line is missing, which is reported already.
        if line.parent == before.checkpoint and line.first != before.last + 1:
            what = (
                f"checkpoint {line.checkpoint} begins at entry {line.first}, its parent ends at {before.last}"
            )
            yield Problem(Kind.UNACCOUNTED, what)
        if line.parent == before.checkpoint and (
            line.checkpoint <= before.checkpoint or line.version < before.version
        ):
            what = f"{before.checkpoint} (version {before.version})"
            what = f"checkpoint {line.checkpoint} (version {line.version}) follows {what}"
            yield Problem(Kind.ORDER, what)
        for what in _differences(before, line):
            yield Problem(Kind.UNACCOUNTED, f"checkpoint {line.checkpoint}: {what}")
        before = line


def _differences(before: LineageEntry, line: LineageEntry) -> Iterator[str]:
    """Yield where the numbers of a line do not add up."""
    entries = line.last - line.first + 1
    dropped = sum(findings.count(of) for of in line.exceptions.values())
    trained = line.trained - before.trained if line.parent == before.checkpoint else entries - dropped
    if trained + dropped != entries:
        yield f"{trained} trained and {dropped} dropped do not make up its {entries} entries"
    if not line.sessions and not line.left_out:
        return
    named = sum(findings.count(of) for of in line.sessions.values())
    if named != entries - dropped:
        yield f"{entries - dropped} entries trained, {named} fragments named"
    for reason, of in line.exceptions.items():
        left_out = sum(findings.count(these) for these in line.left_out.get(reason, {}).values())
        whole = findings.count(of)
        if left_out > whole or (left_out < whole and reason != Drop.LOG_LOST):
            yield f"{whole} entries dropped as {reason}, {left_out} fragments named"


# ---- The actors' own records (`actor.ack_journal`), read for an audit.

_SHADOW = "shadow"


@dataclass(slots=True)
class JournalSession:
    """The fragments acknowledged to a session's actor: sequence → first bytes of the payload's digest."""

    actor: str
    digests: dict[int, bytes] = field(default_factory=dict)
    shadow: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Journals:
    """All records of actors. files, lines, torn: numbers of them. updates: weight version → its update."""

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
        experience = Experience()
        numbers: list[int] = []
        for line in read_journal(path, numbers):
            if line is None:
                journals.torn += 1
            elif run in ("", line.run):
                journals.lines += 1
                _note(journals, line)
                journals.problems += experience.follow(line)
        journals.problems += [damaged(path, number) for number in numbers]
    return journals


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
    """Checks that a session moves forward: episode, first step and weights of a slot rise with the sequence.

    Slots may differ in their weights: an episode that a policy server acts for takes newer weights where its
    own experience is cut.
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


class Experience:
    """Checks that the experience in a file or log moves forward, and that none is there twice."""

    def __init__(self) -> None:
        self._histories: dict[int, SessionHistory] = {}
        self._payloads: dict[tuple[str, int, str], tuple[int, int]] = {}

    def follow(self, one: Acknowledged | HeldEntry) -> Iterator[Problem]:
        """Check the next fragment.

        Yields a problem also for a payload that was renumbered and sent again: an earlier fragment of the
        actor has the same payload and time of creation.
        """
        history = self._histories.setdefault(one.session, SessionHistory(one.session))
        yield from history.follow(one.sequence, one.slots, one.weights)
        name, moment = (one.session, one.sequence), (one.actor, one.created_us, one.sha256[:16])
        other = self._payloads.setdefault(moment, name) if one.created_us and one.sha256 else name
        if other != name:
            what = f"the same experience as session {other[0]}, sequence {other[1]}"
            yield problem_at(Kind.DOUBLED, *name, what)


TRAINED: Final = "trained"
RESIDENT: Final = "resident"
SHADOW: Final = "shadow"
LOG_LOST: Final = Drop.LOG_LOST.value
NOWHERE: Final = "nowhere"
_FOREVER: Final = 2**53


Places = defaultdict[str, Ranges]
"""The ranges of one session's fragments that records name: place → ranges, one for each record."""


def _everywhere(place: Places) -> Ranges:
    """Return the ranges of every place but the shadow stream."""
    return [one for name, found in place.items() if name != SHADOW for one in found]


class Books:
    """Accounts built from the three records: call `check`, then read `fragments` and `journalled`."""

    def __init__(self, journals: Journals, lineage: Lineage, log: HeldLog | None) -> None:
        self._journals, self._lineage, self._log = journals, lineage, log
        self._places: defaultdict[int, Places] = defaultdict(lambda: defaultdict(list))
        self.fragments: Counter[str] = Counter()
        self.journalled: Counter[str] = Counter()
        self._excuses = _excuses(lineage, log)
        self._note_places()

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

    # ---- places

    def _note_places(self) -> None:
        for line in self._lineage.lines:
            for session, found in line.sessions.items():
                self._places[int(session)][TRAINED] += _pairs(found)
            for reason, sessions in line.left_out.items():
                for session, found in sessions.items():
                    self._places[int(session)][reason] += _pairs(found)
        if self._log is None:
            return
        for entry in self._log.entries:
            if entry.session and entry.number > self._lineage.position:
                self._places[entry.session][RESIDENT].append((entry.sequence, entry.sequence))
        for number, sequence in self._log.shadow:
            self._places[number][SHADOW].append((sequence, sequence))

    # ---- sessions

    def _check_session(self, session: int) -> Iterator[Problem]:
        place, journal = self._places[session], self._journals.sessions.get(session)
        found = _everywhere(place)
        yield from problems_of(Kind.DOUBLED, session, findings.overlaps(found), self._where_twice(place))
        held = findings.merge(found)
        shadow = findings.merge([*place[SHADOW], *findings.of_numbers(journal.shadow if journal else ())])
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
            booked = findings.subtract(findings.merge(place.get(LOG_LOST, [])), excuses)
            what = "booked log_lost, and Redis knows of no loss"
            yield from problems_of(Kind.LOST, session, booked, what)
        self._count(place, excused, lost, acked, shadow)

    def _count(self, place: Places, excused: Ranges, lost: Ranges, acked: Ranges, shadow: Ranges) -> None:
        places = {name: findings.merge(found) for name, found in place.items() if name != SHADOW}
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

    def _where_twice(self, place: Places) -> str:
        twice = [name for name, found in place.items() if findings.overlaps(found)]
        return f"more than once in {', '.join(twice)}" if twice else f"in {' and in '.join(sorted(place))}"

    def _nowhere(self, why: str) -> str:
        return f"{why}, and neither in the lineage" + (
            " (there is no log to look in)" if self._log is None else " nor in the log"
        )

    # ---- payloads

    def _check_digests(self) -> Iterator[Problem]:
        held = _by_name(() if self._log is None else self._log.entries)
        for line in self._lineage.lines:
            for session, digests in line.digests.items():
                yield from self._compare_line(line, int(session), bytes.fromhex(digests), held)
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
        self,
        line: LineageEntry,
        session: int,
        digests: bytes,
        held: Mapping[tuple[int, int], list[HeldEntry]],
    ) -> Iterator[Problem]:
        if len(digests) != DIGEST_BYTES * findings.count(line.sessions[str(session)]):
            what = f"checkpoint {line.checkpoint}: session {session} has not one digest for each fragment"
            yield Problem(Kind.UNACCOUNTED, what)
            return
        sequences = list(findings.numbers(line.sessions[str(session)]))
        journal = self._journals.sessions.get(session)
        known = {} if journal is None else journal.digests
        for index, sequence in enumerate(sequences):
            digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if known.get(sequence, digest) != digest:
                what = "what was trained is not what its actor recorded"
                yield problem_at(Kind.CHANGED, session, sequence, what)
            if (session, sequence) in held:
                yield from _compare(held[session, sequence][0], digest, "what was trained")

    # ---- the log behind the position

    def _check_retained(self, log: HeldLog) -> Iterator[Problem]:
        """Yield a problem for entries kept for a resume that the lineage lacks.

        Also for any entry that the log has twice.
        """
        twice = [key for key, found in _by_name(log.entries).items() if len(found) > 1]
        for session, sequence in twice:
            yield problem_at(Kind.DOUBLED, session, sequence, "twice in the log")
        if not self._lineage.names_fragments:
            return
        retained: defaultdict[int, list[int]] = defaultdict(list)
        for entry in log.entries:
            if entry.session and entry.number <= self._lineage.position:
                retained[entry.session].append(entry.sequence)
        for session, sequences in retained.items():
            held = findings.merge(_everywhere(self._places[session]))
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
    experience = Experience()
    seen: set[tuple[int, int]] = set()
    for entry in entries:
        name = (entry.session, entry.sequence)
        if entry.session and name not in seen:
            seen.add(name)
            yield from experience.follow(entry)
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
    """Yield entries missing behind the position; a marker ends a gap that is no loss (`open_log.lua`)."""
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


def _pairs(found: Iterable[Iterable[int]]) -> Ranges:
    return [(first, last) for first, last in found]
