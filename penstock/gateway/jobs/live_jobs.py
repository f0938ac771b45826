"""The jobs of a project live, and the log of one, as server-sent events until their reader may read no more.

jobs        the newest of the project: {"jobs"}
job         the one that is looked at
curve       of its run
versions    of its run, and its traffic
trouble     why one of these events cannot be shown now: {"of", "detail"}
line        of the log
state       of the job whose log has ended; it is the last event
refused     the session, the token or the membership has ended; it is the last event

An event about jobs is sent again only when it has changed.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from penstock.gateway.accounts.accounts import Accounts

from fastapi.encoders import jsonable_encoder
from starlette.concurrency import run_in_threadpool

from penstock.gateway.accounts.principal import AccountError, Membership
from penstock.gateway.frame.event_stream import STILL_HERE, event
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_dispatcher import JobDispatcher
from penstock.gateway.jobs.job_records import CannotSteer, Job, shown
from penstock.registry.records import RegistryError, Unavailable

# ---- Looks that many streams share: the result of one is used by all for a short time.

T = TypeVar("T")
MOST_KEPT: Final = 256
"""Number of results above which old ones are dropped."""


class SharedLooks:
    """Results of looks by key, for one event loop. fresh_s: seconds for which a result is used again."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._known: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def at(self, key: Hashable, look: Callable[[], T]) -> T:
        """Return a fresh result of the key, else call `look` in a thread; raises what `look` raises."""
        now = asyncio.get_running_loop().time()
        known = self._known.get(key)
        if known is None or self._is_old(known, now):
            if len(self._known) >= MOST_KEPT:
                self._known = {one: it for one, it in self._known.items() if not self._is_old(it, now)}
            known = now, asyncio.ensure_future(run_in_threadpool(look))
            known[1].add_done_callback(_retrieve)
            self._known[key] = known
        # A caller that is cancelled does not cancel the look of the others.
        found: T = await asyncio.shield(known[1])
        return found

    def _is_old(self, known: tuple[float, asyncio.Task[Any]], now: float) -> bool:
        return known[1].done() and known[0] + self._fresh_s <= now


async def rest(look_s: float) -> None:
    """Wait about `look_s` seconds, from half to one and a half of them, before a stream looks again.

    With a fixed time, streams that once waited for the same look would wake together from then on.
    """
    await asyncio.sleep(look_s * random.uniform(0.5, 1.5))


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a look that no caller awaits any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


READ_BYTES: Final = 64 * 1024
LOOK_S: Final = 1.0
"""Seconds between two looks at a log that has not grown, on average."""
RIGHTS_S: Final = 5.0
"""Longest time for which a reader may read on after losing the right, in seconds."""
QUIET_LOOKS: Final = 15
"""Looks without news after which a sign of life is sent."""


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """Event streams about jobs of one gateway, which share looks. dispatcher: None where it runs no jobs."""

    accounts: "Accounts"
    dispatcher: JobDispatcher | None
    _looks: SharedLooks = field(default_factory=lambda: SharedLooks(LOOK_S / 2))
    _rights: SharedLooks = field(default_factory=lambda: SharedLooks(RIGHTS_S))

    async def follow(self, member: Membership, job: str) -> AsyncIterator[str]:
        """Yield the events of a project until the reader may read no more. job: shown in detail; "": none."""
        sent, quiet = dict[str, str](), 0
        while True:
            try:
                fresh = await self._looked(member, job)
            except AccountError as error:
                yield event("refused", str(error))
                return
            except Unavailable:  # until the database is back
                fresh = sent
            news = {kind: text for kind, text in fresh.items() if sent.get(kind) != text}
            for text in news.values():
                yield text
            sent = dict(fresh)
            quiet = 0 if news else quiet + 1
            if quiet % QUIET_LOOKS == 1:
                yield STILL_HERE
            await rest(LOOK_S)

    async def _looked(self, member: Membership, job: str) -> dict[str, str]:
        """Return every event as of now; raises AccountError for a reader that may not see them any more."""
        await self._check_still(member)
        found: dict[str, str] = await self._looks.at(
            (member.project, job), partial(self._found, member.project, job)
        )
        return found

    async def _check_still(self, member: Membership) -> None:
        who = (member.principal.subject, member.principal.session, member.project)
        await self._rights.at(who, lambda: self.accounts.check_still(member))

    def _found(self, project: str, job: str) -> dict[str, str]:
        """Return the events of a project by their kind."""
        every = self.accounts.look(lambda session: job_queue.read(session, project, None, None))
        found = {"jobs": event("jobs", jsonable_encoder({"jobs": [shown(one) for one in every]}))}
        if not job:
            return found
        one = self.accounts.look(lambda session: job_queue.get(session, project, job))
        found["job"] = event("job", jsonable_encoder(shown(one)))
        here = self.dispatcher
        if here is None or one.place != here.runner.place:
            return found
        found["curve"] = _event_of("curve", lambda: dict(here.runner.read_curve(job)))
        if (steering := here.steering_of(one)) is not None:
            found["versions"] = _event_of("versions", lambda: dict(steering.versions(job)))
        return found

    async def follow_log(self, member: Membership, job: str, begin: int) -> AsyncIterator[str]:
        """Yield the log of a job as events, the last of them `state`, or `refused`.

        begin: byte of the log, behind a line.
        """
        quiet = 0
        while True:
            try:
                now = await self._now(member, job)
            except AccountError as error:
                yield event("refused", str(error), begin)
                return
            except Unavailable:  # until the database is back
                yield STILL_HERE
                await rest(LOOK_S)
                continue
            try:
                content = await self._read(job, begin)
            except OSError as error:
                content = b""
                if quiet == 0:
                    yield event("line", f"the log cannot be read: {error.strerror}", begin)
            whole = _lines(content, ended=not now.state.is_open)
            for line in whole.splitlines(keepends=True):
                begin += len(line)
                yield event("line", line.decode(errors="replace").rstrip("\r\n"), begin)
            if whole:
                quiet = 0
                continue
            if not now.state.is_open:
                yield event("state", {"state": now.state, "cause": now.cause}, begin)
                return
            quiet += 1
            if quiet % QUIET_LOOKS == 1:
                yield STILL_HERE
            await rest(LOOK_S)

    async def _now(self, member: Membership, job: str) -> Job:
        """Return the job as of now; raises AccountError for a reader that may not see it any more."""
        await self._check_still(member)
        find: Callable[[], Job] = lambda: self.accounts.look(  # noqa: E731 - handed on
            lambda session: job_queue.get(session, member.project, job)
        )
        return await self._looks.at((Job, member.project, job), find)

    async def _read(self, job: str, begin: int) -> bytes:
        assert self.dispatcher is not None
        runner = self.dispatcher.runner
        return await self._looks.at(("log", job, begin), lambda: runner.read_log(job, begin, READ_BYTES))


def _event_of(kind: str, look: Callable[[], Any]) -> str:
    """Return the result of a look as an event, or the event `trouble` with the reason why it failed."""
    try:
        return event(kind, jsonable_encoder(look()))
    except (CannotSteer, RegistryError) as error:
        detail = str(error)
    except OSError as error:
        detail = error.strerror or "it cannot be read"
    return event("trouble", {"of": kind, "detail": detail})


def _lines(content: bytes, *, ended: bool) -> bytes:
    """Return the whole lines of a piece; all of it at the end of the log, or where one line fills it."""
    if ended or len(content) == READ_BYTES:
        cut = content.rfind(b"\n") + 1
        return content[:cut] or content
    return content[: content.rfind(b"\n") + 1]
