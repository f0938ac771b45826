"""Proximal policy optimisation of a language model, token by token.

Three policies of the same model: μ that sampled, π_prox at the start of this batch, π_θ being trained; and
the reference that training began with. Of n sampled tokens, with s the score at the end of a response:

    r_t = 1[last] s − penalty 1[cut short] − β clip(log π_prox − log π_ref, ±bound)
    A   = GAE(γ, λ), with γ γ_turn between the turns of a conversation,
          or returns less those of other responses (`token_advantage`), whitened
    L   = −1/n Σ min(π_prox/μ, C) · min(ρ A, clip(ρ, 1−ε, 1+ε) A),   ρ = π_θ/π_prox   (Hilton et al. 2021)
        + c_v ½ 1/n Σ max((V − R)², (clip(V, V_old ± δ) − R)²) − c_e 1/n Σ H

Means are over the tokens of a minibatch, whose responses are gone through in micro-batches that add up to it.
An update reads the device at its beginning (where the tokens lie) and at its end, and per epoch with a target
KL.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.sections.token import TokenPPOSection
from penstock.learner.algorithms.algorithm import AlgorithmState, Update
from penstock.learner.algorithms.shared.containment import contained, verdict
from penstock.learner.algorithms.shared.hardware import Hardware
from penstock.learner.algorithms.shared.learn_once import LearnsOnce
from penstock.learner.algorithms.shared.loss import divergence, policy_loss, value_loss
from penstock.learner.algorithms.shared.rank_group import edges
from penstock.learner.algorithms.shared.schedule import ScheduleValues, adapted, decayed, factor, warmup
from penstock.learner.algorithms.shared.steps import AllRankSteps, Steps
from penstock.learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from penstock.learner.algorithms.tokens.responses import Index, Responses, read_responses
from penstock.learner.algorithms.tokens.token_metrics import (
    TokenGradientRecord,
    engine_difference,
    of_critic,
    of_responses,
    watched,
)
from penstock.learner.algorithms.tokens.token_network import CRITIC, POLICY, Pass, TokenNetwork
from penstock.learner.algorithms.tokens.token_preparation import Prepared, prepare
from penstock.learner.batch import Batch
from penstock.policy.tokens import TokenOutputs, TokenPolicy

_KL_TOLERANCE: Final = 1.5
_JUDGED: Final = ("policy_loss", "entropy", "gradient_norm", "value_loss", "critic_gradient_norm")
"""Metrics that must be finite for an update to be kept, beside parameters and moments."""
_PERMUTATIONS: Final = "generator/permutations"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScheduleValues(ScheduleValues):
    """The scheduled numbers of one update.

    kl_coefficient: β of the penalty on leaving the reference.
    critic_learning_rate: None without a critic.
    """

    kl_coefficient: float
    critic_learning_rate: float | None

    def learning_rate_of(self, name: str) -> float:
        """Step size of the policy or of the critic."""
        rate = self.learning_rate if name == POLICY else self.critic_learning_rate
        assert rate is not None
        return rate


class TokenPPO(LearnsOnce[TokenPPOSection]):
    """An `Algorithm`. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(
        self, policy: TokenPolicy, section: TokenPPOSection, *, seed: int, hardware: Hardware | None = None
    ) -> None:
        super().__init__(section)
        self.policy = policy
        self._network = TokenNetwork(policy, section.adam_epsilon, hardware or Hardware())
        self._has_critic = section.advantage == "gae"
        self._permutations = torch.Generator().manual_seed(seed)
        self._kl_coefficient = section.kl_coefficient
        self._kl_reference: float | None = None

    def published_modules(self) -> dict[str, nn.Module]:
        """Return the policy without its critic, as `default`."""
        return {"default": self.policy.published}

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Consume one batch with all its gradient steps, without the fragments that make it fail."""
        return contained(partial(self._attempt, progress=progress), batch)

    def _attempt(self, batch: Batch, *, is_rehearsal: bool, progress: float) -> Update:
        """See `Attempt`."""
        responses = read_responses(batch)
        if responses is None:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        scheduled, network = self._schedule(progress), self._network
        with torch.no_grad():
            kept = self._only_pass(responses)
            passes = (kept,) if kept else self._passes(responses, np.arange(len(responses)))
            read = network.read(passes, responses.sampled, has_reference=self._kl_coefficient > 0.0)
            prepared = prepare(responses, read, self.section, self._kl_coefficient, self._beyond(responses))
        backup, drawn = network.backup(), self._permutations.get_state()
        is_kept = False
        try:
            charge = sum(source.steps * source.columns for source in batch.sources)
            count = self.minibatches(batch, charge)
            record = self._train(responses, prepared, scheduled, kept, count)
            with torch.no_grad():
                reason, metrics = self._measure(responses, prepared, record)
            is_kept = not reason and not is_rehearsal
            if is_kept:
                self._commit(len(responses), metrics)
        finally:
            if not is_kept:
                network.restore(backup)
                self._permutations.set_state(drawn)
        return Update(
            applied=not reason,
            reason=reason,
            steps=responses.sampled,
            gradient_steps=len(record.losses),
            metrics={} if reason else metrics | scheduled.metrics(),
        )

    def _only_pass(self, responses: Responses) -> Pass | None:
        """Return the one forward pass of an update of one gradient step and one micro-batch.

        It serves for preparation and for the step. None for any other update.
        """
        section, most = self.section, self.section.micro_batch_tokens
        if section.epochs * section.minibatches > 1 or not responses.fit_at_once(most):
            return None
        with torch.enable_grad():
            return next(self._passes(responses, np.arange(len(responses))))

    def _beyond(self, responses: Responses) -> Tensor | None:
        if not self.section.bootstrap_truncated:
            return None
        return self._network.values_beyond(responses, self.section.micro_batch_tokens)

    def _passes(self, responses: Responses, rows: Index) -> Iterator[Pass]:
        return self._network.passes(responses, rows, self.section.micro_batch_tokens)

    def _schedule(self, progress: float) -> TokenScheduleValues:
        section, updates = self.section, self._updates
        share = factor(section.learning_rate_schedule, progress) * warmup(updates, section.warmup_updates)
        entropy = decayed(section.entropy_coefficient, section.entropy_decay, section.entropy_floor, updates)
        return TokenScheduleValues(
            learning_rate=section.learning_rate * share if POLICY in self._learning else 0.0,
            entropy_coefficient=entropy,
            kl_coefficient=self._kl_coefficient,
            critic_learning_rate=section.critic_learning_rate * share if self._has_critic else None,
        )

    @property
    def _learning(self) -> Sequence[str]:
        """What learns in this update."""
        if not self._has_critic:
            return (POLICY,)
        return (CRITIC,) if self._updates < self.section.critic_warmup_updates else (POLICY, CRITIC)

    # ---- the epochs

    def _train(
        self,
        responses: Responses,
        prepared: Prepared,
        scheduled: TokenScheduleValues,
        kept: Pass | None,
        count: int,
    ) -> TokenGradientRecord:
        """Make the epochs, each of `count` minibatches. kept: the only pass, where there is one."""
        record = TokenGradientRecord(torch.empty_like(prepared.proximal))
        for _ in range(self.section.epochs):
            order = torch.randperm(len(responses), generator=self._permutations).numpy()
            for rows in minibatches(order, count):
                total = int(responses.counts[rows].sum())
                passes = (kept,) if kept else self._passes(responses, rows)
                self._gradient_step(passes, total, prepared, scheduled, record)
            record.epochs += 1
            if self._moved_far(prepared, record):
                break
        return record

    def _gradient_step(
        self,
        passes: Iterable[Pass],
        total: int,
        prepared: Prepared,
        scheduled: TokenScheduleValues,
        record: TokenGradientRecord,
    ) -> None:
        """Make the gradient of one minibatch.

        The gradients of its micro-batches add up to that of the mean over its `total` tokens.
        """
        network, learning = self._network, self._learning
        network.clear(learning)
        losses = torch.zeros(2, device=network.device)
        for one in passes:
            record.log_prob[one.part.index] = one.outputs.log_prob.detach()
            columns = AllRankSteps(prepared.columns[:, one.part.index])
            losses += self._accumulate(one.outputs, columns, total, scheduled.entropy_coefficient)
        record.losses.append(losses)
        for name in learning:
            norm = network.step(name, scheduled.learning_rate_of(name), self.section.max_gradient_norm)
            record.norms[name].append(norm)

    def _accumulate(
        self, outputs: TokenOutputs, columns: Steps, total: int, entropy_coefficient: float
    ) -> Tensor:
        """Add a micro-batch's share of the gradient; its shares of policy and value loss, [2]."""
        section, learning = self.section, self._learning
        value, log_prob = outputs.value.detach(), outputs.log_prob.detach()
        surrogate = policy_loss(
            log_prob,
            columns.anchor,
            columns.weighted_advantage,
            section.clip_range,
            section.dual_clip,
            total,
        )
        error = value_loss(value, columns.target, columns.old_value, section.value_clip, total)
        built: list[Tensor] = []
        slopes: list[Tensor] = []
        if POLICY in learning:
            built.append(outputs.log_prob)
            slopes.append(surrogate.slope)
        if POLICY in learning and entropy_coefficient:
            built.append(outputs.entropy)
            slopes.append(torch.full_like(value, -entropy_coefficient / total))
        if CRITIC in learning:
            built.append(outputs.value)
            slopes.append(error.slope.mul_(section.value_coefficient))
        self._network.accumulate(learning, built, slopes)
        return torch.stack([surrogate.loss, error.loss])

    def _moved_far(self, prepared: Prepared, record: TokenGradientRecord) -> bool:
        """KL(π_prox‖π_θ) over the epoch just made exceeds its target; reads the device."""
        target = self.section.target_kl
        if target is None:
            return False
        return bool(divergence(prepared.proximal, record.log_prob) > _KL_TOLERANCE * target)

    # ---- after it

    def _measure(
        self, responses: Responses, prepared: Prepared, record: TokenGradientRecord
    ) -> tuple[str, dict[str, float]]:
        """The one read of the device: why the update is not kept, or "", and the metrics."""
        tensors = watched(prepared, record, self.section.clip_range) | of_responses(responses)
        if self._has_critic:
            tensors |= of_critic(prepared, record)
        tensors["engine_difference"] = engine_difference(prepared, responses.sampled_by(self._updates))
        farthest = (prepared.proximal - prepared.behaviour).abs().max()
        numbers = torch.stack([*tensors.values(), self._network.checksum(), farthest]).tolist()
        found = dict(zip(tensors, numbers, strict=False))
        judged = [number for name, number in found.items() if name in _JUDGED] + numbers[len(tensors) :]
        metrics = {name: number for name, number in found.items() if math.isfinite(number)} | {
            "response_length": responses.sampled / len(responses),
            "left_out": float(responses.left_out),
            "epochs": float(record.epochs),
        }
        return verdict(judged, self.section.max_log_ratio), metrics

    def _commit(self, count: int, metrics: dict[str, float]) -> None:
        section = self.section
        if section.kl_target is not None and POLICY in self._learning:
            self._kl_coefficient = adapted(
                self._kl_coefficient, metrics["kl_reference"], section.kl_target, count, section.kl_horizon
            )
        self._kl_reference = metrics.get("kl_reference")
        self._updates += 1

    def findings(self) -> dict[str, Any]:
        """Return how far the policy is from the reference, where this process has measured it."""
        if self._kl_reference is None:
            return {}
        remark = f"KL to the reference in the last update: {self._kl_reference:.3g} nats per response"
        return {"kl_reference": self._kl_reference, "remarks": [remark]}

    # ---- a checkpoint

    def state(self) -> AlgorithmState:
        """Return copies of the trained weights, the moments, the generator and β.

        Frozen weights are read from their folder again.
        """
        tensors = copies("policy", self.policy.published) | copies("critic", self.policy.critic)
        optimisers = self._network.optimisers
        for name, optimiser in optimisers.items():
            tensors |= {f"optimiser/{name}/{key}": moment for key, moment in optimiser.moments().items()}
        tensors[_PERMUTATIONS] = self._permutations.get_state()
        numbers = {
            "updates": self._updates,
            "gradient_steps": {name: optimiser.steps for name, optimiser in optimisers.items()},
            "kl_coefficient": self._kl_coefficient,
        }
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def restore(self, state: AlgorithmState) -> None:
        """Become what the state was taken from, as `Algorithm.restore`; β is scheduled, so it goes on."""
        self.load(taken_over(self.state(), state, going_on=("generator/",)))

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        missing = {"updates", "gradient_steps", "kl_coefficient"} - state.numbers.keys()
        if missing or _PERMUTATIONS not in state.tensors:
            raise ValueError(f"algorithm state: {sorted(missing) or _PERMUTATIONS} missing")
        for name, optimiser in self._network.optimisers.items():
            moments = under(state.tensors, f"optimiser/{name}/")
            optimiser.load_moments(moments, int(state.numbers["gradient_steps"][name]))
        load_copies(self.policy.published, "policy", state.tensors)
        load_copies(self.policy.critic, "critic", state.tensors)
        self._permutations.set_state(state.tensors[_PERMUTATIONS])
        self._updates = int(state.numbers["updates"])
        # A fixed one is the setting's, which a resumed run may have changed.
        if self.section.kl_target is not None:
            self._kl_coefficient = float(state.numbers["kl_coefficient"])


def minibatches(order: Index, count: int) -> Iterator[Index]:
    """Nearly equal parts; fewer when there are fewer responses."""
    for start, end in pairwise(edges(len(order), count)):
        yield order[start:end]
