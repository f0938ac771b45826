"""Proximal policy optimisation on stale experience: decoupled by default, coupled on request.

One update computes π_prox, values and advantages once, then runs epochs of minibatches, and reads the
device once at the end (per epoch only when a target KL is set):

    [epoch: permute → minibatch steps → KL]

A step is part of one batch only, so it is used at most `epochs` times; steps that lag behind may be given
fewer passes (`stale_epochs`) or none (`mask_after`).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithms.algorithm import AlgorithmState
from learner.algorithms.on_policy import on_policy
from learner.algorithms.on_policy.on_policy import Course, OnPolicy, Trace
from learner.algorithms.on_policy.preparation import Prepared
from learner.algorithms.on_policy.rows import Rows, Steps
from learner.algorithms.on_policy.sequences import Sequences
from learner.algorithms.shared.advantage import Advantages, Unrolls, gae, vtrace
from learner.algorithms.shared.groups import Deal, Share
from learner.algorithms.shared.hardware import Hardware
from learner.algorithms.shared.loss import (
    Sloped,
    Surrogate,
    clip_fraction,
    coupled,
    decoupled,
    divergence,
    policy_loss,
    value_loss,
)
from learner.algorithms.shared.reward_scale import Scaled
from learner.algorithms.shared.schedule import factor, steered, warmup
from learner.batch import Batch
from penstock.config.settings import PPOSection
from penstock.policy.layers import Measured
from penstock.policy.policy import Policy

METRICS = (
    *on_policy.METRICS,
    "kl_proximal",
    "clip_fraction",
    "clip_range",
    "epochs",
    "sample_reuse",
    "masked_fraction",
)
"""Beside those of `on_policy`: `kl_proximal` is KL(π_prox‖π_θ) in nats; it and `clip_fraction` are of the
last epoch. `sample_reuse`: passes over a step, on average over the batch. `masked_fraction`: share of the
valid steps that were too old."""

_KL_TOLERANCE = 1.5


class PPO(OnPolicy[PPOSection]):
    """PPO (Schulman et al. 2017) with a decoupled objective (Hilton, Cobbe, Schulman 2021)."""

    def __init__(
        self, policy: Policy, section: PPOSection, *, seed: int, hardware: Hardware | None = None
    ) -> None:
        super().__init__(policy, section, seed=seed, hardware=hardware)
        self._steered_rate = section.learning_rate

    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        section = self.section
        if section.advantage == "gae":
            return gae(*unrolls, discount=section.discount, trace=section.gae_lambda)
        return vtrace(
            *unrolls,
            log_ratios,
            discount=section.discount,
            trace=section.gae_lambda,
            rho_clip=section.rho_clip,
            c_clip=section.c_clip,
        )

    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        if self.section.objective == "coupled":
            return coupled(behaviour, advantage)
        return decoupled(behaviour, proximal, advantage, self.section.behaviour_weight_cap)

    def _policy_loss(self, log_prob: Tensor, rows: Rows, course: Course) -> Sloped:
        return policy_loss(
            log_prob,
            rows.anchor,
            rows.weighted_advantage,
            course["clip_range"],
            self.section.dual_clip,
            rows.total,
        )

    def _value_loss(self, value: Tensor, rows: Rows) -> Sloped:
        return value_loss(value, rows.target, rows.old_value, self.section.value_clip, rows.total)

    # ---- the epochs

    def _train(self, batch: Batch, prepared: Prepared, course: Course) -> Trace:
        trace, rows, share = Trace(), prepared.rows, prepared.share
        passes = 0
        for epoch in range(self.section.epochs):
            if epoch == self.section.stale_epochs:
                rows, share = self._fresh(batch, prepared)
                if not share.total:
                    break
            order = torch.randperm(share.total, generator=self._permutations)
            trace.deal = deal = share.deal(order, self.section.minibatches)
            trace.rows = rows.select(deal.index)
            trace.log_prob = [self._gradient_step(part, course, trace) for part in trace.rows.cut(deal.sizes)]
            passes += 1
            if self._moved_far(trace.rows, trace.log_prob, deal):
                break
        trace.numbers = {"epochs": float(passes), "sample_reuse": trace.used / prepared.steps}
        return trace

    def _moved_far(self, rows: Steps, log_prob: list[Tensor], deal: Deal) -> bool:
        """KL(π_prox‖π_θ) over the epoch just made exceeds its target; reads the device."""
        target = self.section.target_kl
        if target is None:
            return False
        proximal, now = deal.gather(torch.stack([rows.proximal, torch.cat(log_prob)]))
        return bool(divergence(proximal, now) > _KL_TOLERANCE * target)

    # ---- steps that lag behind

    def _trained(self, batch: Batch) -> Tensor:
        """Valid steps but those that are too old; these still carry traces and bootstrap."""
        limit = self.section.mask_after
        return batch.valid if limit is None else batch.valid & (self._lags(batch) <= limit)

    def _fresh(self, batch: Batch, prepared: Prepared) -> tuple[Rows | Sequences, Share]:
        """The rows that are at most `staleness` updates behind."""
        fresh = self._lags(batch) <= self.section.staleness
        rows = prepared.rows.select(prepared.each(fresh, len(batch.valid)).nonzero().squeeze(1).cpu())
        steps = prepared.share.steps
        return rows, self._group.share(steps & fresh.to(steps.device))

    def _lags(self, batch: Batch) -> Tensor:
        """Updates that each column is behind, [B]."""
        return (self._updates - batch.update).abs()

    # ---- what is scheduled and watched

    def _course(self, progress: float) -> dict[str, float]:
        section, course = self.section, super()._course(progress)
        if section.adaptive_kl is not None:
            course["learning_rate"] = self._steered_rate * warmup(self._updates, section.warmup_updates)
        return course | {"clip_range": section.clip_range * factor(section.clip_schedule, progress)}

    def _watch(self, batch: Batch, rows: Steps, log_prob: Tensor, course: Course) -> dict[str, Tensor]:
        return {
            "kl_proximal": divergence(rows.proximal, log_prob),
            "clip_fraction": clip_fraction(log_prob, rows.anchor, course["clip_range"]),
            "masked_fraction": 1.0 - self._trained_fraction(batch),
        }

    def _trained_fraction(self, batch: Batch) -> Tensor:
        counts = self._group.sum_(torch.stack([self._trained(batch).sum(), batch.valid.sum()]))
        return counts[0] / counts[1]

    def _commit(
        self,
        prepared: Prepared,
        activations: Measured | None,
        scaled: Scaled | None,
        metrics: Mapping[str, float],
    ) -> None:
        section = self.section
        if section.adaptive_kl is not None and self._updates >= section.warmup_updates:
            self._steered_rate = steered(
                self._steered_rate, metrics["kl_proximal"], section.adaptive_kl, section.learning_rate_range
            )
        super()._commit(prepared, activations, scaled, metrics)

    def state(self) -> AlgorithmState:
        """As of every `OnPolicy`, and the steered learning rate."""
        state = super().state()
        return replace(state, numbers=state.numbers | {"steered_rate": self._steered_rate})

    def load(self, state: AlgorithmState) -> None:
        """Inverse of `state`; raises ValueError that names what is missing or misshapen."""
        super().load(state)
        # A run that was not steered before begins at the configured rate.
        self._steered_rate = float(state.numbers.get("steered_rate", self.section.learning_rate))
