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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.algorithm_sections import OnPolicySection
from penstock.learner.algorithms.algorithm import AlgorithmState, Update
from penstock.learner.algorithms.fast.network import Network, network_of
from penstock.learner.algorithms.fast.optimiser import FlatAdam
from penstock.learner.algorithms.on_policy.reward_scale import RewardScale, Scaled
from penstock.learner.algorithms.shared.advantage import Advantages, Unrolls
from penstock.learner.algorithms.shared.containment import (
    contained,
    observed_by,
    see,
    sequences_of,
    unrolls_of,
    values_of,
    verdict,
)
from penstock.learner.algorithms.shared.learn_once import LearnsOnce, Own
from penstock.learner.algorithms.shared.loss import (
    Sloped,
    Surrogate,
    divergence,
    effective_sample_size,
    explained_variance,
    largest_ratio,
    standardise,
    value_loss,
)
from penstock.learner.algorithms.shared.rank_group import MinibatchSplit, RankGroup, RankRows
from penstock.learner.algorithms.shared.rows import AllRankSteps, Rows, Sequences, Steps
from penstock.learner.algorithms.shared.schedule import Hardware, ScheduleValues, decayed, factor, warmup
from penstock.learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from penstock.learner.batch import Batch
from penstock.policy.distributions import Numbers
from penstock.policy.memory import SeenTrajectory
from penstock.policy.networks import Inputs, Measured, measure, thinned
from penstock.policy.normaliser import Moments
from penstock.policy.policy import Policy

# ---- One minibatch: forward pass, both losses, gradient, optimiser.

PolicyLoss = Callable[[Numbers, Rows, ScheduleValues], Sloped]
"""Loss of the policy and its slope, given log π_θ of the rows, [m], without gradient."""
ValueLoss = Callable[[Numbers, Rows], Sloped]
"""Loss of the critic and its slope, given the values of the rows, [m], without gradient."""
_RANK_STRIDE: Final = 0x9E3779B1
"""Between the seeds of ranks: no gradient step of one has the seed of another's, also in 32 bits, to which a
generator on the CPU cuts them."""


@dataclass(slots=True)
class GradientRecord:
    """What the gradient steps leave behind, on the device. `rows`, `split`: of the last epoch, as permuted.

    Losses are scalars, this rank's shares of the means over all ranks. used: steps of all ranks that gradient
    steps were of. numbers: more metrics.
    """

    policy_losses: list[Numbers] = field(default_factory=list)
    value_losses: list[Numbers] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    log_prob: list[Tensor] = field(default_factory=list)
    rows: Rows | Sequences | None = None
    split: MinibatchSplit | None = None
    used: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


class _Made(NamedTuple):
    """A minibatch: log π_θ of its rows, [m], flat gradient of this rank's share, and both losses."""

    log_prob: Numbers
    gradient: Tensor
    policy_loss: Numbers
    value_loss: Numbers


