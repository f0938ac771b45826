"""A run as store and learner log see it: opened, with simulated actors that need no network."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Appended, AppendItem, Opened, Pacing
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.protocol.fragment import Kind, header_bytes
from penstock.protocol.messages import Credit, Role, Watch
from penstock.protocol.specification import RunSpecification
from tests.support.run import small_run

TTL_MS = 60_000
PACING = Pacing(
    budget=4 * small_run.CHARGE,
    fragment_charge=small_run.CHARGE,
    actor_count=1,
    lock_step=False,
    session_timeout_ms=30_000,
    max_log_bytes=2**20,
    max_log_entries=1000,
)
BLOB = b"weights" * 10
Begin = Callable[..., LearnerLog]
"""`open_run` of a test's own server."""


def item(session: int, sequence: int, *, steps: int | None = None, kind: Kind = Kind.TRAIN) -> AppendItem:
    """A fragment as the broker hands it to the store; `steps` shortens it."""
    fragment = small_run.fragment(session, sequence)
    header = replace(fragment.header, kind=kind, steps=steps or fragment.header.steps)
    return AppendItem(header=header, header_bytes=header_bytes(header), payload=fragment.payload)


def open_run(
    url: str,
    *,
    publish: bool = True,
    holder: str = "learner",
    weights: bytes = BLOB,
    wait_s: float = 5.0,
    run: RunSpecification | None = None,
    unroll: int = small_run.STEPS,
    **pacing: Any,
) -> LearnerLog:
    """A learner that has taken the lease, opened the log and published."""
    log = LearnerLog.connect(url, wait_s=wait_s)
    log.acquire(small_run.RUN, holder, TTL_MS)
    log.start((run or small_run.specification(unroll_length=unroll)).encode(), replace(PACING, **pacing))
    if publish:
        log.publish(weights, update=0, settled=0, scalars={})
    return log


async def reconnect(store: Store) -> None:
    """Let the store notice that Redis was restarted: one call fails, the next one is served."""
    with contextlib.suppress(StoreUnavailable):
        await store.status()
    await store.status()


@dataclass
class Actor:
    """An actor without environment: appends as far as its credit goes."""

    store: Store
    name: str
    session: int = 0
    acked: int = 0
    credit: Credit = field(default_factory=Credit)
    role: Role = Role.ROLLOUT

    async def open(self) -> Opened:
        """Open a session; the books of the old one are forgotten."""
        opened = await self.store.open_session(self.name, self.role)
        assert isinstance(opened, Opened), opened
        self.session, self.acked, self.credit = opened.session, 0, opened.credit
        return opened

    async def watch(self) -> Credit:
        watched = await self.store.watch(Watch(session=self.session, begun_through=self.credit.begin_through))
        assert watched.news is not None, watched.refusal
        self.credit = watched.news.credit
        return self.credit

    async def append(self, count: int = 1, **options: Any) -> Appended:
        """Append the next `count` fragments in as many calls as credit needs; returns the last reply."""
        while True:
            credit = self.credit.begin_through - self.acked if self.role is Role.ROLLOUT else count
            sent = min(count, max(1, credit))
            reply = await self._append(sent, **options)
            count -= sent
            if count <= 0 or reply.refusal is not None:
                return reply

    async def _append(self, count: int, **options: Any) -> Appended:
        items = [item(self.session, self.acked + 1 + i, **options) for i in range(count)]
        reply = await self.store.append(self.session, self.acked, items)
        self.acked = max(self.acked, reply.acked_through)
        self.credit = reply.credit
        return reply

    async def work(self) -> int:
        """Append everything that there is credit for; the number of fragments taken."""
        begun = self.acked
        while self.credit.begin_through > self.acked:
            reply = await self.append()
            assert reply.refusal is None, reply.refusal
        return self.acked - begun


async def new_actor(store: Store, name: str = "actor-0", *, role: Role = Role.ROLLOUT) -> Actor:
    """An actor with a session."""
    actor = Actor(store, name, role=role)
    await actor.open()
    return actor
