"""The loop of `penstock inject`: ask the policy server, apply the rules, carry out a goal, send its reward.

    observe ─► suggestion ─► gate and rules ─► proposed (a line) ─► veto? ─► step sent ─► injected (a line)
            ─► carried out ─► feedback (a line) ─► reward sent ─► processed (a line)

A process may be killed at any point; `injection_journal` describes what it leaves, and `recover` continues
from there. No goal is carried out twice. Where something other than the gate's choice is done (auto is off,
quiet hours, the daily limit, a veto), the step is sent without a probability, and no on-policy algorithm
learns from it.
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
    fit_success,
    goal_id,
    is_on,
    last_switch,
    quiet_minutes,
    write_beat,
)
from penstock.workloads.goals.live_host import Commands, Executor, read_commands

# ---- The policy of a server.

_FINAL: Final = (InvalidRequest, NotAllowed, EpisodeElsewhere, EpisodeUnknown)
"""Refusals of a reward that no repetition changes."""

log = logging.getLogger(__name__)


class Unanswered(Exception):
    """No version of the policy can answer now; nothing was done."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What the policy would do. chances: μ, float64 [A]. value: the critic's; None where it has none."""

    action: int
    chances: NDArray[np.float64]
    value: float | None
    version: int


def check_policy(client: PolicyClient, goals: tuple[str, ...]) -> None:
    """Raise ConfigurationError where the policy does not fit the goals; PolicyError as a client does."""
    width = History(goals).width
    description = client.describe()
    seen, actions = description.observation_space, description.action_space
    fits = (
        isinstance(seen, Box)
        and seen.shape == (width,)
        and isinstance(actions, Discrete)
        and (actions.n, actions.start) == (len(goals) + 1, 0)
    )
    if not fits:
        raise ConfigurationError(
            f"--server: its policy has observations {seen} and actions {actions}; these goals need "
            f"{width} numbers and {len(goals) + 1} actions (nothing, {', '.join(goals)}): serve a policy "
            "that was trained with them"
        )
    if description.chooses_by_value:
        raise ConfigurationError(
            "--server: its policy chooses by the values of actions (DQN), and its probabilities describe "
            "exploration instead of certainty; serve it with --set serving.softmax_temperature=0.2, by "
            "which it draws from a softmax of its values, or train one with algorithm.name=ppo"
        )


def suggest(client: PolicyClient, client_key: str, observation: NDArray[np.float32]) -> Suggestion:
    """Return what the policy would do at float32 [width]; raises Unanswered where a fallback answered."""
    answer = client.act(observation, client_key=client_key, distribution=True, value=True)
    if answer.fallback is not None or not answer.version:
        raise Unanswered("no version of the policy answers yet; a fallback did")
    names = [name for name in answer.distribution if name.rpartition("/")[2] == "probability"]
    if not names:
        raise ConfigurationError("--server: its policy gives no probabilities; it must choose one of n")
    chances = np.asarray(answer.distribution[names[0]], np.float64).ravel()
    value = None if answer.value is None or not np.isfinite(answer.value) else float(answer.value)
    return Suggestion(int(answer.action), chances / chances.sum(), value, answer.version)


# ---- Drift: the newest goals succeed less often than those before.

NEWEST: Final = 30
BEFORE: Final = 200
FEWEST_BEFORE: Final = 50
CHANCE: Final = 1e-6
"""Probability of so few successes by chance, if outcomes were independent, below which it is drift.

They are not independent, since a healthy host has little to mend for a while, and the test is made at every
outcome: in twelve days of a policy that improved, the smallest probability was 7e-5.
"""


def drifted(successes: Sequence[bool], versions: Sequence[int]) -> str:
    """Return how the injected goals, oldest first, have become worse; "" where they have not.

    The newest outcomes are those of the newest version, at most 30; where it has fewer than 15, the last 30.
    """
    own = sum(1 for _ in takewhile(lambda version: version == versions[-1], reversed(versions)))
    count = min(own, NEWEST) if own >= NEWEST // 2 else NEWEST
    new, old = successes[-count:], successes[: -count or None][-BEFORE:]
    if len(old) < FEWEST_BEFORE or len(new) < count:
        return ""
    # Drawn a little towards one half, so that a rate of 1 or 0 is never certain.
    rate = (sum(old) + 1) / (len(old) + 2)
    chance = sum(
        math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(sum(new) + 1)
    )  # of at most so many successes
    if chance >= CHANCE:
        return ""
    return (
        f"of the last {count} injected goals {sum(new)} succeeded, of the {len(old)} before "
        f"{sum(old)}: version {versions[-1]} or the system has changed"
    )


