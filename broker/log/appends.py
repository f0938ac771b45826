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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import NoScriptError

from broker.log import keys
from broker.log.script import load
from broker.log.store_records import AppendItem

AT_ONCE: Final = 2
"""Pipelines under way at once: while Redis works on one, the next is written."""
MOST_CALLS: Final = 64
MOST_BYTES: Final = 4 * 2**20
"""Payload bytes in one pipeline, unless the first append alone has more."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An append that waits for its turn. staged: one key for each payload. arguments: those of the script."""

    staged: Sequence[str]
    payloads: Sequence[bytes | memoryview]
    arguments: Sequence[Any]
    reply: "asyncio.Future[Any]"

    @property
    def size(self) -> int:
        return sum(map(len, self.payloads))


class Appends:
    """Sends appends of one event loop to Redis, several in one pipeline. client: a redis.asyncio.Redis."""

    def __init__(self, client: Any, staging_expiry_s: float) -> None:
        self._redis = client
        self._expiry_ms = max(1, round(staging_expiry_s * 1000))
        self._nonce = secrets.token_hex(6)
        self._attempts = 0
        self._waiting: deque[_Waiting] = deque()
        self._under_way = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def append(
        self, session: int, acked_through: int, items: Sequence[AppendItem], incarnation: str
    ) -> Any:
        """Append fragments of a session and return the script's raw answer.

        Raises what the Redis client raises.

        The payloads are staged under names of this attempt that expire, then the script moves them into place
        or drops them.

        Args:
            session: number of the session.
            acked_through: highest sequence number that the actor knows to be acknowledged.
            items: checked fragments with consecutive sequence numbers.
            incarnation: of the run for which they were checked; "": any.
        """
        arguments: list[Any] = [session, acked_through]
        for item in items:
            header = item.header
            arguments += (header.sequence, header.charge, header.kind.value, len(item.payload))
            arguments += (item.header_bytes, header.newest_version)
        arguments.append(incarnation)
        reply = asyncio.get_running_loop().create_future()
        staged = [self._staging_key() for _ in items]
        self._waiting.append(_Waiting(staged, [item.payload for item in items], arguments, reply))
        if self._under_way < AT_ONCE:
            self._begin()
        return await reply

    def _begin(self) -> None:
        """Send from a task of its own.

        So a caller that gives up does not cancel the appends of others.
        """
        self._under_way += 1
        task = asyncio.create_task(self._send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _staging_key(self) -> str:
        self._attempts += 1
        return f"{keys.STAGING}{self._nonce}:{self._attempts}"

    async def _send(self) -> None:
        """Send the oldest waiting appends that fit into one pipeline, until none waits."""
        try:
            while self._waiting:
                await self._carry(self._oldest())
        finally:
            self._under_way -= 1

    async def _carry(self, batch: Sequence[_Waiting]) -> None:
        try:
            replies = await self._execute(batch)
        except Exception as error:  # noqa: BLE001 - it is for those who wait
            replies = [error] * len(batch)
        for one, reply in zip(batch, replies, strict=True):
            _answer(one, reply)

    def _oldest(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        size = batch[0].size
        while self._waiting and len(batch) < MOST_CALLS:
            size += self._waiting[0].size
            if size > MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _execute(self, batch: Sequence[_Waiting]) -> list[Any]:
        """Return the reply to each append, or the error in its place."""
        script = load("append")
        pipeline = self._redis.pipeline(transaction=False)
        for one in batch:
            for key, payload in zip(one.staged, one.payloads, strict=True):
                pipeline.execute_command("SET", key, payload, "PX", self._expiry_ms)
            pipeline.execute_command("EVALSHA", script.sha1, len(one.staged), *one.staged, *one.arguments)
        # A SET that failed (at `maxmemory`) is seen by the script as a staging key that is absent.
        given = await pipeline.execute(raise_on_error=False)
        replies, at = [], -1
        for one in batch:
            at += len(one.staged) + 1
            replies.append(given[at])
        for index, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                one = batch[index]
                replies[index] = await self._redis.execute_command(
                    "EVAL", script.source, len(one.staged), *one.staged, *one.arguments
                )
        return replies


def _answer(one: _Waiting, reply: Any) -> None:
    if one.reply.done():
        return  # no append waits any more
    if isinstance(reply, Exception):
        one.reply.set_exception(reply)
    else:
        one.reply.set_result(reply)
