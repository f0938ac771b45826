"""The skeleton of algorithms that learn from each batch once and forget it.

It has what they share: batches and budget, an update that leaves no trace when it fails, metrics, and what
a checkpoint holds. The algorithm itself says how advantages are estimated, what they weigh in the
surrogate, and which gradient steps are made with which loss:

    read → values, log π → `_advantages` → `_surrogate` → `_train`: `_policy_loss`, `_value_loss` → finite?
                                                        merge the statistics ←  yes ┘   └ no: everything back

An update reads the device once, at its end. Whatever is defined over the whole batch or minibatch goes
through the `RankGroup` of ranks, so that several of them make the update that one would make.
"""

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from penstock.learner.algorithms.algorithm import AlgorithmState, Update
from penstock.learner.algorithms.fast.network import network_of
from penstock.learner.algorithms.fast.optimiser import FlatAdam
from penstock.learner.algorithms.on_policy.gradient_steps import GradientRecord, GradientSteps
from penstock.learner.algorithms.on_policy.preparation import Prepared, prepare
from penstock.learner.algorithms.on_policy.reward_scale import RewardScale, Scaled
from penstock.learner.algorithms.on_policy.update_metrics import last_epoch, measure_update
from penstock.learner.algorithms.shared.advantage import Advantages, Unrolls
from penstock.learner.algorithms.shared.containment import contained
from penstock.learner.algorithms.shared.hardware import Hardware
from penstock.learner.algorithms.shared.learn_once import LearnsOnce, Own
from penstock.learner.algorithms.shared.loss import Sloped, Surrogate, standardise, value_loss
from penstock.learner.algorithms.shared.rank_group import RankRows
from penstock.learner.algorithms.shared.rows import Rows
from penstock.learner.algorithms.shared.schedule import ScheduleValues, decayed, factor, warmup
from penstock.learner.algorithms.shared.steps import Steps
from penstock.learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from penstock.learner.batch import Batch
from penstock.policy.layers import Measured, measure
from penstock.policy.numbers import Numbers
from penstock.policy.policy import Policy

_GOING_ON = ("generator/", "rewards/slots", "rewards/returns")


