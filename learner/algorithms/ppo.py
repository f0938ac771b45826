"""Proximal policy optimisation on stale experience, and its relatives IMPALA and REINFORCE.

PPO is decoupled by default, coupled on request. One update computes π_prox, values and advantages once, then
runs epochs of minibatches, and reads the device once at the end (per epoch only when a target KL is set):

    [epoch: permute → minibatch steps → KL]

A step is part of one batch only, so it is used at most `epochs` times; steps that lag behind may be given
fewer passes (`lagging_epochs`) or none (`mask_after`).
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.settings import ImpalaSection, PPOSection, ReinforceSection
from penstock.learner.algorithms import losses
from penstock.learner.algorithms.algorithm import (
    EMPTY,
    AlgorithmState,
    LearnsOnce,
    Section,
    Trained,
    Update,
    contained,
    under,
    verdict,
)
from penstock.learner.algorithms.gradient import (
    PLAIN,
    DenseNetwork,
    FlatAdam,
    Hardware,
    MinibatchGradient,
    network_of,
)
from penstock.learner.algorithms.losses import Advantages, Objective, Surrogate, Unrolls
from penstock.learner.algorithms.rows import (
    RankGroup,
    RankRows,
    Rows,
    Sequences,
    Statistics,
    Steps,
    observed_by,
    see,
    sequences_of,
    unrolls_of,
    values_of,
)
from penstock.learner.batch import Batch
from penstock.policy.actor_critic import SeenTrajectory
from penstock.policy.networks import Inputs, Moments, combine, measure, moments, thinned
from penstock.policy.policy import Policy

# ---- What PPO, IMPALA and REINFORCE have in common: the frame of an update, gradient steps, metrics, state.
#
#    prepare (values, log π, advantages, surrogate) → epochs of gradient steps → measure → finite?
#                                          commit: merge the statistics  ←  yes ┘   └ no: everything back
#
# An update reads the device once, at its end. Everything that is defined over the whole batch or minibatch
# goes through `RankGroup`, so that several ranks make the update that one would make.

SHARED_METRICS: Final = (
    "policy_loss", "value_loss", "entropy", "gradient_norm", "kl_behaviour", "effective_sample_size",
    "max_ratio", "explained_variance", "mean_value", "learning_rate", "entropy_coefficient",
)  # fmt: skip
"""`kl_behaviour` is KL(μ‖π_θ) in nats; it, `effective_sample_size` and `max_ratio` (π_θ/μ) are of the last
epoch, `entropy` (nats) and `explained_variance` of the batch's start, losses and `gradient_norm` means
over gradient steps. All of them are of the rows of all ranks."""

_JUDGED: Final = ("policy_loss", "value_loss", "entropy", "gradient_norm")
"""Metrics that must be finite for an update to be kept, as parameters, moments and statistics must be."""
_SUMMED: Final = ("policy_loss", "value_loss", "entropy", "optimiser")
"""Numbers of which every rank holds a share. The last is no metric: its sum is finite if all shares are."""
_RANK_STRIDE: Final = 0x9E3779B1
"""Distance between the seeds of ranks: no two gradient steps share a seed, not even in the 32 bits that a
generator on the CPU uses."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an update computes before its epochs, none of which changes it.

    rows: this rank's rows that are trained.   steps: of all ranks.
    rank_rows: division of `rows`, which an epoch permutes, among the ranks.
    index: int64, their place among T·B steps, or that of the columns of `Sequences` among B; None: all.
    entropy: scalar, their share of the mean entropy of π_prox.
    observed: moments of the observations of all ranks, where there is a normaliser.
    """

    rows: Rows | Sequences
    steps: int
    rank_rows: RankRows
    index: Tensor | None
    entropy: Tensor
    observed: Moments | None

    def each(self, of_columns: Tensor, steps: int) -> Tensor:
        """Return a number of each column, [B], for each element that an epoch permutes."""
        every = of_columns if isinstance(self.rows, Sequences) else of_columns.repeat(steps)
        return every if self.index is None else every[self.index]


@dataclass(slots=True)
class GradientRecord:
    """Results of the gradient steps of an update, on the device.

    rows, rank_rows: of the last epoch, as permuted.   log_prob: of these, minibatch by minibatch.
    losses: this rank's shares of the means over all ranks, [2] each.   used: steps of all ranks, counted once
    for each gradient step.   numbers: more metrics.
    """

    rows: Rows | Sequences
    rank_rows: RankRows
    log_prob: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    used: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


class OnPolicy(Trained, LearnsOnce[Section]):
    """An `Algorithm` that makes its gradient steps on each batch while it is fresh.

    A subclass defines the advantages (`_advantages`), their weights (`_surrogate`), the objective of gradient
    steps (`_schedule`) and the gradient steps (`_train`).

    It owns the policy's weights: do not convert or move the policy afterwards.

    Args:
        policy: what is trained, on its device.
        section: the algorithm's settings.
        seed: of permutations and of the features that dropout leaves out.
        hardware: ranks, precision and compilation.
    """

    policy: Policy

    def __init__(self, policy: Policy, section: Section, *, seed: int, hardware: Hardware = PLAIN) -> None:
        LearnsOnce.__init__(self, section)
        self.policy = policy
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser, hardware)
        self._group = hardware.group
        self._seed = seed
        self._permutations = torch.Generator().manual_seed(seed)
        self.modules, self.optimisers = {"policy": policy}, {"": self._optimiser}
        self.generators = {"permutations": self._permutations}
        self._reward_scale = RewardScale(section.discount, self._group) if section.scale_rewards else None

    # ---- what a subclass defines

    @abstractmethod
    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        """Estimate once per batch. log_ratios: log π/μ with π at the start of the batch, [T, B]."""

    @abstractmethod
    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        """Weigh once per batch. log μ, log π at the start of the batch, advantages: [n]."""

    def _train(self, batch: Batch, prepared: Prepared, objective: Objective) -> GradientRecord:
        """Make one gradient step on the whole batch."""
        record = GradientRecord(prepared.rows, prepared.rank_rows)
        _, sizes = prepared.rank_rows.split(torch.arange(prepared.rank_rows.total), 1)
        self._gradient_steps(sizes, objective, record)
        return record

    def _trained(self, batch: Batch) -> Tensor:
        """Return which steps enter the losses, bool [T, B]."""
        return batch.valid

    def _schedule(self, progress: float) -> Objective:
        """Return the objective of this update: the plain policy gradient, unless a subclass extends it."""
        section, updates = self.section, self._updates
        share = losses.factor(section.learning_rate_schedule, progress)
        return Objective(
            learning_rate=section.learning_rate * share * losses.warmup(updates, section.warmup_updates),
            entropy_coefficient=losses.decayed(
                section.entropy_coefficient, section.entropy_decay, section.entropy_floor, updates
            ),
            value_coefficient=section.value_coefficient,
        )

    def _watch(self, batch: Batch, rows: Steps, log_prob: Tensor, objective: Objective) -> dict[str, Tensor]:
        """Return more metrics of the last epoch. batch: this rank's; rows, log_prob: of all ranks."""
        return {}

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        return contained(partial(self._attempt, progress=progress), batch, self._group)

    def _attempt(self, batch: Batch, *, is_rehearsal: bool, progress: float) -> Update:
        rank_rows = self._group.rows_of(self._trained(batch))
        if not rank_rows.total:
            return Update(applied=False, reason=EMPTY)
        objective = self._schedule(progress)
        with torch.no_grad():
            scaled = self._reward_scale.scale(batch) if self._reward_scale is not None else None
            prepared = self.prepare(batch, scaled.rewards if scaled else batch.reward, rank_rows)
        if not prepared.rank_rows.total:
            return Update(applied=False, reason=EMPTY)
        with self.undoing() as trial:
            record = self._train(batch, prepared, objective)
            activations = measure(
                self.policy, lambda: self.policy.bodies(prepared.rows.alone()), self._group.moments
            )
            with torch.no_grad():
                statistics = Statistics(prepared.observed, activations)
                reason, metrics = self._measure(batch, prepared, statistics, record, objective)
            trial.is_kept = not reason and not is_rehearsal
            if trial.is_kept:
                self._commit(statistics, scaled, metrics)
        return Update(
            applied=not reason,
            reason=reason,
            steps=prepared.steps,
            gradient_steps=len(record.norms),
            metrics={} if reason else metrics,
        )

    # ---- before the epochs

    def prepare(self, batch: Batch, rewards: Tensor, rank_rows: RankRows) -> Prepared:
        """Compute what the epochs of a rank's share of a batch have in common; call it without gradients.

        rewards: [T, B], scaled if so set. rank_rows: of the steps that are trained, at least one. There are
        no rows where all of these lie in the burn-in.
        """
        policy, trained, (steps, columns) = self.policy, rank_rows.steps, batch.valid.shape
        count = steps * columns
        look = see(policy, batch)
        outputs = self._network.outputs(look.inputs)
        action = {path: values.flatten(0, 1) for path, values in batch.action.items()}
        parameters = outputs.parameters[:count]
        proximal = self._network.log_prob(parameters, action)
        behaviour = batch.log_prob.flatten().to(proximal.dtype)
        values, finals = values_of(policy, look, outputs.value, (steps, columns))
        unrolls = unrolls_of(batch, rewards.to(values.dtype), values, finals)
        estimated = self._advantages(unrolls, (proximal - behaviour).view(steps, columns))
        fixed = [estimated.advantage, estimated.target, values[:-1]]
        flat = torch.stack([behaviour, proximal, *(tensor.flatten() for tensor in fixed)])
        entropy = policy.joint_entropy(parameters)
        observed = observed_by(policy, look, batch, self._group)
        if look.starts is not None:
            return self._prepare_sequences(trained, look, (action, flat, entropy, observed))
        inputs, index = look.inputs.narrow(0, count), None
        if not bool(trained.all()):
            index = trained.flatten().nonzero().squeeze(1)
            inputs, flat, entropy = inputs.select(index), flat[:, index], entropy[index]
            action = {path: rows[index] for path, rows in action.items()}
        # Advantages are standardised over the rows of all ranks.
        rows = Rows(rank_rows.own(self._columns(rank_rows.gather(flat))), inputs, action)
        mean = entropy.sum().div_(rank_rows.total)
        return Prepared(rows, rank_rows.total, rank_rows, index, mean, observed)

    def _prepare_sequences(
        self,
        trained: Tensor,
        look: SeenTrajectory,
        of_rows: tuple[dict[str, Tensor], Tensor, Tensor, Moments | None],
    ) -> Prepared:
        """Prepare the columns with a trained step after the burn-in; the group has one rank."""
        action, flat, entropy, observed = of_rows
        sequences, index = sequences_of(
            self.policy, trained, look, action, lambda index: self._columns(flat[:, index])
        )
        used = torch.from_numpy(sequences.counts.nonzero()[0])
        return Prepared(
            rows=sequences.select(used),
            steps=sequences.steps,
            rank_rows=self._group.rows_of(torch.from_numpy(sequences.counts > 0).unsqueeze(0)),
            index=used.to(trained.device),
            entropy=entropy[index].mean(),
            observed=observed,
        )

    def _columns(self, flat: Tensor) -> Tensor:
        """Return the columns of `Steps`. flat: [5, n], log μ, log π_prox, advantage, target, value."""
        behaviour, proximal, advantage, target, value = flat.unbind(0)
        if self.section.normalise_advantages:
            advantage = losses.standardise(advantage)
        surrogate = self._surrogate(behaviour, proximal, advantage)
        return torch.stack(
            [surrogate.anchor, surrogate.weighted_advantage, target, value, behaviour, proximal]
        )

    # ---- gradient steps

    def _gradient_steps(
        self, sizes: Sequence[tuple[int, int]], objective: Objective, record: GradientRecord
    ) -> None:
        """Make one gradient step on each minibatch of `record.rows`. sizes: of `RankRows.split`."""
        record.log_prob, max_norm = [], self.section.max_gradient_norm
        for rows in record.rows.cut(sizes):
            made = self.gradient_of(rows, objective)
            gradient = self._group.sum_(made.gradient)
            record.norms.append(self._optimiser.step(gradient, objective.learning_rate, max_norm))
            record.losses.append(made.losses)
            record.used += rows.total
            record.log_prob.append(made.log_prob)

    def gradient_of(self, rows: Rows, objective: Objective) -> MinibatchGradient:
        """Return this rank's share of a minibatch's gradient, in closed form where the network has one."""
        network = self._network
        if isinstance(network, DenseNetwork) and network.is_closed:
            return network.gradient_of(rows, objective)
        outputs = network.outputs(rows.inputs)
        log_prob = whole = network.log_prob(outputs.parameters, rows.action)
        if self.policy.dropouts:
            with self._thinned(rows.inputs):
                outputs = network.outputs(rows.inputs)
            log_prob = network.log_prob(outputs.parameters, rows.action)
            # The ratio is that of the acting policy; only its gradient passes through the dropout.
            log_prob = log_prob + (whole - log_prob).detach()
        if objective.clip_range is None:
            surrogate = losses.policy_gradient(log_prob, rows.weighted_advantage, rows.total)
        else:
            surrogate = losses.policy_loss(
                log_prob,
                rows.anchor,
                rows.weighted_advantage,
                objective.clip_range,
                objective.dual_clip,
                rows.total,
            )
        error = losses.value_loss(
            outputs.value, rows.target, rows.old_value, objective.value_clip, rows.total
        )
        loss = surrogate + objective.value_coefficient * error
        if objective.entropy_coefficient:
            entropy = self.policy.joint_entropy(outputs.parameters).sum() / rows.total
            loss = loss - objective.entropy_coefficient * entropy
        parts = torch.stack([surrogate, error]).detach()
        return MinibatchGradient(log_prob.detach(), network.gradient(loss), parts)

    def _thinned(self, inputs: Inputs) -> AbstractContextManager[None]:
        """Drop features in the forward passes inside the block.

        The seed is made of the count of gradient steps, so that a resume drops the same, and of the rank, so
        that ranks drop different ones.
        """
        seed = self._seed + self._optimiser.steps + self._group.rank * _RANK_STRIDE
        return thinned(self.policy.dropouts, seed, inputs.vector.device)

    # ---- after them

    def _measure(
        self,
        batch: Batch,
        prepared: Prepared,
        statistics: Statistics,
        record: GradientRecord,
        objective: Objective,
    ) -> tuple[str, dict[str, float]]:
        """Return the reason for which no rank keeps the update, or "", and the metrics that are finite.

        This is the one read of the device. statistics: of layers, under the new weights.
        """
        rows = Steps(record.rank_rows.gather(record.rows.columns))
        log_prob = record.rank_rows.gather(torch.cat(record.log_prob))
        optimiser = self._optimiser.checksum()
        means = torch.stack(record.losses).mean(0).to(optimiser)
        shares = self._group.sum_(torch.stack([*means, prepared.entropy, optimiser]))
        summed = dict(zip(_SUMMED, shares, strict=True))
        log_ratio = prepared.rows.proximal - prepared.rows.behaviour
        largest = prepared.rank_rows.gather(log_ratio.abs()).max()
        checks = [summed.pop("optimiser"), *statistics.checks(), largest]
        tensors = {
            **summed,
            "gradient_norm": torch.stack(record.norms).mean(),
            "kl_behaviour": losses.divergence(rows.behaviour, log_prob),
            "effective_sample_size": losses.effective_sample_size(rows.behaviour, log_prob),
            "max_ratio": losses.largest_ratio(rows.behaviour, log_prob),
            "explained_variance": losses.explained_variance(rows.old_value, rows.target),
            "mean_value": rows.old_value.mean(),
            **self._watch(batch, rows, log_prob, objective),
        }
        numbers = torch.stack([*tensors.values(), *(one.to(log_prob.dtype) for one in checks)]).tolist()
        metrics = dict(zip(tensors, numbers, strict=False))
        judged = [*(metrics[name] for name in _JUDGED), *numbers[len(tensors) :]]
        finite = {name: number for name, number in metrics.items() if math.isfinite(number)}
        reason = verdict(judged, self.section.max_log_ratio)
        return reason, {**finite, **objective.metrics(), **record.numbers}

    def _commit(self, statistics: Statistics, scaled: "Scaled | None", metrics: Mapping[str, float]) -> None:
        statistics.merge(self.policy)
        if scaled is not None and self._reward_scale is not None:
            self._reward_scale.commit(scaled)
        self._updates += 1

    # ---- a checkpoint

    going_on = ("generator/", "rewards/slots", "rewards/returns")
    """A restore leaves the environments' returns so far as they are, and restores their scale."""

    def state(self) -> AlgorithmState:
        state = super().state()
        if self._reward_scale is None:
            return state
        rewards = {f"rewards/{name}": tensor for name, tensor in self._reward_scale.state().items()}
        return replace(state, tensors=state.tensors | rewards)

    def load(self, state: AlgorithmState) -> None:
        super().load(state)
        if self._reward_scale is not None:
            self._reward_scale.load(under(state.tensors, "rewards/"))


