"""The jobs of a project live, as server-sent events: what has changed since it was sent last, no more.

jobs        the newest of the project: {"jobs"}
job         the one that is looked at
curve       of its run
versions    of its run, and its traffic
trouble     what cannot be shown now: {"of", "detail"}
refused     the session, the token or the membership has ended; it is the last event
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi.encoders import jsonable_encoder

from penstock.gateway.accounts.account_errors import AccountError
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.event_text import STILL_HERE, event
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_dispatcher import JobDispatcher
from penstock.gateway.jobs.job_records import shown
from penstock.gateway.jobs.log_stream import LOOK_S, QUIET_LOOKS, RIGHTS_S, SharedLooks, rest
from penstock.gateway.jobs.steering import CannotSteer
from penstock.registry.records import RegistryError, Unavailable


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """Those that follow jobs at one gateway, who look together. dispatcher: None where it runs no jobs."""

    accounts: Accounts
    dispatcher: JobDispatcher | None
    _looks: SharedLooks = field(default_factory=lambda: SharedLooks(LOOK_S / 2))
    _rights: SharedLooks = field(default_factory=lambda: SharedLooks(RIGHTS_S))

    async def follow(self, member: Membership, job: str) -> AsyncIterator[str]:
        """Yield the events until the reader may read no more. job: the one that is looked at, "" for none."""
        sent, quiet = dict[str, str](), 0
        while True:
            try:
                fresh = await self._looked(member, job)
            except AccountError as error:
                yield event("refused", str(error))
                return
            except Unavailable:  # it goes on when the database is back
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
        """Return every event as it is now, for who may still see it; raises AccountError."""
        who = (member.principal.subject, member.principal.session, member.project)
        await self._rights.at(who, lambda: self.accounts.check_still(member))
        found: dict[str, str] = await self._looks.at(
            (member.project, job), partial(self._found, member.project, job)
        )
        return found

    def _found(self, project: str, job: str) -> dict[str, str]:
        """Return the events of a project by what they are about."""
        every = self.accounts.look(lambda session: job_queue.read(session, project, None, None))
        found = {"jobs": event("jobs", jsonable_encoder({"jobs": [shown(one) for one in every]}))}
        if not job:
            return found
        one = self.accounts.look(lambda session: job_queue.get(session, project, job))
        found["job"] = event("job", jsonable_encoder(shown(one)))
        here = self.dispatcher
        if here is None or one.place != here.runner.place:
            return found
        found["curve"] = _told("curve", lambda: dict(here.runner.read_curve(job)))
        if (steering := here.steering) is not None:
            found["versions"] = _told("versions", lambda: dict(steering.versions(job)))
        return found


def _told(kind: str, look: Callable[[], Any]) -> str:
    """Return what a look finds as an event; what cannot be shown hides nothing else."""
    try:
        return event(kind, jsonable_encoder(look()))
    except (CannotSteer, RegistryError) as error:
        detail = str(error)
    except OSError as error:
        detail = error.strerror or "it cannot be read"
    return event("trouble", {"of": kind, "detail": detail})
