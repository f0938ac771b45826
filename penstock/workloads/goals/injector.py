"""One interval after the other: observe, ask, gate, carry out, tell.

    observe ─► suggestion ─► gate and rules ─► proposed (a line) ─► veto? ─► step told ─► injected (a line)
            ─► carried out ─► feedback (a line) ─► reward told ─► processed (a line)

A process may be killed at any point; `injection_journal` says what is found of it, and `recover` goes on from
there. No goal is carried out twice. What was not done as the gate decided (auto is off, quiet hours, the
daily limit, a veto) is told as a step without a probability, from which no on-policy algorithm learns.
"""

import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.client import PolicyClient, PolicyError
from penstock.client.errors import EpisodeElsewhere, EpisodeUnknown, InvalidRequest, NotAllowed
from penstock.client.synchronous import Episode
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.protocol.spaces import Box, Discrete
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.failpoint import failpoint
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.goals.commands import InjectOptions
from penstock.workloads.goals.host import GoalReward, History, Outcome, SimulatedHost
from penstock.workloads.goals.injection_journal import (
    INTERRUPTED,
    VETO,
    Beat,
    Feedback,
    Injection,
    InjectionJournal,
    InjectionRules,
    QuietHours,
    fit_success,
    goal_id,
    is_on,
    last_switch,
    write_beat,
)
from penstock.workloads.goals.live_host import Commands, Executor, read_commands

# ---- The policy server as an injector uses it: what it would do, what was done instead, what that earned.
# Each decision asks twice. The first Act has no episode: it draws an action and tells the probabilities of
# all. The second is the step of the episode, with what the gate has let through and the probability of that.

_FINAL: Final = (InvalidRequest, NotAllowed, EpisodeElsewhere, EpisodeUnknown)
"""Refusals that no repetition changes."""


class Unanswered(Exception):
    """There is no answer of a version of the policy now; nothing was done."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What the policy would do. chances: μ, float64 [A]. value: the critic's, None where it has none."""

    action: int
    chances: NDArray[np.float64]
    value: float | None
    version: int


class AskedPolicy:
    """One policy for one host; begins episodes as they are needed."""

    def __init__(self, client: PolicyClient, client_key: str, goals: tuple[str, ...]) -> None:
        """goals: in the order of the actions behind *nothing*."""
        self._client, self._key, self._goals = client, client_key, goals
        self._episode: Episode | None = None
        self.step = 0

    @property
    def episode_id(self) -> str:
        return self._episode.episode_id if self._episode else ""

    def _check(self) -> None:
        """Raise ConfigurationError where the policy does not fit the goals; PolicyError as a client does."""
        width, goals = History(self._goals).width, self._goals
        told = self._client.describe()
        seen, done = told.observation_space, told.action_space
        fits = (
            isinstance(seen, Box)
            and seen.shape == (width,)
            and isinstance(done, Discrete)
            and (done.n, done.start) == (len(goals) + 1, 0)
        )
        if not fits:
            raise ConfigurationError(
                f"--server: its policy sees {seen} and does {done}; these goals need {width} numbers and "
                f"{len(goals) + 1} actions (nothing, {', '.join(goals)}): serve a policy that was "
                "trained with them"
            )
        if told.chooses_by_value:
            raise ConfigurationError(
                "--server: its policy chooses by the values of actions (DQN), whose probabilities say how it "
                "explores, not how sure it is; serve it with --set serving.softmax_temperature=0.2, by which "
                "it draws from a softmax of its values, or one that was trained with algorithm.name=ppo"
            )

    def begin(self) -> None:
        """Begin an episode where none is open; ConfigurationError: the policy does not fit the goals."""
        if self._episode is not None:
            return
        try:
            self._check()
            self._episode, self.step = self._client.start_episode(self._key), 0
        except InvalidRequest as error:
            # It would be refused at each interval, for as long as nobody looks.
            raise ConfigurationError(f"--server: refuses what it is asked: {error!s:.300}") from error

    def suggest(self, observation: NDArray[np.float32]) -> Suggestion:
        """Ask what the policy would do at float32 [width]; raises Unanswered where a fallback answered."""
        told = self._client.act(observation, client_key=self._key, distribution=True, value=True)
        if told.fallback is not None or not told.version:
            raise Unanswered("no version of the policy answers yet; a fallback did")
        names = [name for name in told.distribution if name.rpartition("/")[2] == "probability"]
        if not names:
            raise ConfigurationError("--server: its policy gives no probabilities; it must choose one of n")
        chances = np.asarray(told.distribution[names[0]], np.float64).ravel()
        value = None if told.value is None or not np.isfinite(told.value) else float(told.value)
        return Suggestion(int(told.action), chances / chances.sum(), value, told.version)

    def tell_step(self, observation: NDArray[np.float32], action: int, log_prob: float | None) -> None:
        """Tell what is done. log_prob: None: not learned from. PolicyError: the episode is given up."""
        assert self._episode is not None
        try:
            self._episode.act(observation, taken_action=action, taken_log_prob=log_prob)
        except PolicyError:
            self.give_up()
            raise
        self.step += 1

    def tell_reward(self, episode: str, step: int, amount: float, request_id: str) -> bool:
        """Tell what a step earned, at most once. PolicyError: try again; False: it is never taken."""
        try:
            self._client.reward(episode, [(step, amount)], request_id=request_id)
        except _FINAL:
            return False
        return True

    def end(self, observation: NDArray[np.float32]) -> None:
        """Cut the episode at an observation, float32 [width]; PolicyError: it is given up."""
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.end(truncated=True, final_observation=observation)

    def give_up(self) -> None:
        """Go on with another episode; the server abandons this one when it hears no more of it."""
        self._episode = None