# ---- The gate: whether a goal that the policy has drawn is carried out, and with which probability.

NOTHING: Final = 0


@dataclass(frozen=True, slots=True)
class Gated:
    """What is done. log_prob: log ν of it. why: the reason in words, for the journal."""

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
        return Gated(action, math.log(max(float(done[action]), sys.float_info.min)), why)


# ---- The injector.

EPISODE_STEPS: Final = 50
"""Intervals after which an episode is truncated, as one of `Goals-v0` is."""

_REWARD: Final = GoalReward()
_BEAT_S: Final = 1.0


class Drifted(Exception):
    """Goals succeed less often than before; injecting has stopped."""


@dataclass(slots=True, kw_only=True, eq=False)
class Injector:
    """Proposes goals, carries out those that are allowed, and reports their outcomes.

    Each decision makes two calls. The first belongs to no episode: it draws an action and returns the
    probabilities of all actions (`suggest`). The second is the step of an episode: what the gate allowed, and
    the probability of that.

    Args:
        client, client_key: of the policy server, and this host's name there.
        executor: carries the goals out.
        journal: of the folder, which this process holds.
        auto: whether goals are carried out while the folder was never switched.
        gate, rules: what is allowed.
        random: draws the exploration of the gate.
        pause: waits so many seconds, or until the process is to end.
        draining: whether the process is to end.
        drift_since: Unix time in seconds; earlier outcomes do not count for drift.
    """

    client: PolicyClient
    client_key: str
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
    _episode: Episode | None = None
    _step: int = 0
    _behind: bool = True
    _version: int = 0
    _history: History = field(init=False)
    _next_beat_s: float = 0.0

    def __post_init__(self) -> None:
        self._history = History(self.executor.goals)

    # ------------------------------------------------------------ life

    def recover(self) -> None:
        """Record goals that an earlier process left under way; the next interval reports all that is due."""
        for one in self.journal.interrupted():
            self._record(one, None, None)

    def run(self, steps: int = 0) -> None:
        """Work until the process is to end, or for so many intervals; raises Drifted."""
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
        self._end_episode()
        self._beat("", ended=True)

    def interval(self) -> None:
        self.counts["intervals"] += 1
        trouble = ""
        try:
            self._report()
            episode = self._episode or self._begin_episode()
            observation = self._observe()
            suggestion = suggest(self.client, self.client_key, observation)
            self._version = suggestion.version
            failpoint("inject.asked")
            self._decide(episode, observation, suggestion)
            if self._step >= EPISODE_STEPS:
                self._end_episode()
        except (PolicyError, Unanswered) as error:
            self.counts["unanswered"] += 1
            log.warning("nothing proposed", extra={"error": str(error)})
            trouble = str(error)
        self._beat(trouble)

    def _begin_episode(self) -> Episode:
        """Begin an episode; raises ConfigurationError where the policy does not fit the goals."""
        try:
            check_policy(self.client, self.executor.goals)
            self._episode, self._step = self.client.start_episode(self.client_key), 0
        except InvalidRequest as error:
            # The server would refuse the same request at every interval.
            raise ConfigurationError(f"--server: refuses the request: {error!s:.300}") from error
        return self._episode

    def _end_episode(self) -> None:
        """Truncate the episode; where the server is away, leave it, and the server abandons it later."""
        episode, self._episode = self._episode, None
        observation = self._observe()
        try:
            if episode is not None:
                episode.end(truncated=True, final_observation=observation)
        except PolicyError as error:
            log.warning("the episode was abandoned", extra={"error": str(error)})

    # ------------------------------------------------------------ a decision

    def _decide(self, episode: Episode, observation: NDArray[np.float32], suggestion: Suggestion) -> None:
        gated = self.gate.decide(suggestion.chances, suggestion.action, float(self.random.random()))
        now = time.time()
        forbidden = self.rules.forbids(now, self.journal.injected_on(now), auto=self._is_on())
        log_prob = None if forbidden else gated.log_prob
        if suggestion.action == NOTHING:
            self._do_nothing(episode, observation, log_prob)
            return
        self.counts["proposed"] += 1
        held = forbidden or ("" if gated.action else "threshold")
        reasoning = f"{gated.why}; {forbidden}" if forbidden else gated.why
        proposal = self._proposal(episode.episode_id, suggestion, reasoning, held)
        if held:
            self.journal.add(proposal)
            self._do_nothing(episode, observation, log_prob)
            return
        if self.rules.veto_s:
            self.journal.add(proposal)
            failpoint("inject.proposed", self._step)
            self.pause(self.rules.veto_s)
        if self.journal.is_vetoed(proposal.goal_id):
            why = VETO
        elif not self._is_on():
            why = "auto is off"
        elif self.draining():
            why = "the injector ends"
        else:
            self._inject(episode, observation, gated, proposal)
            return
        metadata = {**proposal.metadata, "held": why}
        update = {"reasoning": f"{proposal.reasoning}; {why}", "metadata": metadata}
        self.journal.add(proposal.model_copy(update=update))
        self.counts["held"] += 1
        self._do_nothing(episode, observation, None)

    def _proposal(self, episode: str, suggestion: Suggestion, reasoning: str, held: str) -> Injection:
        """Return the goal that was drawn, not injected yet."""
        known = self.journal.known_outcomes()
        certainty = min(float(suggestion.chances[suggestion.action]), 1.0)
        fit = fit_success([one.confidence for one, _ in known], [success for _, success in known])
        return Injection(
            goal_id=goal_id(episode, self._step),
            goal=self.executor.goals[suggestion.action - 1],
            timestamp=time.time(),
            reasoning=reasoning,
            priority=fit.at(certainty),
            confidence=certainty,
            expected_reward=suggestion.value,
            metadata={"episode": episode, "step": self._step, "held": held},
            version=suggestion.version,
            injected=False,
            processed=False,
        )

    def _send_step(
        self, episode: Episode, observation: NDArray[np.float32], action: int, log_prob: float | None
    ) -> None:
        """Send what is done. log_prob: None: not learned from. PolicyError: the episode is abandoned."""
        try:
            episode.act(observation, taken_action=action, taken_log_prob=log_prob)
        except PolicyError:
            self._episode = None
            raise
        self._step += 1

    def _do_nothing(self, episode: Episode, observation: NDArray[np.float32], log_prob: float | None) -> None:
        """Send a step of doing nothing. log_prob: None where that was not the gate's choice."""
        name, step = episode.episode_id, self._step
        self._send_step(episode, observation, NOTHING, log_prob)
        self.executor.idle()
        self._history.idle()
        self._send_reward(name, step, _REWARD.of(None), goal_id(name, step))

    def _inject(
        self, episode: Episode, observation: NDArray[np.float32], gated: Gated, proposal: Injection
    ) -> None:
        self._send_step(episode, observation, gated.action, gated.log_prob)
        failpoint("inject.told")
        self.journal.add(proposal.model_copy(update={"injected": True}))
        failpoint("inject.injected")
        outcome = self.executor.carry_out(proposal.goal)
        failpoint("inject.done")
        self._history.note(proposal.goal, outcome)
        earned = _REWARD.of(outcome)
        self._record(proposal, outcome, earned)
        failpoint("inject.feedback")
        self.counts["injected"] += 1
        self.counts["succeeded"] += outcome.success
        self._report_one(proposal, earned)
        known = self.journal.known_outcomes(self.drift_since)
        why = drifted([success for _, success in known], [one.version for one, _ in known])
        if why:
            self.journal.stop(why, time.time())
            raise Drifted(why)

    # ------------------------------------------------------------ outcomes

    def _record(self, goal: Injection, outcome: Outcome | None, earned: float | None) -> None:
        """Write the outcome of a goal. outcome: None where it is unknown, since the goal was interrupted."""
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
        """Send the rewards that the server does not have yet; raises PolicyError where it is away."""
        if not self._behind:
            return
        for injection, feedback in self.journal.unreported():
            self._report_one(injection, feedback.reward)
        self._behind = False

    def _report_one(self, injection: Injection, earned: float | None) -> None:
        meta = injection.metadata
        taken = earned is not None and self._send_reward(
            meta["episode"], meta["step"], earned, injection.goal_id
        )
        failpoint("inject.rewarded")
        update = {"injected": True, "processed": True, "metadata": {**meta, "learned": taken}}
        self.journal.add(injection.model_copy(update=update))

    def _send_reward(self, episode: str, step: int, earned: float, request_id: str) -> bool:
        """Send what a step earned, counted once for each request id; False: the server never accepts it."""
        try:
            self.client.reward(episode, [(step, earned)], request_id=request_id)
        except _FINAL:
            return False
        except PolicyError:
            # Without its reward the step must not be learned from, so the episode does not continue.
            self._behind = True
            self._episode = None
            raise
        return True

    def _is_on(self) -> bool:
        return is_on(self.journal.folder, default=self.auto)

    def _beat(self, trouble: str, *, ended: bool = False) -> None:
        """Write the state for the page, at most once a second; the last state is always written."""
        if time.monotonic() < self._next_beat_s and not ended:
            return
        self._next_beat_s = time.monotonic() + _BEAT_S
        beat = Beat(
            **self.rules.model_dump(), at=time.time(), auto=self._is_on(), trouble=trouble,
            version=self._version, ended=ended,
        )  # fmt: skip
        try:
            write_beat(self.journal.folder, beat)
        except OSError as error:
            log.warning("its state was not written", extra={"error": str(error)})

    def _observe(self) -> NDArray[np.float32]:
        return self._history.observation(self.executor.read())


