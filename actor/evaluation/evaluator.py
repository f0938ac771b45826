"""Evaluation actor: measures the versions that the learner asks about, on environments of its own.

In: `evaluate_version` from the session's watcher.  Out: one evaluation report per version. Waits for
nothing else. A report that a lost session swallowed is sent again in the next one without playing again;
an evaluator that crashed is told the version again and plays it again. A version that the broker no
longer keeps is skipped with a warning.

With `evaluation.base` the policy is played as it was made, too, before it holds any weights: once in the life
of a process, while the first version to be measured is still being learned.
"""

import logging
import time
from collections import Counter
from functools import partial

from penstock.actor.acting.health_watch import BEING_MADE, ENVIRONMENT
from penstock.actor.evaluation.play import Played
from penstock.actor.evaluation.runner import EvaluationRunner
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session
from penstock.actor.link.session_opening import count_strikes, open_session
from penstock.actor.specification.sections import evaluation_section
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, load
from penstock.protocol.messages import BASE, Episode, Report, Role, RunState
from penstock.protocol.refusal import Reason, Refusal
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle

log = logging.getLogger(__name__)

_LEAST_WAIT_S = 0.05


class Evaluator:
    """An evaluation actor; `run` is its life."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        broker_client: BrokerClient,
        actor_id: str,
        health: Health,
        settings: Settings,
    ) -> None:
        self._lifecycle, self._broker_client, self._actor_id = lifecycle, broker_client, actor_id
        self._health, self._settings = health, settings
        self._run = ""
        self._runner: EvaluationRunner | None = None
        self._done = self._strikes = 0
        self._unsent: dict[bool, tuple[Episode, ...]] = {}
        """Results by `deterministic`, the way they were played."""
        self._has_played_base = False

    def run(self) -> int:
        """Open sessions and serve them until there is no more to do."""
        try:
            while True:
                session = open_session(self._broker_client, self._actor_id, Role.EVALUATION, self._lifecycle)
                if session is None or self._serve(session):
                    return EXIT_OK
        finally:
            if self._runner is not None:
                self._runner.close()

    def _serve(self, session: Session) -> bool:
        """Evaluate in one session; True when the work is done, False when another session is needed."""
        session.start()
        try:
            with self._lifecycle.calling_on_drain(session.notify_waiters):
                return self._evaluate(session)
        finally:
            session.close(politely=not session.is_over)

    def _evaluate(self, session: Session) -> bool:
        self._prepare(session)
        self._health.set_ready(True)
        self._measure_base()
        sequence = 0
        while self._unsent or self._await_request(session):
            if not self._unsent:
                self._measure(session)
            while self._unsent and self._report(session, sequence + 1):
                sequence += 1
            if self._unsent:
                break
        session.check()
        return self._is_done(session, reported=sequence > 0)

    def _prepare(self, session: Session) -> None:
        specification = session.specification
        if self._runner is not None and self._run != specification.run:
            raise Fatal(f"the broker serves run {specification.run} now; start this actor again")
        if not evaluation_section(specification).episodes:
            raise ConfigurationError("evaluation.episodes=0: the run is not evaluated; start no such actor")
        if self._runner is None:
            self._health.watch(ENVIRONMENT, self._settings.actor.stall_timeout_s)
            self._health.expect(ENVIRONMENT, BEING_MADE)
            make_runner = load(find(specification.workload).runner)
            self._runner = made = make_runner(specification, self._settings)
            self._run = specification.run
            self._health.watch(ENVIRONMENT, made.stall_timeout_s)
            self._health.suspend(ENVIRONMENT)

    def _await_request(self, session: Session) -> bool:
        session.wait_until(lambda: self._is_over(session) or session.evaluate_version not in (0, self._done))
        return not self._is_over(session)

    def _is_over(self, session: Session) -> bool:
        stopping = session.state is RunState.STOPPING
        return self._lifecycle.draining.is_set() or session.is_over or stopping

    def _measure_base(self) -> None:
        """Play the policy that training begins with; leaves the result in `_unsent`."""
        assert self._runner is not None
        section, applied = self._runner.evaluation, self._runner.local.publication.version
        if not section.base or self._has_played_base or applied != BASE:
            return
        played = self._play(deterministic=section.deterministic)
        if played is None:
            return
        self._has_played_base = True
        self._unsent[section.deterministic] = _episodes(played, BASE)
        log.info("evaluated", extra={"version": BASE, "mean_return": _mean(played)})

    def _measure(self, session: Session) -> None:
        """Play the version asked for; leaves the result in `_unsent`, or nothing when it cannot be had."""
        assert self._runner is not None
        section, local = self._runner.evaluation, self._runner.local
        version, began = session.evaluate_version, time.monotonic()
        weights = session.fetch(version)
        if weights is None:
            log.warning("version is no longer kept, not evaluated", extra={"version": version})
            self._done = version
            return
        local.apply(weights)
        local.answer_probe(session)
        counts = section.deterministic
        results: dict[bool, tuple[Episode, ...]] = {}
        for deterministic in (counts, not counts) if section.both else (counts,):
            played = self._play(deterministic=deterministic)
            if played is None:
                return
            results[deterministic] = _episodes(played, version)
            words = {"version": version, "mean_return": _mean(played), "deterministic": deterministic}
            log.info("evaluated", extra=words | {"seconds": time.monotonic() - began})
        self._done, self._unsent = version, results

    def _play(self, *, deterministic: bool) -> list[Played] | None:
        """Every time from the same seeds; None when the process drains first."""
        assert self._runner is not None
        section, version = self._runner.evaluation, self._runner.local.publication.version
        self._health.expect(ENVIRONMENT, f"version {version} is being evaluated")
        played = self._runner.play(
            episodes=section.episodes,
            seed=section.seed,
            deterministic=deterministic,
            stop=self._lifecycle.draining,
            on_step=partial(self._health.progress, ENVIRONMENT),
        )
        self._health.suspend(ENVIRONMENT)
        return played

    def _report(self, session: Session, sequence: int) -> bool:
        """Send the first of `_unsent`; False when the session takes nothing more."""
        deterministic, episodes = next(iter(self._unsent.items()))
        report = Report(
            session=session.number,
            sequence=sequence,
            evaluation=True,
            deterministic=deterministic,
            episodes=episodes,
        )
        while not session.is_over and not self._lifecycle.draining.is_set():
            acked, refusal = session.report(report)
            if acked >= sequence:
                metrics.EPISODES.labels("yes").inc(len(episodes))
                del self._unsent[deterministic]
                return True
            self._refused(session, refusal)
        return False

    def _refused(self, session: Session, refusal: Refusal | None) -> None:
        if refusal is None or refusal.reason in (Reason.FULL, Reason.NOT_READY):
            wait_ms = refusal.retry_after_ms if refusal else 0
            self._lifecycle.draining.wait(max(_LEAST_WAIT_S, wait_ms / 1000))
        else:
            session.end_by(refusal)

    def _is_done(self, session: Session, *, reported: bool) -> bool:
        if session.ended is None or session.ended.reason is Reason.RUN_CLOSED:
            return True
        log.warning("session ended", extra={"refusal": session.ended})
        self._strikes = count_strikes(self._strikes, session.ended, acknowledged=reported)
        return self._lifecycle.draining.is_set()


def _mean(played: list[Played]) -> float:
    return sum(one.episode_return for one in played) / len(played)


def _episodes(played: list[Played], version: int) -> tuple[Episode, ...]:
    """Return the episodes, by start and number; equal seeds have equal ones, whatever the version."""
    begun: Counter[int] = Counter()
    made = []
    for index, one in enumerate(played):
        start = index if one.start is None else one.start
        made.append(
            Episode(
                slot_id=start,
                episode_id=begun[start],
                episode_return=one.episode_return,
                length=one.length,
                terminated=one.terminated,
                version=version,
            )
        )
        begun[start] += 1
    return tuple(made)