# ---- Whether goals succeed less often than they did: the newest outcomes against those before.

NEWEST: Final = 30
BEFORE: Final = 200
FEWEST_BEFORE: Final = 50
CHANCE: Final = 1e-6
"""How often so bad a streak would come by chance, were outcomes independent of one another.

They are not, since a host that is healthy gives little to mend for a while, and it is looked for at every
outcome: in twelve days of a policy that got better the worst streak came to 7e-5.
"""


def drifted(successes: Sequence[bool], versions: Sequence[int]) -> str:
    """Return what is wrong with the injected goals, oldest first; "" where nothing is.

    The newest outcomes are those of the newest version, at most 30; where it has fewer than 15, the last 30.
    """
    own = sum(1 for _ in takewhile(lambda version: version == versions[-1], reversed(versions)))
    count = min(own, NEWEST) if own >= NEWEST // 2 else NEWEST
    new, old = successes[-count:], successes[: -count or None][-BEFORE:]
    if len(old) < FEWEST_BEFORE or len(new) < count:
        return ""
    # Drawn a little towards one half, so that a rate of 1 or 0 is never certain.
    rate = (sum(old) + 1) / (len(old) + 2)
    if _at_most(sum(new), len(new), rate) >= CHANCE:
        return ""
    return (
        f"of the last {len(new)} injected goals {sum(new)} succeeded, of the {len(old)} before "
        f"{sum(old)}: version {versions[-1]} or the system has changed"
    )


def _at_most(successes: int, of: int, rate: float) -> float:
    return sum(math.comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(successes + 1))


# ---- Whether a goal that a policy has drawn is carried out, and with which probability that happens.

NOTHING: Final = 0


