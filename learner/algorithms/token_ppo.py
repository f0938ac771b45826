"""Proximal policy optimisation of a language model, token by token.

Three policies of the same model: μ that sampled, π_prox at the start of this batch, π_θ being trained; and
the reference that training began with. Of n sampled tokens, with s the score at the end of a response:

    r_t = 1[last] s − penalty 1[cut short] − β clip(log π_prox − log π_ref, ±bound)
    A   = GAE(γ, λ), with γ γ_turn between the turns of a conversation,
          or returns less those of other responses (`leave_one_out`, `group_relative`), whitened
    L   = −1/n Σ min(π_prox/μ, C) · min(ρ A, clip(ρ, 1−ε, 1+ε) A),   ρ = π_θ/π_prox   (Hilton et al. 2021)
        + c_v ½ 1/n Σ max((V − R)², (clip(V, V_old ± δ) − R)²) − c_e 1/n Σ H

Means are over the tokens of a minibatch, whose gradient is accumulated over micro-batches. An update reads
the device at its beginning (the places of the tokens), at its end, and with a target KL in each epoch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms import losses
from penstock.learner.algorithms.algorithm import (
    EMPTY,
    AlgorithmState,
    LearnsOnce,
    Trained,
    Update,
    contained,
    verdict,
)
from penstock.learner.algorithms.gradient import PLAIN, FlatAdam, Hardware
from penstock.learner.algorithms.losses import Objective
from penstock.learner.algorithms.responses import (
    Index,
    MicroBatch,
    Prepared,
    Responses,
    prepare,
    read_responses,
)
from penstock.learner.algorithms.rows import Steps, edges
from penstock.learner.batch import Batch
from penstock.policy.tokens import TokenOutputs, TokenPolicy, TokenRows

POLICY: Final = "policy"
CRITIC: Final = "critic"

METRICS: Final = (
    "policy_loss", "entropy", "gradient_norm", "kl_behaviour", "kl_proximal", "effective_sample_size",
    "max_ratio", "clip_fraction", "engine_difference", "kl_reference", "kl_coefficient", "score",
    "response_length", "finished_fraction", "left_out", "learning_rate", "entropy_coefficient", "epochs",
)  # fmt: skip
"""The metrics of PPO, over sampled tokens.

`kl_reference`: KL(π_prox‖π_ref) in nats per response, to which β (`kl_coefficient`) is adapted; absent where
β is 0, when nothing reads the reference. `engine_difference`: mean |log π − log μ| of tokens that the present
weights sampled, in nats: the numerical difference between generation and learning; absent where there are no
such tokens. `score`: mean reward of a response before penalties.
`finished_fraction`: share of the responses that ended by themselves. `left_out`: columns that are no whole
response.
"""
CRITIC_METRICS: Final = (
    "value_loss", "explained_variance", "mean_value", "critic_gradient_norm", "critic_learning_rate",
)  # fmt: skip
"""Metrics of an algorithm with a critic."""


@dataclass(slots=True)
class TokenGradientRecord:
    """Results of an update's gradient steps. log_prob: [n], of π_θ before each step of the last epoch."""

    log_prob: Tensor
    losses: list[Tensor] = field(default_factory=list)
    norms: dict[str, list[Tensor]] = field(default_factory=lambda: {POLICY: [], CRITIC: []})
    epochs: int = 0


_KL_TOLERANCE: Final = 1.5
_JUDGED: Final = ("policy_loss", "entropy", "gradient_norm", "value_loss", "critic_gradient_norm")
"""Metrics that must be finite for an update to be kept, as parameters and moments must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenObjective(Objective):
    """kl_coefficient: β of the penalty on leaving the reference. critic_learning_rate: where there is one."""

    kl_coefficient: float
    critic_learning_rate: float | None


Pass = tuple[MicroBatch, TokenOutputs]
"""A micro-batch and the policy's outputs for it."""


