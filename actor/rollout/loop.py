"""A rollout worker: one session after the other, and the loop in each.

  ┌─► await credit ─► apply newest weights ─► unroll T steps ─► put into the outbox ─┐
  └──────────────────────────────────────────────────────────────────────────────────┘

It waits for credit, for the run (paused) and for room in the outbox: the environment then stands still and
nothing is dropped. A drain, a stopped run or a session's end cut the unroll in hand and hand it over.

An environment that stands still holds the thread of the loop, perhaps for ever. Another thread then hands
over the steps before that, which are experience like any other. If the environment comes back after all, its
step is dropped, and the session ends so that the next one begins with a reset.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from penstock.actor.link.ack_journal import AckJournal
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.outbox import FragmentQueue, Outbox
from penstock.actor.link.session import Session, describe_run, open_session
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Episode, Role, RunState
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle

# ---- How health watches what acts: that environments step and that published weights arrive.

ENVIRONMENT: Final = "environment"
"""Name under which health watches the steps."""
BEING_MADE: Final = "environments and policy are being made"
WEIGHTS: Final = "weights"
"""Name under which health watches that published weights arrive."""


def watch(health: Health, stall_timeout_s: float) -> None:
    """Have health watch what a generator does, from when it is first expected."""
    for name in (ENVIRONMENT, WEIGHTS):
        health.watch(name, stall_timeout_s)
        health.suspend(name)


def note_lag(health: Health, known: int, newest: int, arrived_bytes: int) -> None:
    """Expect weights while `known` is behind `newest` (0: none); each chunk that arrives is progress."""
    if newest > known:
        if arrived_bytes > 0:
            health.progress(WEIGHTS)
        health.expect(WEIGHTS, f"version {newest} is published, {known} is held here")
    else:
        health.suspend(WEIGHTS)


# ---- The loop of one session.

_COUNT_S: Final = 1.0
"""Seconds after which a wait that has not ended is counted, so that an endless one is seen."""
_LOOK_S: Final = 1.0
"""Between two looks whether the environment stands still."""


class FragmentGenerator(Protocol):
    """Makes fragments for a worker; made once and used in every session of the run."""

    @property
    def specification(self) -> RunSpecification:
        """The run it was made for."""

    @property
    def outbox_fragments(self) -> int:
        """Most unacknowledged fragments."""

    def begin(self, actor_id: str, session: Session) -> None:
        """Start anew for a session, with other seeds and no running episodes; report the applied weights."""

    def follow(self, session: Session) -> None:
        """Act with the session's newest weights from now on."""

    def unroll(self, is_over: Callable[[], bool]) -> None:
        """Make at least one step, until a fragment is full or `is_over`."""

    @property
    def collected(self) -> int:
        """Steps that `cut` would hand over now, from another thread, while `unroll` stands still; 0: none."""

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        """Return what was collected, as a fragment, and the episodes that ended in it.

        session, sequence: numbers that the fragment gets. round_: its lock-step round, 0 outside lock-step.
        """

    def close(self) -> None: ...


