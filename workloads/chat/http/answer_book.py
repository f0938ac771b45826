"""Which answers there were, in a file of SQLite: of which version, whether by the fallback, whether blocked.

A turn that somebody was asked about is no part of the conversations that a version is judged by.

It holds neither texts nor names of people. Satisfaction is counted over all conversations, rated or not, so
they outlive the gateway: what was noted is on the disk when `note` returns.
"""

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FILE: Final = "chat.sqlite"
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
_COUNTED: Final = """
SELECT version, COUNT(DISTINCT CASE WHEN asked.turn IS NULL THEN answers.conversation END), COUNT(*),
    SUM(fallback), SUM(blocked != ''), COUNT(asked.turn)
FROM answers
LEFT JOIN asked ON asked.conversation = answers.conversation AND asked.turn = answers.turn
GROUP BY version ORDER BY version DESC
"""
_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCounts:
    """Counts what came of a version. version 0: the model without an adapter.

    conversations: with a turn that nobody was asked about. blocked: answers, and messages to it, that did not
    pass the guard. asked: answers that somebody was asked about.
    """

    version: int
    conversations: int
    answers: int
    fallbacks: int
    blocked: int
    asked: int = 0


class AnswerBook:
    """The file; any thread may use it. Making it raises OSError or sqlite3.Error where it cannot be made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = folder / FILE
        with closing(self._open()) as opened, opened:
            opened.execute(_TABLE)
            opened.execute(_ASKED)

    def note(self, conversation: str, turn: int, version: int, *, fallback: bool, blocked: str = "") -> None:
        """Note an answer. blocked: by what it, or the message to it, was blocked; "": it passed."""
        row = (conversation, turn, version, fallback, blocked, time.time())
        with closing(self._open()) as opened, opened:
            opened.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)

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

    def blocked(self) -> dict[str, int]:
        """Return how often each rule, or the classifier, has blocked."""
        wanted = "SELECT blocked, COUNT(*) FROM answers WHERE blocked != '' GROUP BY blocked ORDER BY blocked"
        with closing(self._open()) as opened:
            return dict(opened.execute(wanted).fetchall())

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=_WAIT_S)
