"""What algorithms that learn from replay have in common: everything but the gradient step.

One `update` takes the fragments of one delivery into replay and then makes as many gradient steps as the rate
limiter allows, each from a sample of its own. Sequence of an update:

    insert → [limiter allows: sample → gradient step → priorities] → finite? → merge normaliser
                                                                       └ no: everything back, and the fragments out again

What happens follows from the order of the log alone: a resumed learner makes the same samples and steps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from learner.algorithms.algorithm import AlgorithmState, Charged, Retained, Settles, Update
from learner.algorithms.fast.optimiser import Backup, FlatAdam
from learner.algorithms.off_policy.replay.memory import Prioritisation, Replay, Sample
from learner.algorithms.off_policy.replay.rate_limiter import Counts, SampleToInsertRatio
from learner.algorithms.off_policy.replay.transitions import fragments, transitions
from learner.algorithms.off_policy.target_network import Target
from learner.algorithms.shared.schedule import factor
from learner.algorithms.shared.stored import copies, load_copies, under
from learner.batch import Batch
from penstock.config.settings import ConfigurationError, ReplaySection
from penstock.policy.layers import BatchNorm
from penstock.policy.normaliser import Moments, moments
from penstock.policy.policy import Policy
from penstock.wire.schema import TensorRule


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a gradient step leaves behind, on the device. errors: [n], of each transition, for its priority.

    metrics: scalars by name.
    """

    errors: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Backup:
    optimisers: dict[str, Backup]
    targets: dict[str, Tensor]
    counts: Counts