class Rollout:
    """The loop of one session."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        session: Session,
        outbox: Outbox,
        generator: FragmentGenerator,
        health: Health,
    ) -> None:
        self._lifecycle, self._stop = lifecycle, lifecycle.draining
        self._session, self._outbox, self._generator, self._health = session, outbox, generator, health
        self._cutting = threading.RLock()
        """Held while a fragment is cut; and until it is handed over, where the environment stands still."""
        self._begun: tuple[int, int] | None = None
        """Sequence and lock-step round of the fragment in hand."""
        self.stood_still = False
        """Whether the environment stood still, so that it is to be reset in another session."""
        self._ended = threading.Event()

    def run(self, actor_id: str) -> None:
        """Act until the session is over, the run stops, the process drains or the environment stood still."""
        self._session.run_thread("standstill", self._watch_standstill)
        with self._lifecycle.calling_on_drain(self._session.notify_waiters):
            try:
                self._act(actor_id)
            finally:
                self._ended.set()
                self._health.suspend(ENVIRONMENT)

    def _act(self, actor_id: str) -> None:
        generator, session = self._generator, self._session
        self._health.expect(ENVIRONMENT, "environments are being reset")
        generator.begin(actor_id, session)
        # From here on a step is expected whenever a fragment may begin, the first one included.
        self._health.progress(ENVIRONMENT)
        self._health.expect(ENVIRONMENT, "environments are being stepped")
        sequence = 1
        while self._await_credit(sequence):
            generator.follow(session)
            self._begun = (sequence, session.begin(sequence))
            failpoint("unroll.begun", sequence)
            generator.unroll(self._is_over)
            cut = self._cut()
            self._health.suspend(ENVIRONMENT)
            if cut is None or not self._hand_over(*cut):
                return
            self._health.progress(ENVIRONMENT)
            sequence += 1

    def _watch_standstill(self) -> None:
        """Hand over what was collected before the environment stood still; nothing more is begun then."""
        while not (self.stood_still or self._session.is_closing or self._ended.wait(_LOOK_S)):
            with self._cutting:
                cut = self._cut() if self._stands_still() else None
                if cut is not None:
                    self.stood_still = True
                    self._hand_over(*cut)

    def _stands_still(self) -> bool:
        return (
            self._begun is not None
            and self._health.has_stalled(ENVIRONMENT)
            and self._generator.collected > 0
        )

    def _await_credit(self, sequence: int) -> bool:
        """Wait until `sequence` may begin; False when it never will."""
        session = self._session
        if session.may_begin(sequence):
            return not self._is_over()
        self._health.suspend(ENVIRONMENT)
        failpoint("leave.waiting", sequence)
        began = time.monotonic()
        while not session.wait_until(lambda: self._is_over() or session.may_begin(sequence), _COUNT_S):
            began = _count_wait(self._cause(), began)
        _count_wait(self._cause(), began)
        self._health.progress(ENVIRONMENT)
        return not self._is_over()

    def _cause(self) -> str:
        return "pause" if self._session.state is RunState.PAUSED else "leave"

    def _is_over(self) -> bool:
        session = self._session
        is_ended = session.is_over or session.state is RunState.STOPPING
        return is_ended or self._stop.is_set() or self.stood_still

    def _cut(self) -> tuple[Fragment, list[Episode]] | None:
        """Cut the current fragment; None where the watcher has cut it because the environment stood still."""
        with self._cutting:
            begun, self._begun = self._begun, None
            if begun is None:
                return None
            return self._generator.cut(self._session.number, *begun)

    def _hand_over(self, fragment: Fragment, episodes: list[Episode]) -> bool:
        sequence = fragment.header.sequence
        failpoint("fragment.cut", sequence)
        _count(fragment, episodes)
        self._outbox.report(episodes)
        began = time.monotonic()
        kept = self._outbox.put(fragment, self._stop)
        failpoint("outbox.put", sequence)
        _count_wait("outbox", began)
        return kept


def _count(fragment: Fragment, episodes: list[Episode]) -> None:
    metrics.FRAGMENTS_BUILT.inc()
    metrics.ENV_STEPS.inc(int(fragment.arrays()["valid"].sum()))
    for episode in episodes:
        metrics.EPISODE_RETURN.observe(episode.episode_return)
        metrics.EPISODE_LENGTH_STEPS.observe(episode.length)
    metrics.EPISODES.labels("no").inc(len(episodes))


def _count_wait(cause: str, since: float) -> float:
    """Count the wait since then; returns now."""
    now = time.monotonic()
    metrics.ACTOR_WAIT_SECONDS.labels(cause).inc(now - since)
    return now


# ---- Rollout worker: steps N environments with a local policy and sends what happened as fragments.

log = logging.getLogger(__name__)

FLUSH_S = 10.0


class Worker:
    """A rollout worker; `run` is its life."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        broker_client: BrokerClient,
        actor_id: str,
        health: Health,
        make_generator: Callable[[RunSpecification], FragmentGenerator],
        *,
        ack_journal: Path | None = None,
    ) -> None:
        """ack_journal: folder for the record of what was acknowledged; None: no record."""
        self._lifecycle, self._broker_client, self._actor_id = lifecycle, broker_client, actor_id
        self._health, self._make_generator = health, make_generator
        self._journal_folder = ack_journal
        self._journal: AckJournal | None = None
        self._strikes = 0

    def run(self) -> int:
        generator = None
        try:
            generator = self._prepare()
            while generator is not None:
                session = open_session(self._broker_client, self._actor_id, Role.ROLLOUT, self._lifecycle)
                if session is None or self._serve(session, generator):
                    break
            return EXIT_OK
        finally:
            if generator is not None:
                generator.close()
            if self._journal is not None:
                self._journal.close()

    def _prepare(self) -> FragmentGenerator | None:
        """Make environments and policy before there is a session, so that nothing waits for them.

        None when the process drains or the run has ended.
        """
        specification = describe_run(self._broker_client, self._actor_id, Role.ROLLOUT, self._lifecycle)
        if specification is None:
            return None
        if self._journal_folder is not None:
            self._journal = AckJournal(self._journal_folder, specification.run, self._actor_id)
        return self._make_generator(specification)

    def _serve(self, session: Session, generator: FragmentGenerator) -> bool:
        """Act in one session; True when the worker's work is done, False when another one is needed."""
        session.start()
        try:
            known, served = generator.specification.run, session.specification.run
            if known != served:
                raise Fatal(
                    f"the broker serves run {served} now, this actor works for {known}; start it again"
                )
            outbox = Outbox(session, FragmentQueue(generator.outbox_fragments), self._journal)
            outbox.start()
            self._health.set_ready(True)
            rollout = Rollout(self._lifecycle, session, outbox, generator, self._health)
            rollout.run(self._actor_id)
            session.check()
            if session.ended is None:
                session.give_back()
            strikes = outbox.conclude(self._strikes, FLUSH_S)
            if strikes is None:
                session.check()
            self._strikes = self._strikes if strikes is None else strikes
            return strikes is None and not rollout.stood_still
        finally:
            session.close(politely=not session.is_over)
            log.info("session closed", extra={"session": session.number})
