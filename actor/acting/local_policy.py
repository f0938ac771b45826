"""The local policy copy: applies publications between fragments and answers the run's probe.

The answer says which weights this actor really acts with: log-probabilities of fixed actions by the same
forward pass that draws the actions, not a number that was passed along.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from penstock.actor.link.session import Session, Weights
from penstock.policy.acting.acting_policy import ActingPolicy
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.protocol.fragment import FragmentHeader, Slot, WeightSpan
from penstock.protocol.limits import MAX_WATCH_WAIT_MS, WATCH_GRACE_S
from penstock.protocol.messages import Publication
from penstock.protocol.schema import FragmentSchema
from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health


class LocalPolicy:
    """A policy and the publication it holds; version 0 before the first."""

    def __init__(self, policy: ActingPolicy, probe: Probe) -> None:
        self.policy = policy
        self.place = ExplorationSlots()
        """Which of the run's environments it acts in, for exploration that differs between them."""
        self.publication = Publication()
        self._probe = probe

    def apply(self, weights: Weights) -> None:
        """Act with these weights from now on; raises Fatal when they do not fit the policy."""
        try:
            self.policy.load(weights.blob)
        except ValueError as error:
            raise Fatal(f"weights {weights.publication.version} cannot be applied: {error}") from error
        self.policy.explore(weights.scalars, self.place)
        self.publication = weights.publication
        metrics.WEIGHT_VERSION_APPLIED.set(weights.publication.version)
        metrics.WEIGHT_APPLY_SECONDS.observe(time.monotonic() - weights.arrived_s)

    def follow(self, session: Session) -> None:
        weights = session.weights
        if weights is not None and weights.publication.version > self.publication.version:
            self.apply(weights)
            self.answer_probe(session)

    def answer_probe(self, session: Session) -> None:
        """Have the session say which weights are applied, and the probe's log-probabilities under them."""
        session.report_applied(self.publication, probe_answer(self.policy, self._probe))


def probe_answer(policy: ActingPolicy, probe: Probe) -> tuple[float, ...]:
    """Return the log-probabilities of the probe's actions under the outputs that the policy acts with."""
    # Copies: torch does not take the read-only views of a message.
    observation = {path: array.copy() for path, array in probe.observation.items()}
    action = {path: array.copy() for path, array in probe.action.items()}
    return tuple(policy.acting_log_prob(observation, action).tolist())


# ---- The one place where the header of a new fragment is built.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderFields:
    """Holds what a header says beside the content of its fragment.

    session, sequence: 0 where the fragment gets both when it is sent.
    weights: the publication that all of its steps were generated with.
    round: the round of a lock-step run, else 0.
    """

    run: str
    session: int
    sequence: int
    weights: Publication
    round: int
    policy: str = "default"

    def header(
        self, schema: FragmentSchema, steps: int, slots: tuple[Slot, ...], attributes: bytes = b""
    ) -> FragmentHeader:
        """Return the header of a fragment that is created now, its table of tensors still empty.

        schema: the run's. steps: T, rows of the fragment. slots: N, the origin of each column.
        attributes: what the workload notes, at most `limits.MAX_ATTRIBUTES_BYTES`.
        """
        return FragmentHeader(
            run=self.run,
            session=self.session,
            sequence=self.sequence,
            schema_id=schema.schema_id,
            steps=steps,
            slots=slots,
            weights=(WeightSpan(0, 0, steps, self.weights.version, self.weights.update),),
            tensors=(),
            policy=self.policy,
            created_us=time.time_ns() // 1000,
            round=self.round,
            attributes=attributes,
        )


# ---- How health watches what acts: that environments step and that published weights arrive.

ENVIRONMENT: Final = "environment"
"""Name under which health watches the steps."""
BEING_MADE: Final = "environments and policy are being made"
BROKER: Final = "broker"
"""Name under which health watches that the broker answers."""
WEIGHTS: Final = "weights"
"""Name under which health watches that published weights arrive."""


def watch(health: Health, stall_timeout_s: float) -> None:
    """Have health watch what a generator does, from when it is first expected."""
    for name in (ENVIRONMENT, WEIGHTS):
        health.watch(name, stall_timeout_s)
        health.suspend(name)


def watch_broker(health: Health, stall_timeout_s: float) -> Callable[[], None]:
    """Have health watch that the broker answers; returns what is to be called after each answer.

    A call that waits for news is answered when its wait is over, so that much is added to the limit.
    """
    health.watch(BROKER, stall_timeout_s + MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S)
    health.expect(BROKER, "it answers no call; is it there, and does its Redis answer?")
    return partial(health.progress, BROKER)


def note_lag(health: Health, known: int, newest: int, arrived_bytes: int) -> None:
    """Expect weights while `known` is behind `newest` (0: none); each chunk that arrives is progress."""
    if newest > known:
        if arrived_bytes > 0:
            health.progress(WEIGHTS)
        health.expect(WEIGHTS, f"version {newest} is published, {known} is held here")
    else:
        health.suspend(WEIGHTS)
