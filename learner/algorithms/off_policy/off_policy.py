"""The update of algorithms that learn from replay: everything but the gradient step.

One `update` inserts the fragments of one delivery into replay and then takes as many gradient steps as the
rate limiter allows, each on a new sample:

    insert → [limiter allows: sample → gradient step → priorities] → finite? → merge normaliser
                             └ no: restore everything; evict the entries that make a step fail and try again,
                                   or withdraw the fragments

It depends on the order of the log alone: a resumed learner makes the same samples and steps.
"""

import copy
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, ReplaySection
from penstock.learner.algorithms.algorithm import (
    ATTRIBUTABLE,
    EMPTY,
    AlgorithmState,
    LogShare,
    Settles,
    Trained,
    Update,
    culprits,
    failed,
    taken_over,
    under,
    verdict,
)
from penstock.learner.algorithms.gradient import FlatAdam, GoBack, backup_of, flatten
from penstock.learner.algorithms.losses import factor
from penstock.learner.algorithms.off_policy.memory import (
    Replay,
    Sample,
    Steps,
    transitions,
)
from penstock.learner.algorithms.rows import trajectory_of
from penstock.learner.batch import Batch
from penstock.policy.networks import BatchNorm, Moments
from penstock.policy.policy import Policy
from penstock.runtime import metrics as figures

M = TypeVar("M", bound=nn.Module)

log = logging.getLogger(__name__)


# ---- Bounds on the ratio of gradient steps taken to environment steps inserted into replay.
#
# The rule of Reverb's `SampleToInsertRatio` (Cassirer et al. 2021, section 3.4), counted in gradient steps.
# With `due` = (inserted − minimum) · ratio − taken:
#
#     a gradient step needs        size ≥ minimum   and   due − 1 ≥ −buffer · ratio
#     an insertion of n steps needs                       due + n · ratio ≤ buffer · ratio
#
# The learner takes steps as long as it may and then inserts, so its steps depend on the log's order alone,
# also after a restart. Between two updates `due` lies less than one step above its lower bound, after the
# first that draws, too; `rebase` puts it there after a resume with other settings. `budget` bounds steps in
# the log that are not inserted yet.

_ROUNDING: Final = 1e-6
"""Tolerance, in gradient steps."""


@dataclass(slots=True)
class Counts:
    """Environment steps inserted, and gradient steps taken or waived, since the start of the run."""

    inserted: int = 0
    taken: float = 0


@dataclass(eq=False)
class SampleToInsertRatio:
    """Counts insertions and gradient steps of one replay memory, and bounds their ratio.

    ratio: gradient steps per environment step. minimum: environment steps before the first gradient step.
    buffer_steps: bound of the error, in environment steps.
    """

    _: KW_ONLY
    ratio: float
    minimum: int
    buffer_steps: int

    def __post_init__(self) -> None:
        self._buffer = self.buffer_steps * self.ratio
        self.restart()

    @property
    def due(self) -> float:
        return (self.counts.inserted - self.minimum) * self.ratio - self.counts.taken

    def may_draw(self, size: int) -> bool:
        return size >= self.minimum and self.due - 1.0 >= -self._buffer

    def may_insert(self, steps: int) -> bool:
        return self.due + steps * self.ratio <= self._buffer + _ROUNDING

    def inserted(self, steps: int) -> None:
        """Count inserted steps; raises RuntimeError where they were not allowed, which `check` rules out."""
        if not self.may_insert(steps):
            raise RuntimeError(f"rate limiter: {steps} steps entered with {self.due:g} gradient steps due")
        self.counts.inserted += steps

    def drawn(self) -> None:
        self.counts.taken += 1

    def restart(self, size: int = 0) -> None:
        """Begin with a memory of `size` steps, and with nothing to make up for once it holds enough."""
        self.counts = Counts(inserted=size, taken=self._buffer)

    def rebase(self) -> None:
        """Limit `due` to its range between two updates, where it was counted with other settings.

        Otherwise a higher ratio would require all steps of the past, and a lower one none for a long time.
        """
        if self.counts.inserted >= self.minimum:
            due = min(max(self.due, -self._buffer), 1.0 - self._buffer)
            self.counts.taken += self.due - due

    def check(self, *, insertion: int, capacity: int) -> None:
        """Raise ValueError, with the figures, for limits that at some time allow neither side.

        insertion: most steps that are inserted at once. capacity: of the memory, in steps.
        """
        if capacity < self.minimum + insertion:
            raise ValueError(
                f"algorithm.capacity={capacity}: replay must hold algorithm.learning_starts={self.minimum} "
                f"steps and a fragment of {insertion} in addition, or nothing would ever be sampled; give at "
                f"least {self.minimum + insertion}"
            )
        # An insertion must stay below the upper bound when steps were taken down to the lower one.
        needed = math.ceil(max(insertion, (insertion + 1.0 / self.ratio) / 2))
        if self.buffer_steps < needed:
            raise ValueError(
                f"algorithm.error_steps={self.buffer_steps}: with fragments of {insertion} steps, "
                f"{self.ratio:g} gradient steps per environment step there would come a time "
                f"at which neither inserting nor sampling is allowed; give at least {needed}, or lower "
                "actor.unroll_length or environment.count"
            )


