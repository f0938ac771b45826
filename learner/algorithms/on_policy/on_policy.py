"""The skeleton of algorithms that learn from each batch once and forget it.

It has what they share: batches and budget, an update that leaves no trace when it fails, metrics, and what
a checkpoint holds. The algorithm itself says how advantages are estimated, what they weigh in the
surrogate, and which gradient steps are made with which loss:

    read → values, log π → `_advantages` → `_surrogate` → `_train`: `_policy_loss`, `_value_loss` → finite?
                                                        merge the statistics ←  yes ┘   └ no: everything back

An update reads the device once, at its end. Whatever is defined over the whole batch or minibatch goes
through the `RankGroup` of ranks, so that several of them make the update that one would make.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from learner.algorithms.algorithm import AlgorithmState, Update
from learner.algorithms.fast.network import network_of
from learner.algorithms.fast.optimiser import FlatAdam
from learner.algorithms.on_policy.preparation import Prepared, prepare
from learner.algorithms.on_policy.reward_scale import RewardScale, Scaled
from learner.algorithms.shared.advantage import Advantages, Unrolls
from learner.algorithms.shared.containment import contained, verdict
from learner.algorithms.shared.hardware import Hardware
from learner.algorithms.shared.learn_once import LearnsOnce, Own
from learner.algorithms.shared.loss import (
    Sloped,
    Surrogate,
    divergence,
    effective_sample_size,
    explained_variance,
    largest_ratio,
    standardise,
    value_loss,
)
from learner.algorithms.shared.rank_group import MinibatchSplit, RankRows
from learner.algorithms.shared.rows import Rows
from learner.algorithms.shared.schedule import ScheduleValues, decayed, factor, warmup
from learner.algorithms.shared.sequences import Sequences
from learner.algorithms.shared.steps import AllRankSteps, Steps
from learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from learner.batch import Batch
from penstock.policy.actor_critic import Outputs
from penstock.policy.layers import Measured, measure, thinned
from penstock.policy.networks import Inputs
from penstock.policy.policy import Policy

METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "gradient_norm",
    "kl_behaviour",
    "effective_sample_size",
    "max_ratio",
    "explained_variance",
    "mean_value",
    "learning_rate",
    "entropy_coefficient",
)
"""`kl_behaviour` is KL(μ‖π_θ) in nats; it, `effective_sample_size` and `max_ratio` (π_θ/μ) are of the last
epoch, `entropy` (nats) and `explained_variance` of the batch's start, losses and `gradient_norm` means
over gradient steps. All of them are of the rows of all ranks."""

_JUDGED = ("policy_loss", "value_loss", "entropy", "gradient_norm")
"""Metrics that must be finite for an update to be kept, beside parameters, moments and statistics."""

_SUMMED = ("policy_loss", "value_loss", "entropy", "optimiser")
"""Of which every rank holds a share. The last is no metric: not finite on one rank, it is so on all."""

_RANK_STRIDE = 0x9E3779B1
"""Between the seeds of ranks: no gradient step of one has the seed of another's, also in 32 bits, to which a
generator on the CPU cuts them."""

_GOING_ON = ("generator/", "rewards/slots", "rewards/returns")


@dataclass(slots=True)
class GradientRecord:
    """What the gradient steps leave behind, on the device. `rows`, `split`: of the last epoch, as permuted.

    Losses are this rank's shares of the means over all ranks. used: steps of all ranks that gradient steps
    were of. numbers: more metrics.
    """

    policy_losses: list[Tensor] = field(default_factory=list)
    value_losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    log_prob: list[Tensor] = field(default_factory=list)
    rows: Rows | Sequences | None = None
    split: MinibatchSplit | None = None
    used: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


class OnPolicy(LearnsOnce[Own]):
    """An `Algorithm`. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(self, policy: Policy, section: Own, *, seed: int, hardware: Hardware | None = None) -> None:
        hardware = hardware or Hardware()
        super().__init__(section)
        self.policy = policy
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser, hardware)
        self._group = hardware.group
        self._seed = seed
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
    def _policy_loss(self, log_prob: Tensor, rows: Rows, scheduled: ScheduleValues) -> Sloped:
        """Of a gradient step. log_prob: log π_θ, [m], without gradient."""

    def _value_loss(self, value: Tensor, rows: Rows) -> Sloped:
        """Of a gradient step. value: [m], without gradient."""
        return value_loss(value, rows.target, rows.old_value, None, rows.total)

    def _train(self, batch: Batch, prepared: Prepared, scheduled: ScheduleValues) -> GradientRecord:
        """One gradient step on the whole batch."""
        rank_rows = prepared.rank_rows
        split = rank_rows.split(torch.arange(rank_rows.total), 1)
        record = GradientRecord(rows=prepared.rows, split=split)
        record.log_prob = [
            self._gradient_step(rows, scheduled, record) for rows in prepared.rows.cut(split.sizes)
        ]
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

    def _gradient_step(self, rows: Rows, scheduled: ScheduleValues, record: GradientRecord) -> Tensor:
        """One minibatch; returns log-probabilities [m] of this rank's rows from before the step."""
        section = self.section
        outputs = self._network.outputs(rows.inputs)
        # Without a graph where no gradient goes back through it.
        parameters = outputs.parameters.detach() if self.policy.has_slope else outputs.parameters
        log_prob = self.policy.joint_log_prob(parameters, rows.action)
        before = log_prob.detach()
        surrogate = self._policy_loss(before, rows, scheduled)
        if self.policy.dropouts:
            # The ratio is that of the policy which acts; only its slope goes through a thinned network.
            outputs = self._thinned(rows.inputs)
        error = self._value_loss(outputs.value.detach(), rows)
        by_value = error.slope.mul_(section.value_coefficient)
        by_entropy = -scheduled.entropy_coefficient / rows.total
        slopes = surrogate.slope, by_value, by_entropy
        known = None if self.policy.dropouts else log_prob
        gradient = self._group.sum_(self._gradient(outputs, rows.action, known, slopes))
        record.norms.append(
            self._optimiser.step(gradient, scheduled.learning_rate, section.max_gradient_norm)
        )
        record.policy_losses.append(surrogate.loss)
        record.value_losses.append(error.loss)
        record.used += rows.total
        return before

    def _gradient(
        self,
        outputs: Outputs,
        action: Mapping[str, Tensor],
        log_prob: Tensor | None,
        slopes: tuple[Tensor, Tensor, float],
    ) -> Tensor:
        """Return the gradients of all parameters, flat.

        log_prob: [m] with its graph, where it is there already. slopes: by it, by the value, by each entropy.
        """
        by_log_prob, by_value, by_entropy = slopes
        if self.policy.has_slope:
            parameters = outputs.parameters.detach()
            return self._network.gradient_at(
                self.policy.slope(parameters, action, by_log_prob, by_entropy), by_value
            )
        if log_prob is None:
            log_prob = self.policy.joint_log_prob(outputs.parameters, action)
        built, by_built = [log_prob, outputs.value], [by_log_prob, by_value]
        if by_entropy:
            entropy = self.policy.joint_entropy(outputs.parameters)
            built.append(entropy)
            by_built.append(torch.full_like(entropy, by_entropy))
        return self._network.gradient(built, by_built)

    def _thinned(self, inputs: Inputs) -> Outputs:
        """Return outputs with features dropped.

        Which ones are dropped follows from the count of gradient steps, so a resume repeats them, and from
        the rank: rows of several ranks would otherwise lose the same features.
        """
        seed = self._seed + self._optimiser.steps + self._group.rank * _RANK_STRIDE
        device = inputs.vector.device
        with thinned(self.policy.dropouts, seed, device):
            return self._network.outputs(inputs)

    def _measure(
        self,
        batch: Batch,
        prepared: Prepared,
        activations: Measured | None,
        record: GradientRecord,
        scheduled: ScheduleValues,
    ) -> tuple[str, dict[str, float]]:
        """The one read of the device: why the update is not kept, on any rank, or "", and the metrics."""
        assert record.rows is not None, "an update has at least one epoch"
        assert record.split is not None, "an update has at least one epoch"
        log_prob = record.split.gather(torch.cat(record.log_prob))
        rows = AllRankSteps(record.split.gather(record.rows.columns))
        summed = dict(zip(_SUMMED, self._group.sum_(self._summed(prepared, record)), strict=True))
        checks = {"optimiser": summed.pop("optimiser")}
        tensors = {
            **summed,
            "gradient_norm": torch.stack(record.norms).mean(),
            "kl_behaviour": divergence(rows.behaviour, log_prob),
            "effective_sample_size": effective_sample_size(rows.behaviour, log_prob),
            "max_ratio": largest_ratio(rows.behaviour, log_prob),
            "explained_variance": explained_variance(rows.old_value, rows.target),
            "mean_value": rows.old_value.mean(),
            **self._watch(batch, rows, log_prob, scheduled),
        }
        if prepared.observed is not None:
            checks["observed"] = prepared.observed.checksum().to(log_prob.dtype)
        if activations is not None:
            checks["activations"] = activations.checksum().to(log_prob.dtype)
        numbers = torch.stack([*tensors.values(), *checks.values(), self._farthest(prepared)]).tolist()
        metrics = dict(zip(tensors, numbers, strict=False))
        judged = [*(metrics[name] for name in _JUDGED), *numbers[len(tensors) :]]
        finite = {name: number for name, number in metrics.items() if math.isfinite(number)}
        reason = verdict(judged, self.section.max_log_ratio)
        return reason, {**finite, **scheduled.metrics(), **record.numbers}

    def _farthest(self, prepared: Prepared) -> Tensor:
        """Return the largest |log π/μ| of all ranks' rows, a scalar."""
        own = (prepared.rows.proximal - prepared.rows.behaviour).abs()
        return prepared.rank_rows.gather(own).max()

    def _summed(self, prepared: Prepared, record: GradientRecord) -> Tensor:
        """This rank's share of `_SUMMED`, [4]."""
        losses = [torch.stack(record.policy_losses).mean(), torch.stack(record.value_losses).mean()]
        return torch.stack([*losses, prepared.entropy, self._optimiser.checksum()])

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