class GradientSteps:
    """Makes gradient steps on minibatches of one rank's rows.

    Args:
        policy, network, optimiser: what is trained, and how its outputs and gradients are computed.
        section: coefficients and the bound of the gradient's norm.
        group: the ranks, over which gradients are added up.
        seed: of the features that dropout leaves out.
        policy_loss, value_loss: the losses of a minibatch.
    """

    def __init__(
        self,
        policy: Policy,
        network: Network,
        optimiser: FlatAdam,
        section: OnPolicySection,
        group: RankGroup,
        *,
        seed: int,
        policy_loss: PolicyLoss,
        value_loss: ValueLoss,
    ) -> None:
        self._policy = policy
        self._network = network
        self._optimiser = optimiser
        self._section = section
        self._group = group
        self._seed = seed
        self._policy_loss = policy_loss
        self._value_loss = value_loss

    def each(
        self,
        rows: Rows | Sequences,
        sizes: Sequence[tuple[int, int]],
        scheduled: ScheduleValues,
        record: GradientRecord,
    ) -> list[Tensor]:
        """Make a gradient step on each minibatch of the rows in turn.

        Returns log π_θ of this rank's rows of each from before its step, [m].

        sizes: as of `MinibatchSplit`. scheduled: the numbers of this update. record: what the steps add to.
        """
        if self._policy.has_slope and self._network.in_arrays and isinstance(rows, Rows):
            rows = rows.in_arrays()
        # What is not finite is found at the end of the update.
        with np.errstate(all="ignore"):
            return [self.step(part, scheduled, record) for part in rows.cut(sizes)]

    def step(self, rows: Rows, scheduled: ScheduleValues, record: GradientRecord) -> Tensor:
        """Make one gradient step of `each`. rows: of a minibatch, in arrays where the network computes so."""
        made = (self._in_closed_form if self._policy.has_slope else self._by_autograd)(rows, scheduled)
        gradient = self._group.sum_(made.gradient)
        max_norm = self._section.max_gradient_norm
        record.norms.append(self._optimiser.step(gradient, scheduled.learning_rate, max_norm))
        record.policy_losses.append(made.policy_loss)
        record.value_losses.append(made.value_loss)
        record.used += rows.total
        return torch.as_tensor(made.log_prob)

    def _in_closed_form(self, rows: Rows, scheduled: ScheduleValues) -> _Made:
        parameters, value = self._network.plain_outputs(rows.inputs)
        form = self._policy.closed_form(parameters, rows.action)
        log_prob = form.log_prob
        surrogate = self._policy_loss(log_prob, rows, scheduled)
        if self._policy.dropouts:
            with self._thinned(rows.inputs):
                parameters, value = self._network.plain_outputs(rows.inputs)
            form = self._policy.closed_form(parameters, rows.action)
        error = self._value_loss(value, rows)
        by_parameters, by_heads = form.slopes(surrogate.slope, -scheduled.entropy_coefficient / rows.total)
        by_value = error.slope * self._section.value_coefficient
        gradient = self._network.gradient_at(by_parameters, by_value, by_heads)
        return _Made(log_prob, gradient, surrogate.loss, error.loss)

    def _by_autograd(self, rows: Rows, scheduled: ScheduleValues) -> _Made:
        outputs = self._network.outputs(rows.inputs)
        log_prob = self._policy.joint_log_prob(outputs.parameters, rows.action)
        before = log_prob.detach()
        surrogate = self._policy_loss(before, rows, scheduled)
        if self._policy.dropouts:
            with self._thinned(rows.inputs):
                outputs = self._network.outputs(rows.inputs)
            log_prob = self._policy.joint_log_prob(outputs.parameters, rows.action)
        error = self._value_loss(outputs.value.detach(), rows)
        built = [log_prob, outputs.value]
        slopes = [surrogate.slope, error.slope * self._section.value_coefficient]
        if scheduled.entropy_coefficient:
            entropy = self._policy.joint_entropy(outputs.parameters)
            built.append(entropy)
            slopes.append(torch.full_like(entropy, -scheduled.entropy_coefficient / rows.total))
        return _Made(before, self._network.gradient(built, slopes), surrogate.loss, error.loss)

    def _thinned(self, inputs: Inputs) -> AbstractContextManager[None]:
        """Drop features in the forward passes inside the block: the ratio is that of the policy which acts.

        Only its slope goes through a thinned network. Which features are dropped follows from the count of
        gradient steps, so a resume repeats them, and from the rank: rows of several ranks would otherwise
        lose the same features.
        """
        seed = self._seed + self._optimiser.steps + self._group.rank * _RANK_STRIDE
        return thinned(self._policy.dropouts, seed, inputs.vector.device)


# ---- What is computed once per batch, before its epochs: values, π_prox, advantages, the fixed surrogate.

Estimate = Callable[[Unrolls, Tensor], Advantages]
"""Advantages and targets of unrolls, given log π/μ of each step, [T, B]."""
Weigh = Callable[[Tensor, Tensor, Tensor], Surrogate]
"""What stays fixed over a batch, given log μ, log π_prox and advantages, [n] each."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an update prepares before its epochs.

    rows: those of this rank that are trained.   steps: of all ranks.
    rank_rows: of what an epoch permutes, `rows`.
    index: int64, which of all T·B steps they are, or of B columns those of `Sequences`; None: all.
    entropy: scalar, their share of the mean of π_prox.   observed: by all ranks, for the normaliser, if any.
    """

    rows: Rows | Sequences
    steps: int
    rank_rows: RankRows
    index: Tensor | None
    entropy: Tensor
    observed: Moments | None

    def each(self, of_columns: Tensor, steps: int) -> Tensor:
        """A number of every column, [B], as one of everything that an epoch permutes."""
        every = of_columns if isinstance(self.rows, Sequences) else of_columns.repeat(steps)
        return every if self.index is None else every[self.index]


