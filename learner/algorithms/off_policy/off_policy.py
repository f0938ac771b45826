"""The update of algorithms that learn from replay: everything but the gradient step.

One `update` inserts the fragments of one delivery into replay and then takes as many gradient steps as the
rate limiter allows, each on a sample of its own. Sequence of an update:

    insert → [limiter allows: sample → gradient step → priorities] → finite? → merge normaliser
                             └ no: restore everything; evict the entries that make a step fail and try again,
                                   or withdraw the fragments

The order of the log alone determines it: a resumed learner makes the same samples and steps.
"""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.learner.algorithms.algorithm import Update
from penstock.learner.algorithms.off_policy.off_policy_parts import OffPolicyParts, PartsBackup
from penstock.learner.algorithms.off_policy.replay.memory import Sample
from penstock.learner.algorithms.off_policy.replay.transitions import fragments
from penstock.learner.algorithms.shared.containment import (
    ATTRIBUTABLE,
    ERROR,
    OF_THE_DEVICE,
    culprits,
    verdict,
)
from penstock.learner.algorithms.shared.schedule import factor
from penstock.learner.algorithms.shared.seen_batch import trajectory_of
from penstock.learner.batch import Batch
from penstock.policy.normaliser import Moments
from penstock.runtime import metrics as figures

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a gradient step, on the device.

    errors: [n], of each transition, for its priority. metrics: scalars by name.
    """

    errors: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class OffPolicyValues:
    """The scheduled numbers of one update. importance_exponent: β of the importance weights."""

    learning_rate: float
    importance_exponent: float


@dataclass(frozen=True, slots=True)
class _Taken:
    """Gradient steps of an update. reason: why they cannot be kept, or "". error: what was raised."""

    steps: list[Stepped]
    observed: Moments | None
    reason: str
    metrics: dict[str, float]
    error: Exception | None = None


class OffPolicy(OffPolicyParts):
    """An `Algorithm` that learns from replay; a subclass adds the gradient step."""

    @abstractmethod
    def gradient_step(self, sample: Sample, learning_rate: float) -> Stepped:
        """Learn from one sample with step size `learning_rate`."""

    # ---- what the loop asks

    def budget(self, fragment_charge: int) -> int:
        """Return max(2F, the limiter's error bound), in environment steps.

        fragment_charge: F, steps of one fragment. Raises ValueError with the figures where the limiter would
        block for good.
        """
        self.limiter.check(insertion=fragment_charge, capacity=self.section.capacity)
        return max(2 * fragment_charge, self.limiter.buffer_steps)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        """Return True: a batch is one fragment."""
        return True

    def published_modules(self) -> dict[str, nn.Module]:
        """Return the policy, as `default`."""
        return {"default": self.policy}

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Insert a batch into replay and take the gradient steps that it allows."""
        steps = int(batch.valid.sum())
        if steps == 0:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        self.replay.begin()
        before = self._backup()
        self._insert(batch)
        self.limiter.inserted(steps)
        inserted = replace(before, counts=replace(self.limiter.counts))
        scheduled = OffPolicyValues(
            self.section.learning_rate * factor(self.section.learning_rate_schedule, progress),
            self._importance_exponent(progress),
        )
        taken = self._take_steps(batch, scheduled)
        while taken.reason and self._evict_culprits(inserted, batch, scheduled):
            taken = self._take_steps(batch, scheduled)
        metrics = taken.metrics
        if taken.reason:
            self._restore(before)
            self._withdraw(batch)
        else:
            self._commit(taken.observed, len(taken.steps))
        if taken.steps:
            metrics |= {
                "learning_rate": scheduled.learning_rate,
                "replay_steps": float(self.replay.size),
            } | self.scalars(progress)
        return Update(
            applied=not taken.reason,
            reason=taken.reason,
            steps=steps,
            gradient_steps=len(taken.steps),
            metrics={} if taken.reason else metrics,
            publish=not taken.reason and self._is_due(),
            error=taken.error,
            collects=self.replay.size < self.limiter.minimum,
        )

    def _insert(self, batch: Batch) -> None:
        for source, fragment in fragments(batch):
            self.replay.insert(source.number, source.size, self._transitions(fragment))

    def _take_steps(self, batch: Batch, scheduled: OffPolicyValues) -> _Taken:
        """Take the gradient steps that are allowed, and judge them."""
        try:
            made = self._learn(scheduled)
            with torch.no_grad():
                observed = self._observed(batch)
                reason, metrics = self._measure(made, observed)
        except OF_THE_DEVICE:
            raise
        except ATTRIBUTABLE as error:
            return _Taken([], None, ERROR, {}, error)
        return _Taken(made, observed, reason, metrics)

    def _learn(self, scheduled: OffPolicyValues) -> list[Stepped]:
        made = []
        while self.limiter.may_draw(self.replay.size):
            sample = self.replay.sample(
                self.section.batch_size, importance_exponent=scheduled.importance_exponent
            )
            stepped = self.gradient_step(sample, scheduled.learning_rate)
            self.replay.set_errors(sample.index, stepped.errors)
            self.limiter.drawn()
            made.append(stepped)
        return made

    # ---- entries that make gradient steps fail

    def _evict_culprits(self, inserted: PartsBackup, batch: Batch, scheduled: OffPolicyValues) -> bool:
        """Remove the entries from replay that make gradient steps fail; returns whether to try again.

        That is of no use where an entry of this batch is among them, or where none is found.
        """
        self._restore(inserted)
        found = self._find_culprits(scheduled)
        self._restore(inserted)
        of_batch = {source.number for source in batch.sources}
        for number in sorted(found - of_batch):
            log.error("a fragment was taken out of replay: updates fail with it", extra={"number": number})
            figures.REPLAY_EVICTED.inc()
            self.replay.remove(number)
        if self.replay.size < self.limiter.minimum <= self.limiter.counts.inserted:
            self.limiter.restart(self.replay.size)
        return bool(found) and not found & of_batch

    def _find_culprits(self, scheduled: OffPolicyValues) -> set[int]:
        """Return the entries that make the first step fail that does; the steps are taken once more."""
        while self.limiter.may_draw(self.replay.size):
            sample, before = (
                self.replay.sample(
                    self.section.batch_size, importance_exponent=scheduled.importance_exponent
                ),
                self._backup(),
            )
            if self._try_step(sample, scheduled):
                return self._culprits_of(sample, before, scheduled)
            self.limiter.drawn()
        return set()

    def _culprits_of(self, sample: Sample, before: PartsBackup, scheduled: OffPolicyValues) -> set[int]:
        numbers = self.replay.entries_of(sample.index)

        def trial(entries: Sequence[int]) -> str:
            self._restore_weights(before)
            return self._try_step(
                self.replay.part(sample, torch.isin(numbers, torch.tensor(entries))), scheduled
            )

        return set(culprits(trial, sorted(set(numbers.tolist()))) or ())

    def _try_step(self, sample: Sample, scheduled: OffPolicyValues) -> str:
        """Take a gradient step; returns why it fails, or ""."""
        try:
            stepped = self.gradient_step(sample, scheduled.learning_rate)
            self.replay.set_errors(sample.index, stepped.errors)
            return self._measure([stepped], None)[0]
        except OF_THE_DEVICE:
            raise
        except ATTRIBUTABLE:
            return ERROR

    def _importance_exponent(self, progress: float) -> float:
        """Return β of the importance weights."""
        start = self.section.importance_exponent
        return start + (1.0 - start) * progress

    def _is_due(self) -> bool:
        """Return whether enough gradient steps were taken since the last publication.

        If so, the count begins again.
        """
        due = self._unpublished >= self.section.publish_period
        if due:
            self._unpublished = 0
        return due

    # ---- the end of an update

    def _measure(self, made: Sequence[Stepped], observed: Moments | None) -> tuple[str, dict[str, float]]:
        """Return why the steps cannot be kept, or "", and the means over gradient steps.

        This is the one read of the device.
        """
        tensors = {
            name: torch.stack([step.metrics[name] for step in made]).mean().double()
            for name in (made[0].metrics if made else ())
        }
        checks = [optimiser.checksum().double() for optimiser in self.optimisers().values()]
        if observed is not None:
            checks.append(observed.checksum())
        *numbers, check = torch.stack([*tensors.values(), torch.stack(checks).sum()]).tolist()
        return verdict([*numbers, check]), dict(zip(tensors, numbers, strict=True))

    def _observed(self, batch: Batch) -> Moments | None:
        if self.policy.normaliser is None:
            return None
        observation = batch.observation
        if batch.begins is not None:
            observation, _ = self.policy.memory.frames.unroll(trajectory_of(batch))
        reals = self.policy.reader.raw_reals(observation, torch.float64)
        return self.policy.normaliser.observe(reals[: batch.valid.numel()][batch.valid.flatten()])

    def _commit(self, observed: Moments | None, gradient_steps: int) -> None:
        if observed is not None and self.policy.normaliser is not None:
            self.policy.normaliser.merge(observed)
        self._updates += 1
        self._unpublished += gradient_steps

    def _withdraw(self, batch: Batch) -> None:
        """Take a batch out of replay: it is booked as dropped, so it must not be learned from."""
        for source in reversed(batch.sources):
            self.replay.withdraw(source.number)