# ---- The frame of an update.


@dataclass(eq=False)
class Target(Generic[M]):
    """A copy of a network that follows it slowly: θ' ← (1 − τ) θ' + τ θ at every `period`-th gradient step.

    τ = 1 copies (Mnih et al. 2015), a small τ with period 1 is Polyak averaging (Lillicrap et al. 2016). Only
    parameters follow; the online network normalises the inputs of both. online: optimises `module`. rate: τ.
    """

    module: M
    online: FlatAdam
    _: KW_ONLY
    period: int
    rate: float

    def __post_init__(self) -> None:
        self.module = copy.deepcopy(self.module).requires_grad_(requires_grad=False)
        self.parameters = flatten(self.module)
        """θ', flat."""

    def follow(self) -> None:
        if self.online.steps % self.period == 0:
            self.parameters.lerp_(self.online.parameters, self.rate)

    def backup(self) -> GoBack:
        return backup_of(self.parameters)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A gradient step, on the device. errors: [n], of each transition. metrics: scalars by name."""

    errors: Tensor
    metrics: dict[str, Tensor]


class OffPolicy(Trained):
    """An `Algorithm` that learns from replay; a subclass adds the gradient step.

    It owns the policy's weights: do not convert or move the policy afterwards.
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
            priority_exponent=section.priority_exponent if section.prioritised else None,
        )
        self.limiter = SampleToInsertRatio(
            ratio=section.replay_ratio,
            minimum=section.learning_starts,
            buffer_steps=section.error_steps,
        )
        self._unpublished = 0
        self._learning_rate = self._importance_exponent = 0.0
        """Of this update, as scheduled; β is the exponent of the importance weights."""

    # ---- what a subclass adds

    @abstractmethod
    def gradient_step(self, sample: Sample, learning_rate: float) -> Stepped:
        """Learn from one sample."""

    # ---- updates

    def budget(self, fragment_charge: int) -> int:
        """Return the larger of two fragments and the limiter's error bound.

        Raises ValueError with the figures where the limiter would block for good.
        """
        self.limiter.check(insertion=fragment_charge, capacity=self.section.capacity)
        return max(2 * fragment_charge, self.limiter.buffer_steps)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        """Return True: a batch is one fragment."""
        return True

    def update(self, batch: Batch, *, progress: float) -> Update:
        steps = int(batch.valid.sum())
        if steps == 0:
            return Update(applied=False, reason=EMPTY)
        self.replay.begin()
        counts = replace(self.limiter.counts)
        for source, fragment in batch.fragments():
            self.replay.insert(source.number, source.size, self._transitions(fragment))
        self.limiter.inserted(steps)
        go_back = self._backup()
        section = self.section
        self._learning_rate = section.learning_rate * factor(section.learning_rate_schedule, progress)
        start = section.importance_exponent
        self._importance_exponent = start + (1.0 - start) * progress
        taken, observed = self._take_steps(batch)
        while taken.reason and self._evict_culprits(go_back, batch):
            taken, observed = self._take_steps(batch)
        metrics = taken.metrics
        if taken.reason:
            go_back()
            self.limiter.counts = counts
            # The batch is booked as dropped, so replay must not hold it.
            for source in reversed(batch.sources):
                self.replay.withdraw(source.number)
        else:
            if observed is not None and self.policy.normaliser is not None:
                self.policy.normaliser.merge(observed)
            self._updates += 1
            self._unpublished += taken.gradient_steps
        if taken.gradient_steps:
            metrics |= {
                "learning_rate": self._learning_rate,
                "replay_steps": float(self.replay.size),
            } | self.scalars(progress)
        return replace(
            taken,
            steps=steps,
            metrics={} if taken.reason else metrics,
            publish=taken.applied and self._is_due(),
            collects=self.replay.size < self.limiter.minimum,
        )

    def _take_steps(self, batch: Batch) -> tuple[Update, Moments | None]:
        """Take the gradient steps of an update; return what they did, and moments of the observations."""
        try:
            made = self._learn()
            with torch.no_grad():
                observed = self._observed(batch)
                reason, metrics = self._measure(made, observed)
        except ATTRIBUTABLE as error:
            return failed(error), None
        made_update = Update(applied=not reason, reason=reason, gradient_steps=len(made), metrics=metrics)
        return made_update, observed

    def _learn(self) -> list[Stepped]:
        made: list[Stepped] = []
        # What is owed when the learner stops is given up: `SampleToInsertRatio.rebase`.
        while self.limiter.may_draw(self.replay.size) and not (made and self.is_stopping()):
            made.append(self._step(self._sample()))
            self.limiter.drawn()
        return made

    def _sample(self) -> Sample:
        return self.replay.sample(self.section.batch_size, importance_exponent=self._importance_exponent)

    def _step(self, sample: Sample) -> Stepped:
        stepped = self.gradient_step(sample, self._learning_rate)
        self.replay.set_errors(sample.index, stepped.errors)
        return stepped

    # ---- entries that make gradient steps fail

    def _evict_culprits(self, go_back: GoBack, batch: Batch) -> bool:
        """Remove the entries from replay that make gradient steps fail; returns whether to try again.

        It is useless to try again where an entry of this batch is among them, or where none is found.
        """
        go_back()
        found = self._find_culprits()
        go_back()
        of_batch = {source.number for source in batch.sources}
        for number in sorted(found - of_batch):
            log.error("a fragment was taken out of replay: updates fail with it", extra={"number": number})
            figures.REPLAY_EVICTED.inc()
            self.replay.remove(number)
        if self.replay.size < self.limiter.minimum <= self.limiter.counts.inserted:
            self.limiter.restart(self.replay.size)
        return bool(found) and not found & of_batch

    def _find_culprits(self) -> set[int]:
        """Repeat the steps; return the entries that make the first failing step fail."""
        while self.limiter.may_draw(self.replay.size):
            sample, go_back = self._sample(), self._backup()
            if self._try_step(sample):
                return self._culprits_of(sample, go_back)
            self.limiter.drawn()
        return set()

    def _culprits_of(self, sample: Sample, go_back: GoBack) -> set[int]:
        numbers = self.replay.entries_of(sample.index)

        def trial(entries: Sequence[int]) -> str:
            go_back()
            part = self.replay.part(sample, torch.isin(numbers, torch.tensor(entries)))
            return self._try_step(part)

        return set(culprits(trial, sorted(set(numbers.tolist()))) or ())

    def _try_step(self, sample: Sample) -> str:
        """Take a step; returns why it fails, or ""."""
        try:
            return self._measure([self._step(sample)], None)[0]
        except ATTRIBUTABLE as error:
            return failed(error).reason

    def _is_due(self) -> bool:
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

    # ---- insertion and rollback

    def _transitions(self, fragment: Batch) -> Steps:
        section = self.section
        return transitions(
            fragment, self.policy.memory.frames, discount=section.discount, steps=section.n_step
        )

    def _backup(self) -> GoBack:
        """Back up everything but the content of replay."""
        parts = [super()._backup(), self.replay.backup()]
        parts += [target.backup() for target in self.targets.values()]
        counts = replace(self.limiter.counts)

        def go_back() -> None:
            for restore in parts:
                restore()
            self.limiter.counts = replace(counts)

        return go_back

    # ---- the log and checkpoints

    def retain_from(self) -> int | None:
        return self.replay.retain_from()

    def retains(self, fragment_bytes: int) -> LogShare:
        """Return as many entries as the memory holds steps, since an entry has at least one step."""
        section = self.section
        if fragment_bytes > section.capacity_bytes:
            raise ValueError(
                f"algorithm.capacity_bytes={section.capacity_bytes}: a fragment alone has {fragment_bytes}; "
                "give at least that, or lower actor.unroll_length or environment.count"
            )
        return LogShare(size=section.capacity_bytes, entries=section.capacity)

    def reload(self, batch: Batch) -> None:
        for source, fragment in batch.fragments():
            if self.replay.awaits(source.number):
                self.replay.reload(source.number, self._transitions(fragment))

    def end_reload(self) -> int:
        """Return how many entries did not come; where too few are left to sample from, reset the limiter."""
        lost = self.replay.end_reload()
        if self.replay.size < self.section.learning_starts <= self.limiter.counts.inserted:
            self.limiter.restart()
        return lost

    def state(self) -> AlgorithmState:
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
        """Restore everything but the content of replay, which `reload` brings from the log."""
        super().load(state)
        held = state.numbers["replay"]
        self.replay.load(under(state.tensors, "replay/"), held)
        self.limiter.counts = Counts(inserted=int(held["inserted"]), taken=held["taken"])
        self.limiter.rebase()
        self._unpublished = int(state.numbers["unpublished"])

    def restore(self, state: AlgorithmState) -> None:
        """Restore the weights; replay keeps its content and priorities."""
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