@dataclass(frozen=True, slots=True)
class Gated:
    """What is done. log_prob: log ν of it. why: in words, for those who ask why nothing happened."""

    action: int
    log_prob: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """threshold: τ, a probability. explore: ε. safe: bool [A], goals that may be tried below τ."""

    threshold: float
    explore: float
    safe: tuple[bool, ...]

    def __post_init__(self) -> None:
        for name in ("threshold", "explore"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value}: must be a probability")

    def done_with(self, chances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ν, float64 [A]; chances: μ, float64 [A], which add up to 1."""
        passed = np.where(chances >= self.threshold, 1.0, self.explore * np.array(self.safe))
        done = chances * passed
        done[NOTHING] = 0.0
        done[NOTHING] = max(1.0 - float(done.sum()), 0.0)
        return done

    def decide(self, chances: NDArray[np.float64], drawn: int, draw: float) -> Gated:
        """Return what is done where `drawn` came from μ = chances; draw: uniform in [0, 1), for ε."""
        done = self.done_with(chances)
        certainty = float(chances[drawn])
        action, why = drawn, f"certainty {certainty:.2f} ≥ {self.threshold:.2f}"
        if drawn == NOTHING:
            why = "the policy would do nothing"
        elif certainty < self.threshold:
            why = f"certainty {certainty:.2f} < {self.threshold:.2f}"
            if self.safe[drawn] and draw < self.explore:
                why += f", tried as one of {self.explore:.0%} of safe goals"
            else:
                action = NOTHING
        return Gated(action, math.log(done[action]), why)


EPISODE_STEPS: Final = 50
"""An episode is cut after so many intervals, as one of `Goals-v0` is."""

_REWARD: Final = GoalReward()
_BEAT_S: Final = 1.0

log = logging.getLogger(__name__)


class Drifted(Exception):
    """Goals succeed less often than they did; injecting has stopped."""


@dataclass(slots=True, kw_only=True, eq=False)
class Injector:
    """Proposes goals, carries out those that may be, and reports their outcomes.

    auto: whether goals are carried out, before the folder was ever switched. random: of ε. pause: waits so
    many seconds, at most until it is to end. drift_since: outcomes before it, Unix time in seconds, are not
    looked at for drift.
    """

    policy: AskedPolicy
    executor: Executor
    journal: InjectionJournal
    auto: bool
    gate: Gate
    rules: InjectionRules
    random: np.random.Generator
    pause: Callable[[float], object]
    draining: Callable[[], bool]
    drift_since: float
    counts: Counter[str] = field(default_factory=Counter)
    _behind: bool = True
    _version: int = 0
    _history: History = field(init=False)
    _next_beat_s: float = 0.0

    def __post_init__(self) -> None:
        self._history = History(self.executor.goals)

    # ------------------------------------------------------------ life

    def recover(self) -> None:
        """Book goals that an earlier process left half-way; the next interval reports what it did not."""
        for one in self.journal.interrupted():
            self._book(one, None, None)

    def run(self, steps: int = 0) -> None:
        """Work until it is to end, or for so many intervals; raises Drifted where it has stopped itself."""
        interval_s = self.rules.interval_s
        left = self.journal.last_injected_at + interval_s - time.time()
        self.pause(min(max(left, 0.0), interval_s))
        done = 0
        while not self.draining() and (not steps or done < steps):
            begun = time.monotonic()
            self.interval()
            done += 1
            if not steps or done < steps:
                self.pause(max(interval_s - (time.monotonic() - begun), 0.0))
        self._end_episode(self._observe())
        self._beat("", ended=True)

    def interval(self) -> None:
        self.counts["intervals"] += 1
        trouble = ""
        try:
            self._report()
            self.policy.begin()
            observation = self._observe()
            suggestion = self.policy.suggest(observation)
            self._version = suggestion.version
            failpoint("inject.asked")
            self._decide(observation, suggestion)
            if self.policy.step >= EPISODE_STEPS:
                self._end_episode(self._observe())
        except (PolicyError, Unanswered) as error:
            self.counts["unanswered"] += 1
            log.warning("nothing proposed", extra={"error": str(error)})
            trouble = str(error)
        self._beat(trouble)

    # ------------------------------------------------------------ a decision

    def _decide(self, observation: NDArray[np.float32], suggestion: Suggestion) -> None:
        policy = self.policy
        gated = self.gate.decide(suggestion.chances, suggestion.action, float(self.random.random()))
        now = time.time()
        forbidden = self.rules.forbids(now, self.journal.injected_on(now), auto=self._is_on())
        proposal = self._proposal(suggestion, gated, forbidden, now)
        if proposal is None or gated.action == NOTHING or forbidden:
            if proposal is not None:
                self.journal.add(proposal)
                self.counts["proposed"] += 1
            self._let_pass(observation, None if forbidden else gated.log_prob)
            return
        self.counts["proposed"] += 1
        if self.rules.veto_s:
            self.journal.add(proposal)
            failpoint("inject.proposed", policy.step)
            self.pause(self.rules.veto_s)
        why = VETO if self.journal.is_vetoed(proposal.goal_id) else ""
        why = why or ("" if self._is_on() else "auto is off")
        why = why or ("the injector ends" if self.draining() else "")
        if why:
            metadata = {**proposal.metadata, "held": why}
            told = {"reasoning": f"{proposal.reasoning}; {why}", "metadata": metadata}
            self.journal.add(proposal.model_copy(update=told))
            self.counts["held"] += 1
            self._let_pass(observation, None)
            return
        self._inject(observation, gated, proposal)

    def _proposal(self, suggestion: Suggestion, gated: Gated, forbidden: str, now: float) -> Injection | None:
        """Return the goal that was drawn, not yet injected; None where nothing was drawn."""
        if suggestion.action == NOTHING:
            return None
        policy, told = self.policy, self.journal.told()
        certainty = min(float(suggestion.chances[suggestion.action]), 1.0)
        fit = fit_success([one.confidence for one, _ in told], [success for _, success in told])
        held = forbidden or ("" if gated.action else "threshold")
        return Injection(
            goal_id=goal_id(policy.episode_id, policy.step),
            goal=self.executor.goals[suggestion.action - 1],
            timestamp=now,
            reasoning=gated.why if not forbidden else f"{gated.why}; {forbidden}",
            priority=fit.at(certainty),
            confidence=certainty,
            expected_reward=suggestion.value,
            metadata={"episode": policy.episode_id, "step": policy.step, "held": held},
            version=suggestion.version,
            injected=False,
            processed=False,
        )

    def _let_pass(self, observation: NDArray[np.float32], log_prob: float | None) -> None:
        """Do nothing in this interval. log_prob: None where that was not the gated policy's choice."""
        policy, step = self.policy, self.policy.step
        policy.tell_step(observation, NOTHING, log_prob)
        self.executor.idle()
        self._history.idle()
        earned = _REWARD.of(None)
        self._tell_reward(policy.episode_id, step, earned, goal_id(policy.episode_id, step))

    def _inject(self, observation: NDArray[np.float32], gated: Gated, proposal: Injection) -> None:
        self.policy.tell_step(observation, gated.action, gated.log_prob)
        failpoint("inject.told")
        self.journal.add(proposal.model_copy(update={"injected": True}))
        failpoint("inject.injected")
        outcome = self.executor.carry_out(proposal.goal)
        failpoint("inject.done")
        self._history.note(proposal.goal, outcome)
        earned = _REWARD.of(outcome)
        self._book(proposal, outcome, earned)
        failpoint("inject.feedback")
        self.counts["injected"] += 1
        self.counts["succeeded"] += outcome.success
        self._report_one(proposal, earned)
        self._look_for_drift()

    # ------------------------------------------------------------ what became of it

    def _book(self, goal: Injection, outcome: Outcome | None, earned: float | None) -> None:
        """Record the outcome of a goal. outcome: None where that is unknown, since it was interrupted."""
        self.journal.add_outcome(
            Feedback(
                goal_id=goal.goal_id, goal=goal.goal, success=None if outcome is None else outcome.success,
                execution_time_ms=None if outcome is None else outcome.took_s * 1000,
                output="" if outcome is None else outcome.output,
                error=INTERRUPTED if outcome is None else outcome.error,
                reward=earned, timestamp=time.time(),
            )
        )  # fmt: skip

    def _report(self) -> None:
        """Report what is known here and not yet to the server; raises PolicyError where it is away."""
        if not self._behind:
            return
        for injection, feedback in self.journal.unreported():
            self._report_one(injection, feedback.reward)
        self._behind = False

    def _report_one(self, injection: Injection, earned: float | None) -> None:
        meta = injection.metadata
        taken = earned is not None and self._tell_reward(
            meta["episode"], meta["step"], earned, injection.goal_id
        )
        failpoint("inject.rewarded")
        self.journal.add(
            injection.model_copy(
                update={"injected": True, "processed": True, "metadata": {**meta, "learned": taken}}
            )
        )

    def _tell_reward(self, episode: str, step: int, earned: float, request_id: str) -> bool:
        try:
            return self.policy.tell_reward(episode, step, earned, request_id)
        except PolicyError:
            # Without its reward the step must not be learned from, so the episode does not go on.
            self._behind = True
            self.policy.give_up()
            raise

    def _look_for_drift(self) -> None:
        told = self.journal.told(self.drift_since)
        why = drifted([success for _, success in told], [one.version for one, _ in told])
        if why:
            self.journal.stop(why, time.time())
            raise Drifted(why)

    def _is_on(self) -> bool:
        return is_on(self.journal.folder, default=self.auto)

    def _beat(self, trouble: str, *, ended: bool = False) -> None:
        """Say how it is, at most once a second; the last beat is always written."""
        if time.monotonic() < self._next_beat_s and not ended:
            return
        self._next_beat_s = time.monotonic() + _BEAT_S
        gate, rules = self.gate, self.rules
        beat = Beat(
            at=time.time(), auto=self._is_on(), trouble=trouble, version=self._version,
            threshold=gate.threshold, explore=gate.explore, interval_s=rules.interval_s,
            daily_limit=rules.daily_limit, veto_s=rules.veto_s, quiet=[one.text for one in rules.quiet],
            ended=ended,
        )  # fmt: skip
        try:
            write_beat(self.journal.folder, beat)
        except OSError as error:
            log.warning("its state was not written", extra={"error": str(error)})

    def _observe(self) -> NDArray[np.float32]:
        return self._history.observation(self.executor.read())

    def _end_episode(self, observation: NDArray[np.float32]) -> None:
        try:
            self.policy.end(observation)
        except PolicyError as error:
            log.warning("the episode was given up", extra={"error": str(error)})


# ---- `penstock inject`: the parts of an injector from its options, and its life as a process.


def work(asked: InjectOptions, lifecycle: Lifecycle, settings: Settings, *, as_json: bool) -> int:
    """Inject until the process is to end, and print what was done; returns 1 where it has stopped itself."""
    executor, safe = _executor_of(asked)
    gate = Gate(threshold=asked.threshold, explore=asked.explore, safe=safe)
    try:
        rules = InjectionRules(
            interval_s=asked.interval, daily_limit=asked.daily_limit, veto_s=asked.veto_s,
            quiet=tuple(map(QuietHours.parse, asked.quiet)),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigurationError(f"--quiet: {error}") from error
    try:
        client = PolicyClient(asked.server, credentials=credentials(settings.security), policy=asked.policy)
    except ValueError as error:
        raise ConfigurationError(f"--server {asked.server}: {error}") from error
    with (
        client,
        InjectionJournal.held(asked.folder) as journal,
        lifecycle.calling_on_drain(client.close),
    ):
        _tell_switch(asked)
        injector = Injector(
            policy=AskedPolicy(client, asked.client_key, executor.goals), executor=executor, journal=journal,
            auto=asked.auto, gate=gate, rules=rules,
            random=np.random.default_rng(asked.seed), pause=lifecycle.draining.wait,
            draining=lifecycle.draining.is_set, drift_since=journal.start_again(allowed=asked.resume),
        )  # fmt: skip
        injector.recover()
        code = EXIT_OK
        try:
            injector.run(asked.steps)
        except Drifted as error:
            sys.stderr.write(
                f"injecting has stopped: {error}; look with --explain, then start with --resume\n"
            )
            code = EXIT_FAILED
    counts = dict(injector.counts)
    text = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing was done"
    sys.stdout.write((json.dumps(counts) if as_json else text) + "\n")
    return code


def _executor_of(asked: InjectOptions) -> tuple[Executor, tuple[bool, ...]]:
    """Return what carries goals out, and which actions may be tried below the threshold."""
    if (asked.goals is None) == (asked.simulated is None):
        raise ConfigurationError("--goals FILE or --simulated SEED: name one of them")
    if asked.goals is not None:
        file = read_commands(asked.goals)
        return Commands(file, acts=True), (False, *(one.safe for one in file.goal))
    host = SimulatedHost()
    host.reset(asked.simulated or 0)
    return host, (False, *(True for _ in host.goals))


def _tell_switch(asked: InjectOptions) -> None:
    """Say where the switch of the folder counts more than the option."""
    found = last_switch(asked.folder)
    if found is not None and found.on != asked.auto:
        sys.stderr.write(
            f"auto is {'on' if found.on else 'off'} in {asked.folder}, as it was switched; --switch changes "
            "that\n"
        )