class OffPolicy(ABC):
    """An `Algorithm` but for what a subclass adds.

    Owns the policy's weights: do not convert or move the policy.
    """

    lock_step = False
    hard_staleness: int | None = None
    settles = Settles.ON_INSERT

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
            prioritisation=Prioritisation(exponent=section.priority_exponent)
            if section.prioritised
            else None,
        )
        self.limiter = SampleToInsertRatio(
            samples_per_insert=section.replay_ratio * section.batch_size,
            draw=section.batch_size,
            minimum=section.learning_starts,
            buffer_steps=section.error_steps,
        )
        self._updates = 0
        self._unpublished = 0

    # ---- what a subclass adds

    @abstractmethod
    def gradient_step(self, sample: Sample, rate: float) -> Stepped:
        """Learn from one sample with step size `rate`."""

    @abstractmethod
    def modules(self) -> Mapping[str, nn.Module]:
        """Everything with weights, by the name that a checkpoint gives it."""

    @abstractmethod
    def optimisers(self) -> Mapping[str, FlatAdam]:
        """By the name of the module that each one optimises."""

    @abstractmethod
    def targets(self) -> Mapping[str, Target[Any]]:
        """By name."""

    @abstractmethod
    def scalars(self, progress: float) -> dict[str, float]:
        """Numbers sent to actors with every version."""

    def generators(self) -> Mapping[str, torch.Generator]:
        """Of random numbers, beside that of replay."""
        return {}

    # ---- what the loop asks

    @property
    def updates(self) -> int:
        """Applied updates in this model's own lineage."""
        return self._updates

    def requires(self) -> tuple[TensorRule, ...]:
        """Nothing beyond the standard tensors."""
        return ()

    def budget(self, fragment_charge: int) -> int:
        """max(2F, the limiter's error bound).

        Raises ValueError with the figures where the limiter would block for good.
        """
        self.limiter.check(insertion=fragment_charge, capacity=self.section.capacity)
        return max(2 * fragment_charge, self.limiter.buffer_steps)

    def take(self, pending: Sequence[Charged]) -> int:
        """One fragment after the other."""
        return min(1, len(pending))

    def published_modules(self) -> dict[str, nn.Module]:
        """The policy, as `default`."""
        return {"default": self.policy}

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Take a batch into replay and make the gradient steps that it allows."""
        steps = int(batch.valid.sum())
        if steps == 0:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        backup = self._backup()
        self._insert(batch)
        self.limiter.inserted(steps)
        rate = self.section.learning_rate * factor(self.section.learning_rate_schedule, progress)
        made = self._learn(rate, self._correction(progress))
        with torch.no_grad():
            observed = self._observed(batch)
            finite, metrics = self._measure(made, observed)
        if finite:
            self._commit(observed, len(made))
        else:
            self._restore(backup, batch)
        if made:
            metrics |= {"learning_rate": rate, "replay_steps": float(self.replay.size)} | self.scalars(
                progress
            )
        return Update(
            applied=finite,
            reason="" if finite else "nan",
            steps=steps,
            gradient_steps=len(made),
            metrics=metrics if finite else {},
            publish=finite and self._is_due(),
        )

    def _insert(self, batch: Batch) -> None:
        for source, fragment in fragments(batch):
            new = transitions(fragment, discount=self.section.discount, steps=self.section.n_step)
            self.replay.insert(source.number, source.size, new)

    def _learn(self, rate: float, correction: float) -> list[Stepped]:
        made = []
        while self.limiter.may_draw(self.replay.size):
            sample = self.replay.sample(self.section.batch_size, correction=correction)
            stepped = self.gradient_step(sample, rate)
            self.replay.set_errors(sample.index, stepped.errors)
            self.limiter.drawn()
            made.append(stepped)
        return made

    def _correction(self, progress: float) -> float:
        """β of the importance weights."""
        start = self.section.importance_exponent
        return start + (1.0 - start) * progress

    def _is_due(self) -> bool:
        """Whether enough gradient steps were made since the last publication.

        Counts from anew when they were.
        """
        due = self._unpublished >= self.section.publish_period
        if due:
            self._unpublished = 0
        return due

    # ---- the end of an update

    def _measure(self, made: Sequence[Stepped], observed: Moments | None) -> tuple[bool, dict[str, float]]:
        """The one read of the device: is everything finite, and the means over gradient steps."""
        tensors = {
            name: torch.stack([step.metrics[name] for step in made]).mean().double()
            for name in (made[0].metrics if made else ())
        }
        checks = [optimiser.checksum().double() for optimiser in self.optimisers().values()]
        if observed is not None:
            checks.append(observed.checksum())
        *numbers, check = torch.stack([*tensors.values(), torch.stack(checks).sum()]).tolist()
        finite = all(map(math.isfinite, (*numbers, check)))
        return finite, dict(zip(tensors, numbers, strict=True))

    def _observed(self, batch: Batch) -> Moments | None:
        if self.policy.normaliser is None:
            return None
        reals = self.policy.reader.raw_reals(batch.observation, torch.float64)
        return moments(reals[: batch.valid.numel()][batch.valid.flatten()])

    def _commit(self, observed: Moments | None, gradient_steps: int) -> None:
        if observed is not None and self.policy.normaliser is not None:
            self.policy.normaliser.merge(observed)
        self._updates += 1
        self._unpublished += gradient_steps

    def _backup(self) -> _Backup:
        return _Backup(
            {name: optimiser.backup() for name, optimiser in self.optimisers().items()},
            {name: target.backup() for name, target in self.targets().items()},
            replace(self.limiter.counts),
        )

    def _restore(self, backup: _Backup, batch: Batch) -> None:
        """Weights as before, and the batch out of replay.

        It is booked `nan`, so it must not be learned from.
        """
        for name, optimiser in self.optimisers().items():
            optimiser.restore(backup.optimisers[name])
        for name, target in self.targets().items():
            target.restore(backup.targets[name])
        self.limiter.counts = backup.counts
        for source in reversed(batch.sources):
            self.replay.withdraw(source.number)

    # ---- the log and checkpoints

    def retain_from(self) -> int | None:
        """Number of the oldest entry in replay."""
        return self.replay.retain_from()

    def retains(self, fragment_bytes: int) -> Retained:
        """`capacity_bytes`, and as many entries as steps: each holds at least one."""
        section = self.section
        if fragment_bytes > section.capacity_bytes:
            raise ValueError(
                f"algorithm.capacity_bytes={section.capacity_bytes}: a fragment alone has {fragment_bytes}; "
                "give at least that, or lower actor.unroll_length or environment.count"
            )
        return Retained(size=section.capacity_bytes, entries=section.capacity)

    def recall(self, batch: Batch) -> None:
        """Put fragments back that replay held when the state was made."""
        for source, fragment in fragments(batch):
            if self.replay.awaits(source.number):
                new = transitions(fragment, discount=self.section.discount, steps=self.section.n_step)
                self.replay.recall(source.number, new)

    def end_recall(self) -> int:
        """Entries that did not come; where too few are left to sample from, the limiter begins anew."""
        lost = self.replay.end_recall()
        if self.replay.size < self.section.learning_starts <= self.limiter.counts.inserted:
            self.limiter.restart()
        return lost

    def state(self) -> AlgorithmState:
        """Weights, moments, generators, and which entries replay holds with which priorities; copies."""
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
                "replay": numbers | {"inserted": counts.inserted, "sampled": counts.sampled},
            },
        )

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from, but for what replay holds: that is recalled from the log.

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
        for name, module in self.modules().items():
            load_copies(module, name, state.tensors)
        for name, optimiser in self.optimisers().items():
            found = under(state.tensors, f"optimiser/{name}/")
            optimiser.load_moments(found, int(numbers["gradient_steps"][name]))
        for name, random in self.generators().items():
            if f"generator/{name}" not in state.tensors:
                raise ValueError(f"generator/{name}: missing")
            random.set_state(state.tensors[f"generator/{name}"])
        held = numbers["replay"]
        self.replay.load(under(state.tensors, "replay/"), held)
        self.limiter.counts = Counts(inserted=int(held["inserted"]), sampled=int(held["sampled"]))
        self._updates, self._unpublished = int(numbers["updates"]), int(numbers["unpublished"])


def _check(policy: Policy, name: str) -> None:
    """Raise ConfigurationError for policies that replay cannot train.

    It samples single steps, one at a time.
    """
    if policy.state_space.spaces:
        raise ConfigurationError(
            f"algorithm.name={name!r}: replay holds single steps, and policy.recurrent or policy.frame_stack "
            "needs those before them; leave both out, or use 'ppo'"
        )
    if policy.dropouts or any(isinstance(module, BatchNorm) for module in policy.modules()):
        raise ConfigurationError(
            f"algorithm.name={name!r}: policy.dropout and policy.hidden_norm='batch' are for algorithms that "
            "learn from whole batches of new experience; leave them out, or use hidden_norm='layer'"
        )