# ---- PPO and its relatives.

METRICS = (
    *SHARED_METRICS,
    "kl_proximal", "clip_fraction", "clip_range", "epochs", "sample_reuse", "masked_fraction",
)  # fmt: skip
"""`kl_proximal` is KL(π_prox‖π_θ) in nats; it and `clip_fraction` are of the last epoch. `sample_reuse`: mean
passes over a step. `masked_fraction`: share of the valid steps that were too old."""

_KL_TOLERANCE = 1.5


class PPO(OnPolicy[PPOSection]):
    """PPO (Schulman et al. 2017) with a decoupled objective (Hilton, Cobbe, Schulman 2021)."""

    needed = ("updates", "gradient_steps", "steered_rate")

    def __init__(self, policy: Policy, section: PPOSection, *, seed: int, hardware: Hardware = PLAIN) -> None:
        super().__init__(policy, section, seed=seed, hardware=hardware)
        self._steered_learning_rate = section.learning_rate

    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        section = self.section
        if section.advantage == "gae":
            return losses.gae(*unrolls, discount=section.discount, gae_lambda=section.gae_lambda)
        return _vtrace(section, unrolls, log_ratios)

    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        if self.section.objective == "coupled":
            return losses.coupled(behaviour, advantage)
        return losses.decoupled(behaviour, proximal, advantage, self.section.behaviour_weight_cap)

    # ---- the epochs

    def _train(self, batch: Batch, prepared: Prepared, objective: Objective) -> GradientRecord:
        rows, record = prepared.rows, GradientRecord(prepared.rows, prepared.rank_rows)
        passes, count = 0, self.minibatches(batch, prepared.steps)
        for epoch in range(self.section.epochs):
            if epoch == self.section.lagging_epochs:
                rows, rank_rows = self._fresh(batch, prepared)
                if not rank_rows.total:
                    break
                record.rank_rows = rank_rows
            order = torch.randperm(record.rank_rows.total, generator=self._permutations)
            index, sizes = record.rank_rows.split(order, count)
            record.rows = rows.select(index)
            self._gradient_steps(sizes, objective, record)
            passes += 1
            if self._moved_far(record):
                break
        record.numbers = {"epochs": float(passes), "sample_reuse": record.used / prepared.steps}
        return record

    def _moved_far(self, record: GradientRecord) -> bool:
        """Return whether KL(π_prox‖π_θ) over the last epoch exceeds its target; reads the device."""
        target = self.section.target_kl
        if target is None:
            return False
        both = torch.stack([record.rows.proximal, torch.cat(record.log_prob)])
        return bool(losses.divergence(*record.rank_rows.gather(both)) > _KL_TOLERANCE * target)

    # ---- steps that lag behind

    def _trained(self, batch: Batch) -> Tensor:
        """Return the valid steps that are not too old; the others still carry traces and bootstrap."""
        limit = self.section.mask_after
        return batch.valid if limit is None else batch.valid & (self._staleness(batch) <= limit)

    def _fresh(self, batch: Batch, prepared: Prepared) -> tuple[Rows | Sequences, RankRows]:
        fresh = self._staleness(batch) <= self.section.staleness
        rows = prepared.rows.select(prepared.each(fresh, len(batch.valid)).nonzero().squeeze(1).cpu())
        steps = prepared.rank_rows.steps
        return rows, self._group.rows_of(steps & fresh.to(steps.device))

    def _staleness(self, batch: Batch) -> Tensor:
        """Return how many updates each column lags behind, [B]."""
        return (self._updates - batch.update).abs()

    # ---- schedules and metrics

    def _schedule(self, progress: float) -> Objective:
        section, objective = self.section, super()._schedule(progress)
        learning_rate = objective.learning_rate
        if section.adaptive_kl is not None:
            learning_rate = self._steered_learning_rate * losses.warmup(self._updates, section.warmup_updates)
        return replace(
            objective,
            learning_rate=learning_rate,
            clip_range=section.clip_range * losses.factor(section.clip_schedule, progress),
            dual_clip=section.dual_clip,
            value_clip=section.value_clip,
        )

    def _watch(self, batch: Batch, rows: Steps, log_prob: Tensor, objective: Objective) -> dict[str, Tensor]:
        assert objective.clip_range is not None
        trained = self._group.sum_(torch.stack([self._trained(batch).sum(), batch.valid.sum()]))
        return {
            "kl_proximal": losses.divergence(rows.proximal, log_prob),
            "clip_fraction": losses.clip_fraction(log_prob, rows.anchor, objective.clip_range),
            "masked_fraction": 1.0 - trained[0] / trained[1],
        }

    def _commit(self, statistics: Statistics, scaled: "Scaled | None", metrics: Mapping[str, float]) -> None:
        section = self.section
        if section.adaptive_kl is not None and self._updates >= section.warmup_updates:
            self._steered_learning_rate = losses.steered(
                self._steered_learning_rate,
                metrics["kl_proximal"],
                section.adaptive_kl,
                section.learning_rate_range,
            )
        super()._commit(statistics, scaled, metrics)

    def state(self) -> AlgorithmState:
        state = super().state()
        return replace(state, numbers=state.numbers | {"steered_rate": self._steered_learning_rate})

    def load(self, state: AlgorithmState) -> None:
        super().load(state)
        self._steered_learning_rate = float(state.numbers["steered_rate"])