# ---- `penstock inject`: the parts of an injector from its options, and its life as a process.


def work(options: InjectOptions, lifecycle: Lifecycle, settings: Settings, *, as_json: bool) -> int:
    """Inject until the process is to end, and print the counts; returns 1 where it has stopped itself."""
    executor, safe = _executor_of(options)
    gate = Gate(threshold=options.threshold, explore=options.explore, safe=safe)
    try:
        for hours in options.quiet:
            quiet_minutes(hours)
    except ValueError as error:
        raise ConfigurationError(f"--quiet: {error}") from error
    rules = InjectionRules(
        threshold=options.threshold, explore=options.explore, interval_s=options.interval,
        daily_limit=options.daily_limit, veto_s=options.veto_s, quiet=list(options.quiet),
    )  # fmt: skip
    try:
        client = PolicyClient(
            options.server, credentials=credentials(settings.security), policy=options.policy
        )
    except ValueError as error:
        raise ConfigurationError(f"--server {options.server}: {error}") from error
    code = EXIT_OK
    with (
        client,
        InjectionJournal.held(options.folder) as journal,
        lifecycle.calling_on_drain(client.close),
    ):
        switched = last_switch(options.folder)
        if switched is not None and switched.on != options.auto:
            sys.stderr.write(
                f"auto is {'on' if switched.on else 'off'} in {options.folder}, as it was switched; --switch "
                "changes that\n"
            )
        injector = Injector(
            client=client, client_key=options.client_key, executor=executor, journal=journal,
            auto=options.auto, gate=gate, rules=rules,
            random=np.random.default_rng(options.seed), pause=lifecycle.draining.wait,
            draining=lifecycle.draining.is_set, drift_since=journal.start_again(allowed=options.resume),
        )  # fmt: skip
        injector.recover()
        try:
            injector.run(options.steps)
        except Drifted as error:
            sys.stderr.write(
                f"injecting has stopped: {error}; look with --explain, then start with --resume\n"
            )
            code = EXIT_FAILED
    text = ", ".join(f"{count} {name}" for name, count in injector.counts.items()) or "nothing was done"
    sys.stdout.write((json.dumps(injector.counts) if as_json else text) + "\n")
    return code


def _executor_of(options: InjectOptions) -> tuple[Executor, tuple[bool, ...]]:
    """Return what carries goals out, and which actions may be tried below the threshold."""
    if (options.goals is None) == (options.simulated is None):
        raise ConfigurationError("--goals FILE or --simulated SEED: name one of them")
    if options.goals is not None:
        file = read_commands(options.goals)
        return Commands(file, acts=True), (False, *(one.safe for one in file.goal))
    host = SimulatedHost()
    host.reset(options.simulated or 0)
    return host, (False, *(True for _ in host.goals))
