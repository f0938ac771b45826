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
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Retained, Settles, Update
from penstock.learner.algorithms.fast.optimiser import Backup, FlatAdam, flatten
from penstock.learner.algorithms.off_policy.replay.memory import Mark, Prioritisation, Replay, Sample
from penstock.learner.algorithms.off_policy.replay.rate_limiter import Counts, SampleToInsertRatio
from penstock.learner.algorithms.off_policy.replay.transitions import Steps, fragments, transitions
from penstock.learner.algorithms.shared.containment import (
    ATTRIBUTABLE,
    ERROR,
    OF_THE_DEVICE,
    culprits,
    trajectory_of,
    verdict,
)
from penstock.learner.algorithms.shared.schedule import factor
from penstock.learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from penstock.learner.batch import Batch
from penstock.policy.networks import ACTIVATIONS, BatchNorm, ImageEncoder, Inputs, Reader, initialise
from penstock.policy.normaliser import Moments
from penstock.policy.policy import Policy
from penstock.runtime import metrics as figures

# ---- A network that follows another one slowly, so that the targets of learning do not move with every
# step.

M = TypeVar("M", bound=nn.Module)


class Target(Generic[M]):
    """Moves θ' ← (1 − τ) θ' + τ θ at every `period`-th gradient step.

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
        """Restore such a copy."""
        self._flat.copy_(backup)


# ---- What an algorithm that learns from replay consists of, and how that is set aside, kept and brought
# back.


@dataclass(frozen=True, slots=True)
class PartsBackup:
    """What one update may change, as it was before: weights, targets, counts and random states."""

    optimisers: dict[str, Backup]
    targets: dict[str, Tensor]
    counts: Counts
    random: dict[str, Tensor]
    replay: Mark


class OffPolicyParts(Algorithm):
    """The parts of an algorithm that learns from replay.

    It owns the policy's weights: do not convert or move the policy.
    """

    settles = Settles.ON_INSERT
    keeps_restored = True

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
            prioritisation=Prioritisation(exponent=section.priority_exponent)
            if section.prioritised
            else None,
        )
        self.limiter = SampleToInsertRatio(
            ratio=section.replay_ratio,
            minimum=section.learning_starts,
            buffer_steps=section.error_steps,
        )
        self._unpublished = 0

    # ---- what a subclass adds

    @abstractmethod
    def modules(self) -> Mapping[str, nn.Module]:
        """Return everything with weights, by the name that a checkpoint gives it."""

    @abstractmethod
    def optimisers(self) -> Mapping[str, FlatAdam]:
        """Return the optimisers by the name of the module that each one optimises."""

    @abstractmethod
    def targets(self) -> Mapping[str, Target[Any]]:
        """Return the target networks by name."""

    def generators(self) -> Mapping[str, torch.Generator]:
        """Return the generators of random numbers, beside that of replay."""
        return {}

    # ---- one update

    def _transitions(self, fragment: Batch) -> Steps:
        section = self.section
        return transitions(
            fragment, self.policy.memory.frames, discount=section.discount, steps=section.n_step
        )

    def _backup(self) -> PartsBackup:
        return PartsBackup(
            {name: optimiser.backup() for name, optimiser in self.optimisers().items()},
            {name: target.backup() for name, target in self.targets().items()},
            replace(self.limiter.counts),
            {name: random.get_state() for name, random in self.generators().items()},
            self.replay.mark(),
        )

    def _restore(self, backup: PartsBackup) -> None:
        """Restore everything but the content of replay."""
        self._restore_weights(backup)
        self.limiter.counts = replace(backup.counts)
        for name, random in self.generators().items():
            random.set_state(backup.random[name])
        self.replay.go_back(backup.replay)

    def _restore_weights(self, backup: PartsBackup) -> None:
        for name, optimiser in self.optimisers().items():
            optimiser.restore(backup.optimisers[name])
        for name, target in self.targets().items():
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
        tensors: dict[str, Tensor] = {}
        for name, module in self.modules().items():
            tensors |= copies(name, module)
        for name, optimiser in self.optimisers().items():
            tensors |= {f"optimiser/{name}/{key}": moment for key, moment in optimiser.moments().items()}
        held, numbers = self.replay.state()
        tensors |= {f"replay/{key}": tensor for key, tensor in held.items()}
        tensors |= {f"generator/{name}": random.get_state() for name, random in self.generators().items()}
        counts = self.limiter.counts
        return AlgorithmState(
            tensors=tensors,
            numbers={
                "updates": self._updates,
                "unpublished": self._unpublished,
                "gradient_steps": {name: optimiser.steps for name, optimiser in self.optimisers().items()},
                "replay": numbers | {"inserted": counts.inserted, "taken": counts.taken},
            },
        )

    def load(self, state: AlgorithmState) -> None:
        """Restore `state`, except for the content of replay, which is read again from the log.

        Raises ValueError that names what is missing or misshapen.
        """
        numbers = state.numbers
        missing = [
            name for name in ("updates", "unpublished", "gradient_steps", "replay") if name not in numbers
        ]
        if missing:
            raise ValueError(
                f"algorithm state: {missing[0]} missing; was the run begun with another algorithm?"
            )
        self._load_learned(state)
        for name, random in self.generators().items():
            if f"generator/{name}" not in state.tensors:
                raise ValueError(f"generator/{name}: missing")
            random.set_state(state.tensors[f"generator/{name}"])
        held = numbers["replay"]
        self.replay.load(under(state.tensors, "replay/"), held)
        self.limiter.counts = Counts(inserted=int(held["inserted"]), taken=held["taken"])
        self.limiter.rebase()
        self._updates, self._unpublished = int(numbers["updates"]), int(numbers["unpublished"])

    def restore(self, state: AlgorithmState) -> None:
        """See `Algorithm`; what replay holds stays, with its priorities."""
        self._load_learned(taken_over(self.state(), state, going_on=("generator/", "replay/")))

    def _load_learned(self, state: AlgorithmState) -> None:
        for name, module in self.modules().items():
            load_copies(module, name, state.tensors)
        for name, optimiser in self.optimisers().items():
            found = under(state.tensors, f"optimiser/{name}/")
            optimiser.load_moments(found, int(state.numbers["gradient_steps"][name]))


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


# ---- Critics of continuous actions: two, of which the smaller value counts (Fujimoto et al. 2018, section
# 4.2).

_HIDDEN_GAIN = 2.0**0.5


class Critic(nn.Module):
    """Computes Q(s, a): one encoder per image, then hidden layers over features, vector part and action."""

    def __init__(self, reader: Reader, actions: int, hidden_sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        encoders = [ImageEncoder(path, leaf, "auto") for path, leaf in reader.images]
        self.images = nn.ModuleList(encoders)
        width = reader.width + sum(encoder.width for encoder in encoders) + actions
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), ACTIVATIONS[activation]()]
            width = size
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Inputs, action: Tensor) -> Tensor:
        """Return Q [M] of actions [M, A]."""
        seen = [encoder(image) for encoder, image in zip(self.images, inputs.images, strict=True)]
        value: Tensor = self.head(self.layers(torch.cat([inputs.vector, *seen, action], 1)))
        return value.squeeze(1)


class TwinCritics(nn.Module):
    """Two critics with weights of their own; equal arguments give equal weights."""

    def __init__(
        self, reader: Reader, actions: int, hidden_sizes: Sequence[int], activation: str, *, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.both = nn.ModuleList(Critic(reader, actions, hidden_sizes, activation) for _ in range(2))
        for critic in self.both:
            initialise(critic, _HIDDEN_GAIN, generator)
            assert isinstance(critic, Critic)
            initialise(critic.head, 1.0, generator)

    def forward(self, inputs: Inputs, action: Tensor) -> Tensor:
        """Return both values [2, M] of actions [M, A]."""
        return torch.stack([critic(inputs, action) for critic in self.both])
