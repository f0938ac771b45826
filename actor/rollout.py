"""The loop of a rollout worker in one session.

  ┌─► await leave ─► apply newest weights ─► unroll T steps ─► put into the outbox ─┐
  └──────────────────────────────────────────────────────────────────────────────────┘

In: leave to begin a sequence number and weights, from the session's watcher.  Out: one fragment per
sequence number and the episodes that ended, into the outbox. Waits for leave (raised as the learner
settles), for the run (paused) and for room in the outbox: the environment then stands still and nothing
is dropped. Ends, with the unroll in hand cut and handed over, on a drain, a stopped run or a session's end.
"""

import time
from dataclasses import dataclass

import torch

from actor.acting import LocalPolicy
from actor.fragment_builder import FragmentBuilder, Stamp
from actor.outbox import Outbox
from actor.run import Run
from actor.seeds import action_seed, environment_seeds
from actor.session import Session
from actor.vector import Stepper
from penstock.runtime import metrics
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle
from penstock.wire.messages import RunState

ENVIRONMENT = "environment"
"""Name under which health watches the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What a worker acts with, made once and used in every session of the run."""

    run: Run
    stepper: Stepper
    builder: FragmentBuilder
    local: LocalPolicy


def make_crew(of: Run, health: Health) -> Crew:
    """Environments, arrays and policy of a run."""
    torch.set_num_threads(of.actor.threads)
    health.watch(ENVIRONMENT, of.actor.stall_timeout_s)
    health.suspend(ENVIRONMENT)
    specification, count = of.specification, of.environment.count
    return Crew(
        run=of,
        stepper=of.make_environment(of.environment, count, specification.seed),
        builder=FragmentBuilder(
            specification.schema, specification.unroll_length, count, of.actor.compress == "lz4"
        ),
        local=of.make_policy(specification.seed),
    )


class Rollout:
    """The loop of one session."""

    def __init__(
        self, lifecycle: Lifecycle, session: Session, outbox: Outbox, crew: Crew, health: Health
    ) -> None:
        self._lifecycle, self._stop = lifecycle, lifecycle.draining
        self._session, self._outbox, self._crew, self._health = session, outbox, crew, health

    def run(self, actor_id: str) -> None:
        """Act until the session is over, the run stops or the process drains."""
        with self._lifecycle.calling_on_drain(self._session.wake):
            self._act(actor_id)

    def _act(self, actor_id: str) -> None:
        crew, session = self._crew, self._session
        seed = crew.run.specification.seed
        seeds = environment_seeds(seed, actor_id, session.seed_salt, crew.stepper.slots)
        crew.local.policy.seed_actions(action_seed(seed, actor_id, session.seed_salt))
        crew.builder.start(crew.stepper.reset(seeds))
        if crew.local.publication.version:
            crew.local.tell(session)
        sequence = 1
        while self._await_leave(sequence):
            crew.local.follow(session)
            round_ = session.leave.round
            session.begun_through = sequence
            self._unroll()
            if not self._hand_over(sequence, round_):
                return
            sequence += 1

    def _await_leave(self, sequence: int) -> bool:
        """Wait until `sequence` may begin; False when it never will."""
        session = self._session
        if self._may_begin(sequence):
            return not self._is_over()
        self._health.suspend(ENVIRONMENT)
        began = time.monotonic()
        cause = "pause" if session.state is RunState.PAUSED else "leave"
        with session.changed:
            session.changed.wait_for(lambda: self._is_over() or self._may_begin(sequence))
        metrics.ACTOR_WAIT_SECONDS.labels(cause).inc(time.monotonic() - began)
        self._health.progress(ENVIRONMENT)
        return not self._is_over()

    def _may_begin(self, sequence: int) -> bool:
        session = self._session
        weights, leave = session.weights, session.leave
        return (
            sequence <= leave.begin_through
            and session.state is RunState.RUNNING
            and weights is not None
            and weights.publication.version >= max(1, leave.min_version)
        )

    def _is_over(self) -> bool:
        session = self._session
        return self._stop.is_set() or session.is_over or session.state is RunState.STOPPING

    def _unroll(self) -> None:
        """The hot loop: until the fragment is full, or there is nobody to act for any more."""
        builder, stepper, policy = self._crew.builder, self._crew.stepper, self._crew.local.policy
        progress = self._health.progress
        while not builder.is_full:
            acted = policy.act(builder.observation())
            stepped = stepper.step(policy.environment_action(acted.action))
            builder.record(acted.action, acted.log_prob, stepped)
            progress(ENVIRONMENT)
            if self._is_over():
                return

    def _hand_over(self, sequence: int, round_: int) -> bool:
        crew = self._crew
        stamp = Stamp(
            run=crew.run.specification.run,
            session=self._session.number,
            sequence=sequence,
            weights=crew.local.publication,
            round=round_,
        )
        fragment, episodes = crew.builder.cut(stamp)
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
        self._health.progress(ENVIRONMENT)
        metrics.ACTOR_WAIT_SECONDS.labels("outbox").inc(time.monotonic() - began)
        return kept