def prepare(
    policy: Policy,
    network: Network,
    batch: Batch,
    rewards: Tensor,
    group: RankGroup,
    rank_rows: RankRows,
    estimate: Estimate,
    weigh: Weigh,
) -> Prepared:
    """Prepare a rank's share of a batch. rewards: [T, B], scaled where that is asked for.

    rank_rows: by `group`, of the steps that are trained, at least one. There are no rows where none of them
    lies behind the burn-in.
    """
    trained = rank_rows.steps
    steps, columns = batch.valid.shape
    count = steps * columns
    look = see(policy, batch)
    outputs = network.outputs(look.inputs)
    action = {path: values.flatten(0, 1) for path, values in batch.action.items()}
    parameters = outputs.parameters[:count]
    proximal = _log_prob(policy, network, parameters, action)
    behaviour = batch.log_prob.flatten().to(proximal.dtype)
    values, finals = values_of(policy, look, outputs.value, (steps, columns))
    log_ratios = (proximal - behaviour).view(steps, columns)
    unrolls = unrolls_of(batch, rewards.to(values.dtype), values, finals)
    estimated = estimate(unrolls, log_ratios)
    fixed = [estimated.advantage, estimated.target, values[:-1]]
    flat = torch.stack([behaviour, proximal, *(tensor.flatten() for tensor in fixed)])
    entropy = policy.joint_entropy(parameters)
    observed = observed_by(policy, look, batch, group)
    if look.starts is not None:
        return _in_sequences(policy, group, trained, look, weigh, (action, flat, entropy, observed))
    inputs, index = look.inputs.narrow(0, count), None
    if not bool(trained.all()):
        index = trained.flatten().nonzero().squeeze(1)
        inputs, flat, entropy = inputs.select(index), flat[:, index], entropy[index]
        action = {path: rows[index] for path, rows in action.items()}
    # Advantages are standardised over the rows of all ranks.
    rows = Rows(inputs, action, rank_rows.own(_columns(weigh, *rank_rows.gather(flat).unbind(0))))
    mean = entropy.sum().div_(rank_rows.total)
    return Prepared(
        rows=rows, steps=rank_rows.total, rank_rows=rank_rows, index=index, entropy=mean, observed=observed
    )


def _log_prob(policy: Policy, network: Network, parameters: Numbers, action: dict[str, Numbers]) -> Tensor:
    """Log π [n] as gradient steps compute it: the ratio of fresh experience is 1 to the last bit."""
    if not policy.has_slope:
        return policy.joint_log_prob(parameters, action)
    if network.in_arrays:
        action = {path: values.numpy() for path, values in action.items()}
        parameters = parameters.numpy()
    with np.errstate(all="ignore"):
        return torch.as_tensor(policy.closed_form(parameters, action).log_prob)


def _in_sequences(
    policy: Policy,
    group: RankGroup,
    trained: Tensor,
    look: SeenTrajectory,
    weigh: Weigh,
    of_rows: tuple[dict[str, Tensor], Tensor, Tensor, Moments | None],
) -> Prepared:
    """Columns that have a trained step behind the burn-in; of a group of one rank."""
    action, flat, entropy, observed = of_rows
    sequences, index = sequences_of(
        policy, trained, look, action, lambda index: _columns(weigh, *flat[:, index].unbind(0))
    )
    used = torch.from_numpy(sequences.counts.nonzero()[0])
    return Prepared(
        rows=sequences.select(used),
        steps=sequences.steps,
        rank_rows=group.rows_of(torch.from_numpy(sequences.counts > 0).unsqueeze(0)),
        index=used.to(trained.device),
        entropy=entropy[index].mean(),
        observed=observed,
    )


