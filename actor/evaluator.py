"""Evaluation actor: plays the versions that the learner wants measured, in separate environments.

A report that was lost with its session is sent again, without playing again; an evaluator that crashed plays
the version again. With `evaluation.base` the policy is played once before it holds any weights.
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.actor import specification as run
from penstock.actor.acting.stepper import Stepper
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import LEAST_WAIT_S, Session, count_strikes, open_session
from penstock.actor.rollout.loop import BEING_MADE, ENVIRONMENT
from penstock.actor.specification import LocalPolicy, Run, evaluation_section
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, load
from penstock.policy.acting.acting_policy import ActingPolicy, begun
from penstock.protocol.messages import BASE, Episode, Report, Role, RunState
from penstock.protocol.refusal import Reason
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.health import Health, on_made
from penstock.runtime.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode: undiscounted return, length in steps.

    start: number of its start, such as a prompt, where episodes may share one; None: it has a separate seed.
    """

    episode_return: float
    length: int
    terminated: bool
    start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """How episodes are played.

    stop: ends them early. on_step: called after each step of all. most_steps: after which an episode is cut.
    """

    deterministic: bool
    stop: threading.Event
    on_step: Callable[[], None] = lambda: None
    most_steps: float = math.inf


def in_waves(episodes: int, waves: Iterable[list[Played] | None]) -> list[Played] | None:
    """Return the first `episodes` episodes of waves; None once a wave was stopped."""
    played: list[Played] = []
    for wave in waves:
        if wave is None:
            return None
        played += wave
        if len(played) >= episodes:
            break
    return played[:episodes]


def play_wave(stepper: Stepper, policy: ActingPolicy, seed: int, how: Playing) -> list[Played] | None:
    """Play one episode in each slot, the i-th seeded with `seed` + i; None when stopped first.

    A slot's steps after its episode are ignored, so that short episodes do not count more often. A vector
    entry point takes one seed per wave.
    """
    slots = stepper.slots
    is_alive, is_terminated = np.ones(slots, np.bool_), np.zeros(slots, np.bool_)
    returns, lengths = np.zeros(slots, np.float64), np.zeros(slots, np.int64)
    observation = stepper.reset(range(seed, seed + slots)) | policy.initial_state(slots)
    while is_alive.any():
        if how.stop.is_set():
            return None
        acted = policy.act(observation, deterministic=how.deterministic)
        stepped = stepper.step(policy.environment_action(acted.action))
        returns += np.where(is_alive, stepped.reward, 0.0)
        lengths += is_alive
        if stepped.lost is not None:
            returns[is_alive & stepped.lost] = 0.0
            lengths[is_alive & stepped.lost] = 0
        is_terminated |= is_alive & stepped.terminated
        if stepped.ended is not None:
            is_alive[stepped.ended.slots] = False
        if (is_cut := is_alive & (lengths >= how.most_steps)).any():
            is_alive[is_cut] = False
            log.warning("episodes were cut", extra={"evaluation.max_episode_steps": how.most_steps})
        how.on_step()
        observation = stepped.observation | begun(acted.state, stepped.begins)
    rows = zip(returns.tolist(), lengths.tolist(), is_terminated.tolist(), strict=True)
    return [Played(episode_return=r, length=n, terminated=t) for r, n, t in rows]


MAX_ENVIRONMENTS = 100
"""Environments of an evaluation that one vector entry point, or EnvPool, steps together."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "EnvironmentRunner":
    """episodes: how many to play; None: as many as the run is set to."""
    return EnvironmentRunner(run.read(specification, settings.actor), episodes)


log = logging.getLogger(__name__)


class Runner(ABC):
    """Base of runners, which play evaluations in waves of episodes with the weights that `local` holds.

    Made once for a run, whose `evaluation` section it has. stall_timeout_s: how long a step may take.
    """

    def __init__(self, of: Run, local: LocalPolicy) -> None:
        self.evaluation, self.stall_timeout_s = of.evaluation, float(of.actor.stall_timeout_s)
        self.local = local

    def play(
        self,
        *,
        episodes: int,
        seed: int,
        deterministic: bool,
        stop: threading.Event,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Played] | None:
        """Play so many episodes, equal for equal seeds and weights; None when `stop` was set first.

        deterministic: take the most likely action in place of a drawn one. on_step: called after each step of
        all environments, as a sign of progress.
        """
        most_steps = self.evaluation.max_episode_steps
        how = Playing(deterministic=deterministic, stop=stop, on_step=on_step, most_steps=most_steps)
        return in_waves(episodes, self.waves(episodes, seed, how))

    @abstractmethod
    def waves(self, episodes: int, seed: int, how: Playing) -> Iterator[list[Played] | None]:
        """Yield episodes in groups, at least `episodes` in all, equal for equal seeds; None after a stop."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        ...


class EnvironmentRunner(Runner):
    """Plays in environments that it makes."""

    def __init__(self, of: Run, episodes: int | None = None) -> None:
        section = of.environment.for_evaluation()
        usual = MAX_ENVIRONMENTS if section.vectorise in ("vector", "envpool") else section.count
        count = min(episodes or of.evaluation.episodes, of.evaluation.environments or usual)
        self._stepper = of.make_environment(section, count, of.evaluation.seed)
        super().__init__(of, of.make_policy(of.specification.seed))
        self.local.policy.use_threads(of.actor.threads)

    def waves(self, episodes: int, seed: int, how: Playing) -> Iterator[list[Played] | None]:
        self.local.policy.seed_actions(seed)
        for first in range(0, episodes, self._stepper.slots):
            yield play_wave(self._stepper, self.local.policy, seed + first, how)

    def close(self) -> None:
        self._stepper.close()


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
        self._runner: Runner | None = None
        self._done = self._strikes = 0
        self._unsent: dict[bool, tuple[Episode, ...]] = {}
        """Results by `deterministic`, the way they were played."""
        self._has_played_base = False

    def run(self) -> int:
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
            with on_made(partial(self._health.progress, ENVIRONMENT)):
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
        """Play the requested version; leaves the result in `_unsent`, nothing without its weights."""
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
            if refusal is None or refusal.reason in (Reason.FULL, Reason.NOT_READY):
                wait_ms = refusal.retry_after_ms if refusal else 0
                self._lifecycle.draining.wait(max(LEAST_WAIT_S, wait_ms / 1000))
            else:
                session.end_by(refusal)
        return False

    def _is_done(self, session: Session, *, reported: bool) -> bool:
        if session.ended is None or session.ended.reason is Reason.RUN_CLOSED:
            return True
        log.warning("session ended", extra={"refusal": session.ended})
        self._strikes = count_strikes(self._strikes, session.ended, acknowledged=reported)
        return self._lifecycle.draining.is_set()


def _mean(played: list[Played]) -> float:
    return sum(one.episode_return for one in played) / len(played)


def _episodes(played: list[Played], version: int) -> tuple[Episode, ...]:
    """Return the episodes by start and number; equal seeds give the same episodes to every version."""
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