class OnPolicy(LearnsOnce[Own]):
    """An `Algorithm`. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(self, policy: Policy, section: Own, *, seed: int, hardware: Hardware | None = None) -> None:
        hardware = hardware or Hardware()
        super().__init__(section)
        self.policy = policy
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser, hardware)
        self._group = hardware.group
        self._gradient_steps = GradientSteps(
            policy,
            self._network,
            self._optimiser,
            section,
            self._group,
            seed=seed,
            policy_loss=self._policy_loss,
            value_loss=self._value_loss,
        )
        self._permutations = torch.Generator().manual_seed(seed)
        self._reward_scale = RewardScale(section.discount, self._group) if section.scale_rewards else None

    # ---- what an algorithm says of itself

    @abstractmethod
    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        """Once per batch. log_ratios: log π/μ with the policy at the start of the batch, [T, B]."""

    @abstractmethod
    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        """Once per batch. log μ, log π at the start of the batch, advantages: [n]."""

    @abstractmethod
    def _policy_loss(self, log_prob: Numbers, rows: Rows, scheduled: ScheduleValues) -> Sloped:
        """Of a gradient step. log_prob: log π_θ, [m], without gradient."""

    def _value_loss(self, value: Numbers, rows: Rows) -> Sloped:
        """Of a gradient step. value: [m], without gradient."""
        return value_loss(value, rows.target, rows.old_value, None, rows.total)

    def _train(self, batch: Batch, prepared: Prepared, scheduled: ScheduleValues) -> GradientRecord:
        """One gradient step on the whole batch."""
        rank_rows = prepared.rank_rows
        split = rank_rows.split(torch.arange(rank_rows.total), 1)
        record = GradientRecord(rows=prepared.rows, split=split)
        record.log_prob = self._gradient_steps.each(prepared.rows, split.sizes, scheduled, record)
        return record

    def _trained(self, batch: Batch) -> Tensor:
        """Return which steps enter the losses, bool [T, B]."""
        return batch.valid

    def _schedule(self, progress: float) -> ScheduleValues:
        """Return what the schedules say for this update. progress: of the run, 0..1."""
        section = self.section
        rise = warmup(self._updates, section.warmup_updates)
        return ScheduleValues(
            learning_rate=section.learning_rate * factor(section.learning_rate_schedule, progress) * rise,
            entropy_coefficient=decayed(
                section.entropy_coefficient, section.entropy_decay, section.entropy_floor, self._updates
            ),
        )

    def _watch(
        self, batch: Batch, rows: Steps, log_prob: Tensor, scheduled: ScheduleValues
    ) -> dict[str, Tensor]:
        """Return more metrics of the last epoch, as scalars on the device.

        batch: this rank's; rows, log_prob: of all ranks.
        """
        return {}

    def published_modules(self) -> dict[str, nn.Module]:
        """The policy, as `default`."""
        return {"default": self.policy}

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Consume one batch with all its gradient steps, without the fragments that make it fail."""
        return contained(partial(self._attempt, progress=progress), batch, self._group)

    def _attempt(self, batch: Batch, *, is_rehearsal: bool, progress: float) -> Update:
        """See `Attempt`."""
        rank_rows = self._group.rows_of(self._trained(batch))
        if not rank_rows.total:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        scheduled = self._schedule(progress)
        with torch.no_grad():
            scaled = self._reward_scale.scale(batch) if self._reward_scale is not None else None
            rewards = scaled.rewards if scaled else batch.reward
            prepared = self.prepare(batch, rewards, rank_rows)
        if not prepared.rank_rows.total:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        backup, drawn = self._optimiser.backup(), self._permutations.get_state()
        is_kept = False
        try:
            record = self._train(batch, prepared, scheduled)
            activations = measure(
                self.policy, lambda: self.policy.bodies(prepared.rows.alone()), self._group.moments
            )
            with torch.no_grad():
                reason, metrics = self._measure(batch, prepared, activations, record, scheduled)
            is_kept = not reason and not is_rehearsal
            if is_kept:
                self._commit(prepared, activations, scaled, metrics)
        finally:
            if not is_kept:
                self._optimiser.restore(backup)
                self._permutations.set_state(drawn)
        return Update(
            applied=not reason,
            reason=reason,
            steps=prepared.steps,
            gradient_steps=len(record.norms),
            metrics={} if reason else metrics,
        )

    def prepare(self, batch: Batch, rewards: Tensor, rank_rows: RankRows) -> Prepared:
        """Return what is computed once per batch; call it without gradients. See `preparation.prepare`."""
        return prepare(
            self.policy,
            self._network,
            batch,
            rewards,
            self._group,
            rank_rows,
            self._advantages,
            self._weigh,
        )

    def _weigh(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        chosen = standardise(advantage) if self.section.normalise_advantages else advantage
        return self._surrogate(behaviour, proximal, chosen)

    def _measure(
        self,
        batch: Batch,
        prepared: Prepared,
        activations: Measured | None,
        record: GradientRecord,
        scheduled: ScheduleValues,
    ) -> tuple[str, dict[str, float]]:
        """Return why the update is not kept, or "", and its metrics; the one read of the device."""
        rows, log_prob = steps = last_epoch(record)
        reason, metrics = measure_update(
            prepared,
            record,
            self._group,
            steps,
            more=self._watch(batch, rows, log_prob, scheduled),
            optimiser=self._optimiser.checksum(),
            activations=activations,
            max_log_ratio=self.section.max_log_ratio,
        )
        return reason, {**metrics, **scheduled.metrics(), **record.numbers}

    def _commit(
        self,
        prepared: Prepared,
        activations: Measured | None,
        scaled: Scaled | None,
        metrics: Mapping[str, float],
    ) -> None:
        if activations is not None:
            activations.merge()
        if prepared.observed is not None and self.policy.normaliser is not None:
            self.policy.normaliser.merge(prepared.observed)
        if scaled is not None and self._reward_scale is not None:
            self._reward_scale.commit(scaled)
        self._updates += 1

    # ---- a checkpoint

    def state(self) -> AlgorithmState:
        """Weights, moments, generator and returns so far; copies."""
        tensors = copies("policy", self.policy)
        tensors |= {f"optimiser/{name}": moment for name, moment in self._optimiser.moments().items()}
        tensors["generator/permutations"] = self._permutations.get_state()
        if self._reward_scale is not None:
            tensors |= {f"rewards/{k}": v for k, v in self._reward_scale.state().items()}
        numbers = {"updates": self._updates, "gradient_steps": self._optimiser.steps}
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        missing = [key for key in ("updates", "gradient_steps") if key not in state.numbers]
        if missing or "generator/permutations" not in state.tensors:
            raise ValueError(f"algorithm state: {missing or 'generator/permutations'} missing")
        load_copies(self.policy, "policy", state.tensors)
        self._optimiser.load_moments(under(state.tensors, "optimiser/"), int(state.numbers["gradient_steps"]))
        self._permutations.set_state(state.tensors["generator/permutations"])
        if self._reward_scale is not None:
            self._reward_scale.load(under(state.tensors, "rewards/"))
        self._updates = int(state.numbers["updates"])

    def restore(self, state: AlgorithmState) -> None:
        """See `Algorithm`. The environments' returns so far go on, their scale is taken over."""
        self.load(taken_over(self.state(), state, going_on=_GOING_ON))
