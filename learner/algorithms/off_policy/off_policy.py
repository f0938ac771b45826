"""The update of algorithms that learn from replay: everything but the gradient step.

One `update` inserts the fragments of one delivery into replay and then takes as many gradient steps as the
rate limiter allows, each on a sample of its own. Sequence of an update:

    insert → [limiter allows: sample → gradient step → priorities] → finite? → merge normaliser
                             └ no: restore everything; evict the entries that make a step fail and try again,
                                   or withdraw the fragments

The order of the log alone determines it: a resumed learner makes the same samples and steps.
"""

import copy
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, ReplaySection
from penstock.learner.algorithms.algorithm import AlgorithmState, Retained, Settles, Update
from penstock.learner.algorithms.containment import (
    ATTRIBUTABLE,
    EMPTY,
    ERROR,
    OF_THE_DEVICE,
    culprits,
    verdict,
)
from penstock.learner.algorithms.losses import factor
from penstock.learner.algorithms.off_policy.replay.memory import Mark, Prioritisation, Replay, Sample
from penstock.learner.algorithms.off_policy.replay.rate_limiter import Counts, SampleToInsertRatio
from penstock.learner.algorithms.off_policy.replay.transitions import Steps, fragments, transitions
from penstock.learner.algorithms.optimiser import Backup, FlatAdam, Trained, flatten, taken_over, under
from penstock.learner.algorithms.rows import trajectory_of
from penstock.learner.batch import Batch
from penstock.policy.networks import BatchNorm, Moments
from penstock.policy.policy import Policy
from penstock.runtime import metrics as figures

M = TypeVar("M", bound=nn.Module)

log = logging.getLogger(__name__)


class Target(Generic[M]):
    """A copy of a network that follows it slowly: θ' ← (1 − τ) θ' + τ θ at every `period`-th gradient step.

    τ = 1 copies (Mnih et al. 2015), a small τ with period 1 is Polyak averaging (Lillicrap et al. 2016). Only
    parameters follow; inputs are read, and so normalised, by the network that is learned.
    """

    def __init__(self, module: M, online: FlatAdam, *, period: int, rate: float) -> None:
        """Copy `module`, which `online` optimises. rate: τ."""
        self.module: M = copy.deepcopy(module).requires_grad_(requires_grad=False)
        self._flat = flatten(self.module)
        self._online = online
        self._period = period
        self._rate = rate

    def follow(self) -> None:
        """Count a gradient step, and move if it is time."""
        if self._online.steps % self._period == 0:
            self._flat.lerp_(self._online.parameters, self._rate)

    def backup(self) -> Tensor:
        """Return a copy of the parameters."""
        return self._flat.clone()

    def restore(self, backup: Tensor) -> None:
        """Go back to such a copy."""
        self._flat.copy_(backup)


@dataclass(frozen=True, slots=True)
class PartsBackup:
    """What one update may change, as it was before: weights, targets, counts and random states."""

    optimisers: dict[str, Backup]
    targets: dict[str, Tensor]
    counts: Counts
    random: dict[str, Tensor]
    replay: Mark


@dataclass(frozen=True, slots=True)
class Stepped:
    """A gradient step, on the device. errors: [n], of each transition. metrics: scalars by name."""

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


