"""Which answers there were, in a file of SQLite: of which version, whether by the fallback, whether blocked.

A turn that somebody was asked about is no part of the conversations that a version is judged by, and neither
is one without an answer: its message was blocked.

It holds neither texts nor names of people; whose a conversation was is a hash of the name, by which that
person can have it forgotten. Satisfaction is counted over all conversations, rated or not, so they outlive
the gateway: what was noted is on the disk when `note` returns.
"""

import hashlib
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from penstock.registry.ratings import RatedConversation

FILE: Final = "chat.sqlite"
INPUT: Final = "input "
"""Before what blocked a message, which was answered by nothing."""
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS answers (
    conversation TEXT NOT NULL, turn INTEGER NOT NULL, version INTEGER NOT NULL, fallback INTEGER NOT NULL,
    blocked TEXT NOT NULL, at_s REAL NOT NULL
)
"""
_ASKED: Final = """
CREATE TABLE IF NOT EXISTS asked (
    conversation TEXT NOT NULL, turn INTEGER NOT NULL, PRIMARY KEY (conversation, turn)
)
"""
_PEOPLE: Final = """
CREATE TABLE IF NOT EXISTS people (conversation TEXT PRIMARY KEY, person TEXT NOT NULL)
"""
_RATED: Final = """
CREATE TEMP TABLE rated (conversation TEXT PRIMARY KEY, rater TEXT NOT NULL, is_well INTEGER NOT NULL)
"""
_BY_DAY_AND_PERSON: Final = """
WITH talks AS (
    SELECT people.person AS person, MIN(answers.at_s) AS at_s, rated.rater AS rater, rated.is_well AS is_well
    FROM answers
    LEFT JOIN asked ON asked.conversation = answers.conversation AND asked.turn = answers.turn
    LEFT JOIN people ON people.conversation = answers.conversation
    LEFT JOIN rated ON rated.conversation = answers.conversation
    WHERE asked.turn IS NULL AND blocked NOT LIKE 'input %' GROUP BY answers.conversation
)
SELECT * FROM (
    SELECT 'day', date(at_s, 'unixepoch') AS day, COUNT(*), COUNT(is_well), COALESCE(SUM(is_well), 0)
    FROM talks GROUP BY day ORDER BY day DESC LIMIT ?
)
UNION ALL
SELECT * FROM (
    SELECT 'person', MAX(rater) AS name, COUNT(*), COUNT(is_well), SUM(is_well)
    FROM talks GROUP BY person HAVING person IS NOT NULL AND name > ''
    ORDER BY COUNT(*) DESC, name LIMIT ?
)
"""
_COUNTED: Final = """
SELECT version,
    COUNT(DISTINCT answers.conversation) FILTER (WHERE asked.turn IS NULL AND blocked NOT LIKE 'input %'),
    SUM(blocked NOT LIKE 'input %'), SUM(fallback), SUM(blocked != ''), COUNT(asked.turn)
FROM answers
LEFT JOIN asked ON asked.conversation = answers.conversation AND asked.turn = answers.turn
GROUP BY version ORDER BY version DESC
"""
_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCounts:
    """Counts what came of a version. version 0: the model without an adapter.

    conversations: with an answer that nobody was asked about. blocked: answers, and messages to it, that did
    not pass the guard. asked: answers that somebody was asked about.
    """

    version: int
    conversations: int
    answers: int
    fallbacks: int
    blocked: int
    asked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkCounts:
    """Counts conversations, rated or not, of a day or of a person.

    name: of the day, as 2026-11-27 in UTC, or of the person, as they rated. well: rated so.
    """

    by: Literal["day", "person"]
    name: str
    conversations: int
    rated: int
    well: int


def hashed(person: str) -> str:
    """Return what the book calls somebody."""
    return hashlib.sha256(person.encode()).hexdigest()


class AnswerBook:
    """The file; any thread may use it. Making it raises OSError or sqlite3.Error where it cannot be made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = folder / FILE
        with closing(self._open()) as opened, opened:
            opened.execute(_TABLE)
            opened.execute(_ASKED)
            opened.execute(_PEOPLE)

    def note(
        self,
        conversation: str,
        turn: int,
        version: int,
        *,
        fallback: bool,
        blocked: str = "",
        person: str = "",
        at_s: float | None = None,
    ) -> None:
        """Note an answer.

        blocked: by what it was blocked, or behind `INPUT` the message to it; "": it passed. person: who was
        answered; "": not known. at_s: when, in Unix seconds; None: now.
        """
        row = (conversation, turn, version, fallback, blocked, time.time() if at_s is None else at_s)
        with closing(self._open()) as opened, opened:
            opened.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)
            if person:
                whose = (conversation, hashed(person))
                opened.execute("INSERT OR IGNORE INTO people VALUES (?, ?)", whose)

    def forget(self, person: str) -> None:
        """Forget all conversations of somebody."""
        with closing(self._open()) as opened, opened:
            for table in ("asked", "answers", "people"):
                opened.execute(
                    f"DELETE FROM {table} WHERE conversation IN "  # noqa: S608 - a name of above
                    "(SELECT conversation FROM people WHERE person = ?)",
                    (hashed(person),),
                )

    def note_asked(self, conversation: str, turn: int) -> None:
        """Note that somebody was asked about an answer."""
        with closing(self._open()) as opened, opened:
            opened.execute("INSERT OR IGNORE INTO asked VALUES (?, ?)", (conversation, turn))

    def counts(self) -> list[VersionCounts]:
        """Return what came of each version, newest first."""
        with closing(self._open()) as opened:
            rows = opened.execute(_COUNTED).fetchall()
        return [
            VersionCounts(
                version=version,
                conversations=talks,
                answers=answers,
                fallbacks=fallbacks,
                blocked=blocked,
                asked=asked,
            )
            for version, talks, answers, fallbacks, blocked, asked in rows
        ]

    def by_day_and_person(
        self, rated: Iterable[RatedConversation], *, most_days: int, most_people: int
    ) -> list[TalkCounts]:
        """Return the conversations by day, newest first, then by person who has rated, most talkative first.

        rated: those that somebody rated. A conversation is of the day on which it was answered first.
        """
        rows = [(one.conversation, one.rater, one.is_well) for one in rated]
        with closing(self._open()) as opened:
            opened.execute(_RATED)
            opened.executemany("INSERT INTO rated VALUES (?, ?, ?)", rows)
            opened.commit()  # so that answers are noted meanwhile
            found = opened.execute(_BY_DAY_AND_PERSON, (most_days, most_people)).fetchall()
        return [
            TalkCounts(by=by, name=name, conversations=talks, rated=rated, well=well)
            for by, name, talks, rated, well in found
        ]

    def blocked(self) -> dict[str, int]:
        """Return how often each rule, or the classifier, has blocked."""
        wanted = "SELECT blocked, COUNT(*) FROM answers WHERE blocked != '' GROUP BY blocked ORDER BY blocked"
        with closing(self._open()) as opened:
            return dict(opened.execute(wanted).fetchall())

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=_WAIT_S)