def _columns(
    weigh: Weigh, behaviour: Tensor, proximal: Tensor, advantage: Tensor, target: Tensor, value: Tensor
) -> Tensor:
    surrogate = weigh(behaviour, proximal, advantage)
    return torch.stack([surrogate.anchor, surrogate.weighted_advantage, target, value, behaviour, proximal])


# ---- The one read of the device at the end of an update: its metrics, and whether it may be kept.

METRICS: Final = (
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

_JUDGED: Final = ("policy_loss", "value_loss", "entropy", "gradient_norm")
"""Metrics that must be finite for an update to be kept, beside parameters, moments and statistics."""

_SUMMED: Final = ("policy_loss", "value_loss", "entropy", "optimiser")
"""Of which every rank holds a share. The last is no metric: not finite on one rank, it is so on all."""


def last_epoch(record: GradientRecord) -> tuple[AllRankSteps, Tensor]:
    """Return the steps of the last epoch and log π_θ of each, [n], of all ranks."""
    assert record.rows is not None, "an update has at least one epoch"
    assert record.split is not None, "an update has at least one epoch"
    log_prob = record.split.gather(torch.cat(record.log_prob))
    return AllRankSteps(record.split.gather(record.rows.columns)), log_prob


def measure_update(
    prepared: Prepared,
    record: GradientRecord,
    group: RankGroup,
    steps: tuple[AllRankSteps, Tensor],
    *,
    more: Mapping[str, Tensor],
    optimiser: Tensor,
    activations: Measured | None,
    max_log_ratio: float,
) -> tuple[str, dict[str, float]]:
    """Return why the update is not to be kept, on any rank, or "", and the metrics that are finite.

    Args:
        prepared: what was computed before the gradient steps.
        record: what the gradient steps left behind.
        group: the ranks, over which losses are added up.
        steps: those of the last epoch, of `last_epoch`.
        more: scalars on the device that the algorithm measures besides.
        optimiser: a scalar that is finite where parameters and moments are.
        activations: statistics of layers under the new weights, where there are some.
        max_log_ratio: the largest |log π/μ| that is plausible.
    """
    rows, log_prob = steps
    summed = dict(zip(_SUMMED, group.sum_(_own_shares(prepared, record, optimiser)), strict=True))
    checks = {"optimiser": summed.pop("optimiser")}
    tensors = {
        **summed,
        "gradient_norm": torch.stack(record.norms).mean(),
        "kl_behaviour": divergence(rows.behaviour, log_prob),
        "effective_sample_size": effective_sample_size(rows.behaviour, log_prob),
        "max_ratio": largest_ratio(rows.behaviour, log_prob),
        "explained_variance": explained_variance(rows.old_value, rows.target),
        "mean_value": rows.old_value.mean(),
        **more,
    }
    if prepared.observed is not None:
        checks["observed"] = prepared.observed.checksum().to(log_prob.dtype)
    if activations is not None:
        checks["activations"] = activations.checksum().to(log_prob.dtype)
    numbers = torch.stack([*tensors.values(), *checks.values(), _largest_log_ratio(prepared)]).tolist()
    metrics = dict(zip(tensors, numbers, strict=False))
    judged = [*(metrics[name] for name in _JUDGED), *numbers[len(tensors) :]]
    finite = {name: number for name, number in metrics.items() if math.isfinite(number)}
    return verdict(judged, max_log_ratio), finite


def _largest_log_ratio(prepared: Prepared) -> Tensor:
    """Return the largest |log π/μ| of all ranks' rows, a scalar."""
    own = (prepared.rows.proximal - prepared.rows.behaviour).abs()
    return prepared.rank_rows.gather(own).max()


def _own_shares(prepared: Prepared, record: GradientRecord, optimiser: Tensor) -> Tensor:
    """Return this rank's share of `_SUMMED`, [4]."""
    losses = [_mean(record.policy_losses), _mean(record.value_losses)]
    return torch.stack([*(loss.to(optimiser) for loss in losses), prepared.entropy, optimiser])


def _mean(scalars: Sequence[Numbers]) -> Tensor:
    """Return the mean of scalars that are all tensors or all numpy's."""
    of_tensors = isinstance(scalars[0], Tensor)
    return (torch.stack(list(scalars)) if of_tensors else torch.tensor(scalars)).mean()


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