class OffPolicy(Trained):
    """An `Algorithm` that learns from replay; a subclass adds the gradient step.

    It owns the policy's weights: do not convert or move the policy.
    """

    policy: Policy
    settles = Settles.ON_INSERT
    keeps_restored = True
    needed = ("updates", "gradient_steps", "unpublished", "replay")
    targets: Mapping[str, Target[Any]]

    def __init__(self, policy: Policy, section: ReplaySection, *, seed: int) -> None:
        _check(policy, section.name)
        self.policy = policy
        self.section: ReplaySection = section
        self.device = policy.actor_head.weight.device
        self.replay = Replay(
            section.capacity,
            section.capacity_bytes,
            seed=seed,
            device=self.device,
            stack=policy.memory.frames,
            prioritisation=Prioritisation(section.priority_exponent) if section.prioritised else None,
        )
        self.limiter = SampleToInsertRatio(
            ratio=section.replay_ratio,
            minimum=section.learning_starts,
            buffer_steps=section.error_steps,
        )
        self._unpublished = 0

    # ---- what a subclass adds

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

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Insert a batch into replay and take the gradient steps that it allows."""
        steps = int(batch.valid.sum())
        if steps == 0:
            return Update(applied=False, reason=EMPTY)
        self.replay.begin()
        before = self._backup()
        for source, fragment in fragments(batch):
            self.replay.insert(source.number, source.size, self._transitions(fragment))
        self.limiter.inserted(steps)
        inserted = replace(before, counts=replace(self.limiter.counts))
        section = self.section
        scheduled = OffPolicyValues(
            section.learning_rate * factor(section.learning_rate_schedule, progress),
            section.importance_exponent + (1.0 - section.importance_exponent) * progress,
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
            made.append(self._step(self._sample(scheduled), scheduled))
            self.limiter.drawn()
        return made

    def _sample(self, scheduled: OffPolicyValues) -> Sample:
        count, exponent = self.section.batch_size, scheduled.importance_exponent
        return self.replay.sample(count, importance_exponent=exponent)

    def _step(self, sample: Sample, scheduled: OffPolicyValues) -> Stepped:
        stepped = self.gradient_step(sample, scheduled.learning_rate)
        self.replay.set_errors(sample.index, stepped.errors)
        return stepped

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
            sample, before = self._sample(scheduled), self._backup()
            if self._try_step(sample, scheduled):
                return self._culprits_of(sample, before, scheduled)
            self.limiter.drawn()
        return set()

    def _culprits_of(self, sample: Sample, before: PartsBackup, scheduled: OffPolicyValues) -> set[int]:
        numbers = self.replay.entries_of(sample.index)

        def trial(entries: Sequence[int]) -> str:
            self._restore_weights(before)
            part = self.replay.part(sample, torch.isin(numbers, torch.tensor(entries)))
            return self._try_step(part, scheduled)

        return set(culprits(trial, sorted(set(numbers.tolist()))) or ())

    def _try_step(self, sample: Sample, scheduled: OffPolicyValues) -> str:
        """Take a gradient step; returns why it fails, or ""."""
        try:
            return self._measure([self._step(sample, scheduled)], None)[0]
        except OF_THE_DEVICE:
            raise
        except ATTRIBUTABLE:
            return ERROR

    def _is_due(self) -> bool:
        """Return whether enough steps were taken since a publication; the count then begins again."""
        due = self._unpublished >= self.section.publish_period
        if due:
            self._unpublished = 0
        return due

    # ---- the end of an update

    def _measure(self, made: Sequence[Stepped], observed: Moments | None) -> tuple[str, dict[str, float]]:
        """Return why the steps cannot be kept, or "", and their means: the one read of the device."""
        tensors = {
            name: torch.stack([step.metrics[name] for step in made]).mean().double()
            for name in (made[0].metrics if made else ())
        }
        checks = [optimiser.checksum().double() for optimiser in self.optimisers.values()]
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

    # ---- what an update may change

    def _transitions(self, fragment: Batch) -> Steps:
        section = self.section
        return transitions(
            fragment, self.policy.memory.frames, discount=section.discount, steps=section.n_step
        )

    def _backup(self) -> PartsBackup:
        return PartsBackup(
            {name: optimiser.backup() for name, optimiser in self.optimisers.items()},
            {name: target.backup() for name, target in self.targets.items()},
            replace(self.limiter.counts),
            {name: random.get_state() for name, random in self.generators.items()},
            self.replay.mark(),
        )

    def _restore(self, backup: PartsBackup) -> None:
        """Restore everything but the content of replay."""
        self._restore_weights(backup)
        self.limiter.counts = replace(backup.counts)
        for name, random in self.generators.items():
            random.set_state(backup.random[name])
        self.replay.go_back(backup.replay)

    def _restore_weights(self, backup: PartsBackup) -> None:
        for name, optimiser in self.optimisers.items():
            optimiser.restore(backup.optimisers[name])
        for name, target in self.targets.items():
            target.restore(backup.targets[name])

    # ---- the log and checkpoints

    def retain_from(self) -> int | None:
        """Return the number of the oldest entry in replay."""
        return self.replay.retain_from()

    def retains(self, fragment_bytes: int) -> Retained:
        """Return `capacity_bytes`, and as many entries as steps: each holds at least one."""
        section = self.section
        if fragment_bytes > section.capacity_bytes:
            raise ValueError(
                f"algorithm.capacity_bytes={section.capacity_bytes}: a fragment alone has {fragment_bytes}; "
                "give at least that, or lower actor.unroll_length or environment.count"
            )
        return Retained(size=section.capacity_bytes, entries=section.capacity)

    def reload(self, batch: Batch) -> None:
        """Put fragments back that replay held when the state was made."""
        for source, fragment in fragments(batch):
            if self.replay.awaits(source.number):
                self.replay.reload(source.number, self._transitions(fragment))

    def end_reload(self) -> int:
        """Return how many entries did not come; where too few are left to sample from, reset the limiter."""
        lost = self.replay.end_reload()
        if self.replay.size < self.section.learning_starts <= self.limiter.counts.inserted:
            self.limiter.restart()
        return lost

    def state(self) -> AlgorithmState:
        """Return copies of weights, moments, generators, and replay's entry numbers and priorities."""
        state = super().state()
        held, numbers = self.replay.state()
        counts = self.limiter.counts
        return AlgorithmState(
            tensors=state.tensors | {f"replay/{key}": tensor for key, tensor in held.items()},
            numbers=state.numbers
            | {
                "unpublished": self._unpublished,
                "replay": numbers | {"inserted": counts.inserted, "taken": counts.taken},
            },
        )

    def load(self, state: AlgorithmState) -> None:
        """Restore `state`, except for the content of replay, which is read again from the log.

        Raises ValueError that names what is missing or misshapen.
        """
        super().load(state)
        held = state.numbers["replay"]
        self.replay.load(under(state.tensors, "replay/"), held)
        self.limiter.counts = Counts(inserted=int(held["inserted"]), taken=held["taken"])
        self.limiter.rebase()
        self._unpublished = int(state.numbers["unpublished"])

    def restore(self, state: AlgorithmState) -> None:
        """See `Algorithm`; what replay holds stays, with its priorities."""
        self._load_learned(taken_over(self.state(), state, going_on=("generator/", "replay/")))


def _check(policy: Policy, name: str) -> None:
    """Raise ConfigurationError for policies that replay cannot train: it samples single steps."""
    if policy.memory.is_recurrent:
        raise ConfigurationError(
            f"algorithm.name={name!r}: replay holds single steps with their stacks of frames, and "
            "policy.recurrent needs all those before them; set policy.frame_stack instead, or use 'ppo'"
        )
    if policy.dropouts or any(isinstance(module, BatchNorm) for module in policy.modules()):
        raise ConfigurationError(
            f"algorithm.name={name!r}: policy.dropout and policy.hidden_norm='batch' are for algorithms that "
            "learn from whole batches of new experience; leave them out, or use hidden_norm='layer'"
        )
