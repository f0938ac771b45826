"""`lineage.jsonl`, read for an audit: the chain of parents behind the newest committed checkpoint.

A line names the log entries that a checkpoint added to its parent's, and their sessions. Lines off the chain
belong to checkpoints that were never committed, or that a resume fell back behind.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from penstock.launch.audit import findings
from penstock.launch.audit.findings import Kind, Problem
from penstock.learner.ledger import Drop, LineageEntry

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


@dataclass(slots=True)
class _File:
    lines: dict[str, LineageEntry] = field(default_factory=dict)
    nameless: set[str] = field(default_factory=set)
    torn: int = 0
    problems: list[Problem] = field(default_factory=list)


def read_lineage(path: Path, head: str) -> Lineage:
    """Return the chain that ends with checkpoint `head`; "": no checkpoint was committed."""
    file = _read(path)
    chain = _chain(file, head)
    on_chain = {line.checkpoint for line in chain}
    return Lineage(
        lines=tuple(chain),
        others=tuple(line for name, line in file.lines.items() if name not in on_chain),
        torn=file.torn,
        names_fragments=not on_chain & file.nameless,
        problems=(*file.problems, *_check(chain)),
    )


def _read(path: Path) -> _File:
    file = _File()
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            value: dict[str, Any] = json.loads(text)
            line = _LINE.validate_python(value)
            _check_names(line)
        except (ValueError, TypeError):
            file.torn += 1
            continue
        if file.lines.get(line.checkpoint, line) != line:
            file.problems.append(
                Problem(Kind.ORDER, f"checkpoint {line.checkpoint}: two different lines in {path.name}")
            )
        file.lines[line.checkpoint] = line
        if "sessions" not in value:
            file.nameless.add(line.checkpoint)
    return file


def _check_names(line: LineageEntry) -> None:
    """Raise ValueError for sessions that are not numbers, and digests that are malformed or of no session."""
    for session in (*line.sessions, *(name for of in line.left_out.values() for name in of)):
        int(session)
    for session, digests in line.digests.items():
        if session not in line.sessions:
            raise ValueError(f"digests of session {session}, of which nothing was trained")
        bytes.fromhex(digests)


def _chain(file: _File, head: str) -> list[LineageEntry]:
    chain: list[LineageEntry] = []
    wanted = head
    while wanted:
        line = file.lines.get(wanted)
        if line is None:
            line = _before(file, wanted, chain)
            gap = (
                f"{line.last + 1 if line else 1}..{chain[-1].first - 1}"
                if chain
                else "of the newest checkpoint"
            )
            file.problems.append(
                Problem(
                    Kind.UNACCOUNTED,
                    (
                        f"the lineage has no line for checkpoint {wanted}: where entries {gap} went is not "
                        "known"
                    ),
                )
            )
            if line is None:
                break
        chain.append(line)
        wanted = line.parent
    return chain[::-1]


def _before(file: _File, missing: str, chain: list[LineageEntry]) -> LineageEntry | None:
    """Return the newest line that may have come before a missing one."""
    first = chain[-1].first if chain else None
    older = [
        name for name, line in file.lines.items() if name < missing and (first is None or line.last < first)
    ]
    return file.lines[max(older)] if older else None


def _check(chain: list[LineageEntry]) -> Iterator[Problem]:
    before = LineageEntry(checkpoint="", parent="", first=0, last=0, trained=0, env_steps=0, exceptions={})
    for line in chain:
        yield from _check_follows(before, line)
        yield from _check_adds_up(before, line)
        before = line


def _check_follows(before: LineageEntry, line: LineageEntry) -> Iterator[Problem]:
    if line.parent != before.checkpoint:
        return  # a line is missing: said already
    if line.first != before.last + 1:
        yield Problem(
            Kind.UNACCOUNTED,
            f"checkpoint {line.checkpoint} begins at entry {line.first}, its parent ends at {before.last}",
        )
    if line.checkpoint <= before.checkpoint or line.version < before.version:
        yield Problem(
            Kind.ORDER,
            f"checkpoint {line.checkpoint} (version {line.version}) follows "
            f"{before.checkpoint} (version {before.version})",
        )


def _check_adds_up(before: LineageEntry, line: LineageEntry) -> Iterator[Problem]:
    entries = line.last - line.first + 1
    dropped = sum(findings.count(of) for of in line.exceptions.values())
    trained = line.trained - before.trained if line.parent == before.checkpoint else entries - dropped
    if trained + dropped != entries:
        yield Problem(
            Kind.UNACCOUNTED,
            f"checkpoint {line.checkpoint}: {trained} trained and {dropped} dropped do not make up "
            f"its {entries} entries",
        )
    if not line.sessions and not line.left_out:
        return
    named = sum(findings.count(of) for of in line.sessions.values())
    if named != entries - dropped:
        yield Problem(
            Kind.UNACCOUNTED,
            f"checkpoint {line.checkpoint}: {entries - dropped} entries trained, {named} fragments named",
        )
    for reason, of in line.exceptions.items():
        left_out = sum(findings.count(these) for these in line.left_out.get(reason, {}).values())
        whole = findings.count(of)
        if left_out > whole or (left_out < whole and reason != Drop.LOG_LOST):
            yield Problem(
                Kind.UNACCOUNTED,
                (
                    f"checkpoint {line.checkpoint}: {whole} entries dropped as {reason}, {left_out} "
                    "fragments named"
                ),
            )
