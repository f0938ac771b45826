"""The log of a job as server-sent events, from a byte on, until the job has ended."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.concurrency import run_in_threadpool

from gateway.event_text import STILL_HERE, event
from gateway.jobs.job_records import Job
from gateway.jobs.runner import Runner

READ_BYTES: Final = 64 * 1024
LOOK_S: Final = 1.0
"""Seconds between two looks at a log that has not grown."""


async def follow(runner: Runner, look: Callable[[], Job], begin: int) -> AsyncIterator[str]:
    """Yield the events. look: returns the job as it is now. begin: byte of the log, behind a line."""
    name = (await run_in_threadpool(look)).id
    while True:
        job = await run_in_threadpool(look)
        content = await run_in_threadpool(runner.read_log, name, begin, READ_BYTES)
        whole = _lines(content, ended=not job.state.is_open)
        for line in whole.splitlines(keepends=True):
            begin += len(line)
            yield event("line", line.decode(errors="replace").rstrip("\r\n"), begin)
        if whole:
            continue
        if not job.state.is_open:
            yield event("state", {"state": job.state, "cause": job.cause}, begin)
            return
        yield STILL_HERE
        await asyncio.sleep(LOOK_S)


def _lines(content: bytes, *, ended: bool) -> bytes:
    """Return the whole lines of a piece; all of it where no more comes, or where a line is longer."""
    if ended or len(content) == READ_BYTES:
        cut = content.rfind(b"\n") + 1
        return content[:cut] or content
    return content[: content.rfind(b"\n") + 1]
