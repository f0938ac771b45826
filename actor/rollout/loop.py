"""The loop of a rollout worker in one session.

  ┌─► await credit ─► apply newest weights ─► unroll T steps ─► put into the outbox ─┐
  └──────────────────────────────────────────────────────────────────────────────────┘

In: credit to begin a sequence number and weights, from the session's watcher.  Out: one fragment per
sequence number and the episodes that ended, into the outbox. Waits for credit (raised as the learner
settles), for the run (paused) and for room in the outbox: the environment then stands still and nothing
is dropped. Ends, with the unroll in hand cut and handed over, on a drain, a stopped run or a session's end.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from actor.acting.health_watch import ENVIRONMENT
from actor.link.outbox import Outbox
from actor.link.session import Session
from penstock.runtime import metrics, tracing
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle
from penstock.wire.fragment import Fragment
from penstock.wire.messages import Episode, RunState
from penstock.wire.specification import RunSpecification

_COUNT_S: Final = 1.0
"""A wait is counted as it goes on: one that never ends is seen as well."""


class FragmentGenerator(Protocol):
    """Makes fragments for a worker; made once and used in every session of the run."""

    @property
    def specification(self) -> RunSpecification:
        """The run it was made for."""

    @property
    def outbox_fragments(self) -> int:
        """Most unacknowledged fragments."""

    def begin(self, actor_id: str, session: Session) -> None:
        """Start anew for a session: other seeds, no running episodes; says which weights are held already."""

    def follow(self, session: Session) -> None:
        """Act with the session's newest weights from now on."""

    def unroll(self, is_over: Callable[[], bool]) -> None:
        """Make at least one step, until a fragment is full or `is_over`."""

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        """Return what was collected, as a fragment, and the episodes that ended in it.

        session, sequence: numbers that the fragment gets. round_: its lock-step round, 0 outside lock-step.
        """

    def close(self) -> None:
        """Let go of everything."""


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

    def run(self, actor_id: str) -> None:
        """Act until the session is over, the run stops or the process drains."""
        with self._lifecycle.calling_on_drain(self._session.notify_waiters):
            try:
                self._act(actor_id)
            finally:
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
            with tracing.trace("actor.unroll"):
                generator.follow(session)
                round_ = session.begin(sequence)
                failpoint("unroll.begun", sequence)
                generator.unroll(self._is_over)
                fragment, episodes = generator.cut(session.number, sequence, round_)
                if tracing.is_on():
                    _describe(fragment)
            if not self._hand_over(fragment, episodes):
                return
            sequence += 1

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
        return self._stop.is_set() or session.is_over or session.state is RunState.STOPPING

    def _hand_over(self, fragment: Fragment, episodes: list[Episode]) -> bool:
        sequence = fragment.header.sequence
        failpoint("fragment.cut", sequence)
        metrics.FRAGMENTS_BUILT.inc()
        metrics.ENV_STEPS.inc(int(fragment.arrays()["valid"].sum()))
        for episode in episodes:
            metrics.EPISODE_RETURN.observe(episode.episode_return)
            metrics.EPISODE_LENGTH_STEPS.observe(episode.length)
        metrics.EPISODES.labels("no").inc(len(episodes))
        self._outbox.report(episodes)
        began = time.monotonic()
        self._health.suspend(ENVIRONMENT)
        kept = self._outbox.put(fragment, self._stop)
        failpoint("outbox.put", sequence)
        self._health.progress(ENVIRONMENT)
        _count_wait("outbox", began)
        return kept


def _describe(fragment: Fragment) -> None:
    header = fragment.header
    tracing.describe(
        run=header.run,
        session=header.session,
        sequence=header.sequence,
        steps=header.charge,
        version=header.newest_version,
    )


def _count_wait(cause: str, since: float) -> float:
    """Count the wait since then; returns now."""
    now = time.monotonic()
    metrics.ACTOR_WAIT_SECONDS.labels(cause).inc(now - since)
    return now
