"""Batch appends to the log: calls that arrive while others are under way share a pipeline.

    append ─┐
    append ─┼─► one pipeline: SET payload …, EVALSHA append, SET payload …, … ─► Redis ─► each its own reply
    append ─┘

A single call is sent at once. A round trip costs the broker more than the commands in it, and Redis
writes its append-only file once for all of them, so a busy broker makes fewer and longer round trips.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hiredis import pack_command
from redis.exceptions import NoScriptError

from penstock.broker.log import keys
from penstock.broker.log.line import Line, OnReply, Piece, answer
from penstock.broker.log.script import load
from penstock.broker.log.store_records import Appended, AppendItem

AT_ONCE: Final = 2
"""Pipelines under way at once: while Redis works on one, the next is written."""
MOST_CALLS: Final = 64
MOST_BYTES: Final = 4 * 2**20
"""Payload bytes in one pipeline, unless the first append alone has more."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """An append that waits for its turn. staged: one key for each payload. arguments: those of the script."""

    staged: Sequence[str]
    payloads: Sequence[bytes | memoryview]
    size: int
    arguments: Sequence[Any]
    reply: "asyncio.Future[Appended]"


class Appends:
    """Sends appends of one event loop to Redis, several in one pipeline."""

    def __init__(
        self, line: Line, staging_expiry_s: float, read: Callable[[Sequence[Any]], Appended]
    ) -> None:
        """line: nothing else travels on it, since what comes behind a large payload waits for it.

        read: makes of the script's answer what callers get, or raises it.
        """
        self._line, self._read = line, read
        self._set_tail = b"\r\n$2\r\nPX\r\n%b" % _bulk(b"%d" % max(1, round(staging_expiry_s * 1000)))
        self._nonce = secrets.token_hex(6)
        self._attempts = 0
        self._waiting: deque[_Waiting] = deque()
        self._under_way = 0
        self._is_due = False

    def begin(
        self, session: int, acked_through: int, items: Sequence[AppendItem], incarnation: str
    ) -> "asyncio.Future[Appended]":
        """Have fragments of a session appended, on a line that is open; the outcome is not to be cancelled.

        The payloads are staged under names of this attempt that expire, then the script moves them into place
        or drops them. It goes on whatever becomes of its caller.

        Args:
            session: number of the session.
            acked_through: highest sequence number that the actor knows to be acknowledged.
            items: checked fragments with consecutive sequence numbers.
            incarnation: of the run for which they were checked; "": any.
        """
        arguments: list[Any] = [session, acked_through]
        payloads, size = [], 0
        for item in items:
            header, payload = item.header, item.payload
            arguments += (header.sequence, header.charge, int(header.kind), len(payload))
            arguments += (item.header_bytes, header.newest_version)
            payloads.append(payload)
            size += len(payload)
        arguments.append(incarnation)
        reply = asyncio.get_running_loop().create_future()
        staged = [self._staging_key() for _ in payloads]
        self._waiting.append(_Waiting(staged, payloads, size, arguments, reply))
        self._send_soon()
        return reply

    def _staging_key(self) -> str:
        self._attempts += 1
        return f"{keys.STAGING}{self._nonce}:{self._attempts}"

    def _send_soon(self) -> None:
        """Send what waits, unless as much as may be is under way.

        Not at once: those who come in the same round of the loop go together, and on a line that broke, which
        answers as it is written to, each pipeline would be sent from within the one before.
        """
        if self._waiting and not self._is_due and self._under_way < AT_ONCE:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send the oldest waiting appends, in as many pipelines as may be under way."""
        self._is_due = False
        while self._waiting and self._under_way < AT_ONCE:
            self._under_way += 1
            self._write(self._oldest())

    def _oldest(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        size = batch[0].size
        while self._waiting and len(batch) < MOST_CALLS:
            size += self._waiting[0].size
            if size > MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _write(self, batch: Sequence[_Waiting]) -> None:
        script, pieces = load("append").sha1, list[Piece]()
        on_replies: list[OnReply | None] = []
        for one in batch:
            for key, payload in zip(one.staged, one.payloads, strict=True):
                pieces += (_set_head(key, len(payload)), payload, self._set_tail)
                # A SET that failed (at `maxmemory`) is seen by the script as a staging key that is absent.
                on_replies.append(None)
            pieces.append(pack_command(("EVALSHA", script, len(one.staged), *one.staged, *one.arguments)))
            on_replies.append(partial(self._answered, one))
        on_replies[-1] = partial(self._ended, batch[-1])
        self._line.write(pieces, on_replies)

    def _ended(self, last: _Waiting, reply: Any) -> None:
        """The last reply to a pipeline: another one may go."""
        self._answered(last, reply)
        self._under_way -= 1
        self._send_soon()

    def _answered(self, one: _Waiting, reply: Any) -> None:
        if isinstance(reply, NoScriptError):
            whole = ("EVAL", load("append").source, len(one.staged), *one.staged, *one.arguments)
            self._line.write((pack_command(whole),), (partial(self._concluded, one),))
        else:
            self._concluded(one, reply)

    def _concluded(self, one: _Waiting, reply: Any) -> None:
        try:
            given = reply if isinstance(reply, Exception) else self._read(reply)
        except Exception as error:  # noqa: BLE001 - it is for those who wait
            given = error
        answer(one.reply, given)


def _set_head(key: str, size: int) -> bytes:
    """The command SET up to its value, which follows as it is."""
    return b"*5\r\n$3\r\nSET\r\n%b$%d\r\n" % (_bulk(key.encode()), size)


def _bulk(text: bytes) -> bytes:
    """An argument as it stands in a command."""
    return b"$%d\r\n%b\r\n" % (len(text), text)