class Reinforce(OnPolicy[ReinforceSection]):
    """The plain policy gradient with a learned baseline (Williams 1992): one gradient step on each batch."""

    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        section = self.section
        # A_t = Σ (γλ)^k δ_{t+k} telescopes to G_t − V_t at λ = 1.
        gae_lambda = 1.0 if section.advantage == "monte-carlo" else section.gae_lambda
        return losses.gae(*unrolls, discount=section.discount, gae_lambda=gae_lambda)

    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        return losses.coupled(behaviour, advantage)


class Impala(OnPolicy[ImpalaSection]):
    """IMPALA (Espeholt et al. 2018): V-trace corrects for experience of older policies."""

    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        return _vtrace(self.section, unrolls, log_ratios)

    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        return losses.decoupled(behaviour, proximal, advantage, self.section.rho_clip)


def _vtrace(section: PPOSection | ImpalaSection, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
    return losses.vtrace(
        *unrolls,
        log_ratios,
        discount=section.discount,
        gae_lambda=section.gae_lambda,
        rho_clip=section.rho_clip,
        c_clip=section.c_clip,
    )


# ---- Scaled rewards.

CLIP = 10.0
"""Scaled rewards are clipped to ± this."""
_FLOOR = 1e-8
_MAX_SLOTS = 65_536

SlotKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Scaled rewards, [T, B], and the state after this batch, for `commit`."""

    rewards: Tensor
    returns: dict[SlotKey, float]
    moments: Moments


class RewardScale:
    """Divides rewards by the running standard deviation of the discounted return; stays in the learner.

    State: the moments of discounted returns, and the return so far of each environment (session, slot), which
    continues from one batch to the next. It is the same on every rank, because the next columns of an
    environment may come to another rank. Only `commit` changes it, so that an update can be undone.
    """

    def __init__(self, discount: float, group: RankGroup) -> None:
        self._discount, self._group = discount, group
        self._returns: dict[SlotKey, float] = {}
        zero = torch.zeros(1, dtype=torch.float64)
        self._moments = Moments(torch.zeros((), dtype=torch.float64), zero, zero)

    def scale(self, batch: Batch) -> Scaled:
        """Divide a batch's rewards by the deviation of all returns, its own included."""
        rewards = self._group.columns(batch.reward.double()).numpy()
        ended = self._group.columns(batch.terminated | batch.truncated).numpy()
        valid = self._group.columns(batch.valid).numpy()
        slots = self._group.columns(torch.tensor(batch.slots, dtype=torch.int64).reshape(-1, 2).t())
        keys = tuple((session, slot) for session, slot in slots.t().tolist())
        history, after = self._follow(rewards, ended, keys)
        seen = torch.from_numpy(history[valid]).unsqueeze(1)
        both = combine(self._moments, moments(seen)) if len(seen) else self._moments
        deviation = float((both.spread[0] / both.count.clamp(min=1.0) + _FLOOR).sqrt())
        return Scaled((batch.reward / deviation).clamp(-CLIP, CLIP), after, both)

    def commit(self, scaled: Scaled) -> None:
        self._moments = scaled.moments
        # Re-inserted keys move to the end, so that the oldest environments are the ones forgotten.
        for key, value in scaled.returns.items():
            self._returns.pop(key, None)
            self._returns[key] = value
        for key in list(self._returns)[: max(0, len(self._returns) - _MAX_SLOTS)]:
            del self._returns[key]

    def state(self) -> dict[str, Tensor]:
        return {
            "slots": torch.tensor(list(self._returns), dtype=torch.int64).reshape(-1, 2),
            "returns": torch.tensor(list(self._returns.values()), dtype=torch.float64),
            "count": self._moments.count.clone(),
            "mean": self._moments.mean.clone(),
            "spread": self._moments.spread.clone(),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise ValueError(f"rewards: {missing} missing; was the state saved with scale_rewards?")
        keys = [(int(session), int(slot)) for session, slot in state["slots"].tolist()]
        self._returns = dict(zip(keys, state["returns"].tolist(), strict=True))
        self._moments = Moments(state["count"].clone(), state["mean"].clone(), state["spread"].clone())

    def _follow(
        self, rewards: NDArray[np.float64], ended: NDArray[np.bool_], slots: tuple[SlotKey, ...]
    ) -> tuple[NDArray[np.float64], dict[SlotKey, float]]:
        """Return the discounted return after each step, [T, B], and that of each environment at the end."""
        history = np.zeros_like(rewards)
        after: dict[SlotKey, float] = {}
        for columns in _waves(slots):
            keys = [slots[column] for column in columns]
            current = np.array([after.get(key, self._returns.get(key, 0.0)) for key in keys])
            for t in range(len(rewards)):
                current = self._discount * current + rewards[t, columns]
                history[t, columns] = current
                current = np.where(ended[t, columns], 0.0, current)
            after.update(zip(keys, current.tolist(), strict=True))
        return history, after


def _waves(slots: tuple[SlotKey, ...]) -> list[list[int]]:
    """Return groups of columns without a repeated environment; its later columns come in later groups."""
    groups: list[list[int]] = []
    met: dict[SlotKey, int] = {}
    for column, key in enumerate(slots):
        turn = met.get(key, 0)
        met[key] = turn + 1
        if turn == len(groups):
            groups.append([])
        groups[turn].append(column)
    return groups
