"""Proximal policy optimisation on stale experience: decoupled by default, coupled on request.

One update computes π_prox, values and advantages once, then runs epochs of minibatches, and reads the
device once at the end (per epoch only when a target KL is set):

    [epoch: permute → minibatch steps → KL]

A step is part of one batch only, so it is used at most `epochs` times; steps that lag behind may be given
fewer passes (`lagging_epochs`) or none (`mask_after`).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from penstock.config.settings import ImpalaSection, PPOSection, ReinforceSection
from penstock.learner.algorithms import losses, on_policy
from penstock.learner.algorithms.algorithm import AlgorithmState, Hardware
from penstock.learner.algorithms.losses import Advantages, Objective, Surrogate, Unrolls
from penstock.learner.algorithms.on_policy import GradientRecord, OnPolicy, Prepared, Scaled
from penstock.learner.algorithms.rows import Rows, Sequences, Statistics, Steps
from penstock.learner.batch import Batch
from penstock.learner.ranks.group import RankRows
from penstock.policy.policy import Policy

METRICS = (
    *on_policy.METRICS,
    "kl_proximal", "clip_fraction", "clip_range", "epochs", "sample_reuse", "masked_fraction",
)  # fmt: skip
"""Beside those of every `OnPolicy`: `kl_proximal` is KL(π_prox‖π_θ) in nats; it and `clip_fraction` are of
the last epoch. `sample_reuse`: passes over a step, on average over the batch. `masked_fraction`: share of the
valid steps that were too old."""

_KL_TOLERANCE = 1.5


class PPO(OnPolicy[PPOSection]):
    """PPO (Schulman et al. 2017) with a decoupled objective (Hilton, Cobbe, Schulman 2021)."""

    def __init__(
        self, policy: Policy, section: PPOSection, *, seed: int, hardware: Hardware | None = None
    ) -> None:
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
        """KL(π_prox‖π_θ) over the epoch just made exceeds its target; reads the device."""
        target = self.section.target_kl
        if target is None:
            return False
        both = torch.stack([record.rows.proximal, torch.cat(record.log_prob)])
        return bool(losses.divergence(*record.rank_rows.gather(both)) > _KL_TOLERANCE * target)

    # ---- steps that lag behind

    def _trained(self, batch: Batch) -> Tensor:
        """Valid steps but those that are too old; these still carry traces and bootstrap."""
        limit = self.section.mask_after
        return batch.valid if limit is None else batch.valid & (self._staleness(batch) <= limit)

    def _fresh(self, batch: Batch, prepared: Prepared) -> tuple[Rows | Sequences, RankRows]:
        fresh = self._staleness(batch) <= self.section.staleness
        rows = prepared.rows.select(prepared.each(fresh, len(batch.valid)).nonzero().squeeze(1).cpu())
        steps = prepared.rank_rows.steps
        return rows, self._group.rows_of(steps & fresh.to(steps.device))

    def _staleness(self, batch: Batch) -> Tensor:
        """Updates that each column is behind, [B]."""
        return (self._updates - batch.update).abs()

    # ---- what is scheduled and watched

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

    def _commit(self, statistics: Statistics, scaled: Scaled | None, metrics: Mapping[str, float]) -> None:
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
