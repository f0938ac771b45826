"""What an algorithm that learns from replay consists of, and how that is set aside, kept and brought back.

A `Backup` holds what one update changes, for an update that fails. `state` and `load` are what a checkpoint
keeps; the content of replay is in neither: it is read again from the log.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, ReplaySection
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Retained, Settles
from penstock.learner.algorithms.fast.optimiser import Backup, FlatAdam
from penstock.learner.algorithms.off_policy.replay.memory import Mark, Prioritisation, Replay
from penstock.learner.algorithms.off_policy.replay.rate_limiter import Counts, SampleToInsertRatio
from penstock.learner.algorithms.off_policy.replay.transitions import Steps, fragments, transitions
from penstock.learner.algorithms.off_policy.target_network import Target
from penstock.learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from penstock.learner.batch import Batch
from penstock.policy.layers import BatchNorm
from penstock.policy.policy import Policy


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
