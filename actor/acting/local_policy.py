"""The local policy copy: applies publications between fragments and answers the run's probe.

The answer says which weights this actor really acts with: log-probabilities of fixed actions by the same
forward pass that draws the actions, not a number that was passed along.
"""

import time

from penstock.actor.link.session import Session
from penstock.actor.link.weight_fetch import Weights
from penstock.policy.acting.acting_policy import ActingPolicy
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.protocol.messages import Publication
from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal


class LocalPolicy:
    """A policy and the publication it holds; version 0 before the first."""

    def __init__(self, policy: ActingPolicy, probe: Probe) -> None:
        self.policy = policy
        self.place = ExplorationSlots()
        """Which of the run's environments it acts in, for exploration that differs between them."""
        self.publication = Publication()
        # Copies: torch does not take the read-only views of a message.
        self._observation = {path: array.copy() for path, array in probe.observation.items()}
        self._action = {path: array.copy() for path, array in probe.action.items()}

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
        """Apply the session's newest weights if they are newer, and answer the probe with them."""
        weights = session.weights
        if weights is not None and weights.publication.version > self.publication.version:
            self.apply(weights)
            self.answer_probe(session)

    def answer_probe(self, session: Session) -> None:
        """Have the session say which weights are applied, and the probe's log-probabilities under them."""
        answer = self.policy.acting_log_prob(self._observation, self._action)
        session.report_applied(self.publication, tuple(answer.tolist()))