class TokenPPO(Trained, LearnsOnce[TokenPPOSection]):
    """PPO of a policy over token sequences (`penstock.policy.tokens.TokenPolicy`): an `Algorithm`.

    Policy and critic have an optimiser each: their step sizes differ, and the gradient of one never scales
    the other down. In mixed precision (autocast) matrix products are in bfloat16; what is trained is float32.

    It owns the policy's weights: do not convert or move the policy afterwards.

    Args:
        policy: what is trained, on its device.
        section: the algorithm's settings.
        seed: of permutations.
        hardware: the precision.
    """

    policy: TokenPolicy
    needed = ("updates", "gradient_steps", "kl_coefficient")

    def __init__(
        self, policy: TokenPolicy, section: TokenPPOSection, *, seed: int, hardware: Hardware = PLAIN
    ) -> None:
        LearnsOnce.__init__(self, section)
        self.policy = policy
        # A resumed learner reads frozen weights from their folder.
        self.modules = {POLICY: policy.published, CRITIC: policy.critic}
        self.optimisers = {
            POLICY: FlatAdam(policy.trained(), section.adam_epsilon),
            CRITIC: FlatAdam(policy.critic, section.adam_epsilon),
        }
        self._device = self.optimisers[POLICY].parameters.device
        self._precision = torch.autocast(self._device.type, torch.bfloat16, enabled=hardware.bfloat16)
        self._has_critic = section.advantage == "gae"
        self._permutations = torch.Generator().manual_seed(seed)
        self.generators = {"permutations": self._permutations}
        self._kl_coefficient = section.kl_coefficient
        self._kl_reference: float | None = None

    def published_modules(self) -> dict[str, nn.Module]:
        return {"default": self.policy.published}

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        return contained(partial(self._attempt, progress=progress), batch)

    def _attempt(self, batch: Batch, *, is_rehearsal: bool, progress: float) -> Update:
        responses = read_responses(batch)
        if responses is None:
            return Update(applied=False, reason=EMPTY)
        objective = self._schedule(progress)
        with torch.no_grad():
            kept = self._only_pass(responses)
            read = self._read(
                (kept,) if kept else self._passes(responses, np.arange(len(responses))), responses
            )
            prepared = prepare(responses, read, self.section, self._kl_coefficient, self._beyond(responses))
        with self.undoing() as trial:
            charge = sum(source.steps * source.columns for source in batch.sources)
            count = self.minibatches(batch, charge)
            record = self._train(responses, prepared, objective, kept, count)
            with torch.no_grad():
                reason, metrics = self._measure(responses, prepared, record)
            trial.is_kept = not reason and not is_rehearsal
            if trial.is_kept:
                self._commit(len(responses), metrics)
        return Update(
            applied=not reason,
            reason=reason,
            steps=responses.sampled,
            gradient_steps=len(record.losses),
            metrics={} if reason else metrics | objective.metrics(),
        )

    def _schedule(self, progress: float) -> TokenObjective:
        section, updates = self.section, self._updates
        share = losses.factor(section.learning_rate_schedule, progress)
        share *= losses.warmup(updates, section.warmup_updates)
        return TokenObjective(
            learning_rate=section.learning_rate * share if POLICY in self._learning else 0.0,
            entropy_coefficient=losses.decayed(
                section.entropy_coefficient, section.entropy_decay, section.entropy_floor, updates
            ),
            value_coefficient=section.value_coefficient,
            kl_coefficient=self._kl_coefficient,
            critic_learning_rate=section.critic_learning_rate * share if self._has_critic else None,
        )

    @property
    def _learning(self) -> Sequence[str]:
        if not self._has_critic:
            return (POLICY,)
        return (CRITIC,) if self._updates < self.section.critic_warmup_updates else (POLICY, CRITIC)

    # ---- forward passes

    def _outputs(self, rows: TokenRows) -> TokenOutputs:
        with self._precision:
            return self.policy.outputs(rows)

    def _passes(self, responses: Responses, rows: Index) -> Iterator[Pass]:
        """Yield a forward pass for each micro-batch of these rows; differentiable where gradients are on."""
        for part in responses.micro_batches(rows, self.section.micro_batch_tokens):
            yield part, self._outputs(part.rows)

    def _only_pass(self, responses: Responses) -> Pass | None:
        """Return the pass for both preparation and step, where an update has one step and one micro-batch."""
        section, places = self.section, len(responses) * int(responses.lengths.max())
        if section.epochs * section.minibatches > 1 or places > section.micro_batch_tokens:
            return None
        with torch.enable_grad():
            return next(self._passes(responses, np.arange(len(responses))))

    def _read(self, passes: Iterable[Pass], responses: Responses) -> Tensor:
        """Return the input of `prepare` for all n sampled tokens, float32."""
        has_reference = self._kl_coefficient > 0.0
        read = torch.empty((4 if has_reference else 3, responses.sampled), device=self._device)
        for part, outputs in passes:
            columns = [outputs.log_prob, outputs.entropy, outputs.value]
            if has_reference:
                with self._precision:
                    columns.append(self.policy.reference_log_prob(part.rows))
            read[:, part.index] = torch.stack([column.detach().float() for column in columns])
        return read

    def _beyond(self, responses: Responses) -> Tensor | None:
        """Return V of the state after each row that was cut short, 0 for the others, float32 [R]."""
        if not self.section.bootstrap_truncated:
            return None
        values = torch.zeros(len(responses), device=self._device)
        cut = responses.cut_short.cpu().numpy().nonzero()[0]
        if len(cut):
            for part in responses.behind(cut, self.section.micro_batch_tokens):
                values[part.index] = self._outputs(part.rows).value.detach().float()
        return values

    # ---- the epochs

    def _train(
        self,
        responses: Responses,
        prepared: Prepared,
        objective: TokenObjective,
        kept: Pass | None,
        count: int,
    ) -> TokenGradientRecord:
        """Make the epochs, each of `count` minibatches. kept: the only pass, where there is one."""
        record = TokenGradientRecord(torch.empty_like(prepared.proximal))
        for _ in range(self.section.epochs):
            order = torch.randperm(len(responses), generator=self._permutations).numpy()
            for start, end in pairwise(edges(len(order), count)):
                rows = order[start:end]
                passes = (kept,) if kept else self._passes(responses, rows)
                self._gradient_step(passes, int(responses.counts[rows].sum()), prepared, objective, record)
            record.epochs += 1
            if self._moved_far(prepared, record):
                break
        return record

    def _gradient_step(
        self,
        passes: Iterable[Pass],
        total: int,
        prepared: Prepared,
        objective: TokenObjective,
        record: TokenGradientRecord,
    ) -> None:
        """Make one gradient step on a minibatch of `total` tokens, accumulated over its micro-batches."""
        learning = {name: self.optimisers[name] for name in self._learning}
        for optimiser in learning.values():
            optimiser.flat_gradient.zero_()
        sums = torch.zeros(2, device=self._device)
        for part, outputs in passes:
            record.log_prob[part.index] = outputs.log_prob.detach()
            columns = Steps(prepared.columns[:, part.index])
            sums += self._accumulate(outputs, columns, total, objective.entropy_coefficient)
        record.losses.append(sums)
        rates = {POLICY: objective.learning_rate, CRITIC: objective.critic_learning_rate or 0.0}
        for name, optimiser in learning.items():
            norm = optimiser.step(optimiser.flat_gradient, rates[name], self.section.max_gradient_norm)
            record.norms[name].append(norm)

    def _accumulate(
        self, outputs: TokenOutputs, columns: Steps, total: int, entropy_coefficient: float
    ) -> Tensor:
        """Add a micro-batch's share of the gradient; returns its shares of policy and value loss, [2]."""
        section, learning = self.section, self._learning
        surrogate = losses.policy_loss(
            outputs.log_prob,
            columns.anchor,
            columns.weighted_advantage,
            section.clip_range,
            section.dual_clip,
            total,
        )
        error = losses.value_loss(outputs.value, columns.target, columns.old_value, section.value_clip, total)
        parts: list[Tensor] = []
        if POLICY in learning:
            parts.append(surrogate)
        if POLICY in learning and entropy_coefficient:
            parts.append(outputs.entropy.sum() * (-entropy_coefficient / total))
        if CRITIC in learning:
            parts.append(section.value_coefficient * error)
        own = [parameter for name in learning for parameter in self.optimisers[name].own]
        views = [view for name in learning for view in self.optimisers[name].gradient_views]
        pieces = torch.autograd.grad(torch.stack(parts).sum(), own, materialize_grads=True)
        for view, piece in zip(views, pieces, strict=True):
            view.add_(piece)
        return torch.stack([surrogate, error]).detach()

    def _moved_far(self, prepared: Prepared, record: TokenGradientRecord) -> bool:
        target = self.section.target_kl
        if target is None:
            return False
        return bool(losses.divergence(prepared.proximal, record.log_prob) > _KL_TOLERANCE * target)

    # ---- after it

    def _measure(
        self, responses: Responses, prepared: Prepared, record: TokenGradientRecord
    ) -> tuple[str, dict[str, float]]:
        """Return why the update is not kept, or "", and the metrics; the one read of the device."""
        tensors = self._watched(responses, prepared, record)
        checksum = torch.stack([optimiser.checksum() for optimiser in self.optimisers.values()]).sum()
        farthest = (prepared.proximal - prepared.behaviour).abs().max()
        numbers = torch.stack([*tensors.values(), checksum, farthest]).tolist()
        found = dict(zip(tensors, numbers, strict=False))
        judged = [number for name, number in found.items() if name in _JUDGED] + numbers[len(tensors) :]
        metrics = {name: number for name, number in found.items() if math.isfinite(number)} | {
            "response_length": responses.sampled / len(responses),
            "left_out": float(responses.left_out),
            "epochs": float(record.epochs),
        }
        return verdict(judged, self.section.max_log_ratio), metrics

    def _watched(
        self, responses: Responses, prepared: Prepared, record: TokenGradientRecord
    ) -> dict[str, Tensor]:
        """Return the metrics that lie on the device, as scalars; not finite where there are none."""
        log_prob, behaviour, norms = record.log_prob, prepared.behaviour, record.norms
        policy_loss, value_loss = torch.stack(record.losses).mean(0)
        is_own = responses.sampled_by(self._updates)
        tensors = {
            "policy_loss": policy_loss,
            "entropy": prepared.entropy,
            "gradient_norm": torch.stack(norms[POLICY] or [torch.zeros_like(policy_loss)]).mean(),
            "kl_behaviour": losses.divergence(behaviour, log_prob),
            "kl_proximal": losses.divergence(prepared.proximal, log_prob),
            "effective_sample_size": losses.effective_sample_size(behaviour, log_prob),
            "max_ratio": losses.largest_ratio(behaviour, log_prob),
            "clip_fraction": losses.clip_fraction(log_prob, prepared.anchor, self.section.clip_range),
            "engine_difference": (prepared.proximal - behaviour).abs().mul(is_own).sum() / is_own.sum(),
            "score": responses.reward.sum() / len(responses),
            "finished_fraction": 1.0 - responses.cut_short.float().mean(),
        }
        if prepared.kl_reference is not None:
            tensors["kl_reference"] = prepared.kl_reference
        if self._has_critic:
            tensors |= {
                "value_loss": value_loss,
                "explained_variance": losses.explained_variance(prepared.old_value, prepared.target),
                "mean_value": prepared.old_value.mean(),
                "critic_gradient_norm": torch.stack(norms[CRITIC]).mean(),
            }
        return tensors

    def _commit(self, count: int, metrics: dict[str, float]) -> None:
        section = self.section
        if section.kl_target is not None and POLICY in self._learning:
            self._kl_coefficient = losses.adapted(
                self._kl_coefficient, metrics["kl_reference"], section.kl_target, count, section.kl_horizon
            )
        self._kl_reference = metrics.get("kl_reference")
        self._updates += 1

    def findings(self) -> dict[str, Any]:
        if self._kl_reference is None:
            return {}
        remark = f"KL to the reference in the last update: {self._kl_reference:.3g} nats per response"
        return {"kl_reference": self._kl_reference, "remarks": [remark]}

    # ---- a checkpoint

    def state(self) -> AlgorithmState:
        state = super().state()
        return replace(state, numbers=state.numbers | {"kl_coefficient": self._kl_coefficient})

    def load(self, state: AlgorithmState) -> None:
        super().load(state)
        # A fixed coefficient is a setting, which may have changed for a resumed run.
        if self.section.kl_target is not None:
            self._kl_coefficient = float(state.numbers["kl_coefficient"])
