"""Proximal policy optimisation of a language model, token by token.

Three policies of the same model: μ that sampled, π_prox at the start of this batch, π_θ being trained; and the
reference that training began with. Of n sampled tokens, with s the score at the end of a response:

    r_t = 1[last] s − penalty 1[cut short] − β clip(log π_prox − log π_ref, ±bound)
    A   = GAE(γ, λ), or returns less those of other responses (`token_advantage`), whitened
    L   = −1/n Σ min(π_prox/μ, C) · min(ρ A, clip(ρ, 1−ε, 1+ε) A),   ρ = π_θ/π_prox          (Hilton et al. 2021, eq. 2)
        + c_v ½ 1/n Σ max((V − R)², (clip(V, V_old ± δ) − R)²) − c_e 1/n Σ H

Means are over the tokens of a minibatch, whose responses are gone through in micro-batches that add up to it. An
update reads the device at its beginning (where the tokens lie) and at its end, and per epoch with a target KL.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from learner.algorithm import AlgorithmState, Update
from learner.algorithms.advantage import Advantages
from learner.algorithms.group import edges
from learner.algorithms.hardware import Hardware
from learner.algorithms.loss import (
    clip_fraction,
    decoupled,
    divergence,
    effective_sample_size,
    explained_variance,
    policy_loss,
    value_loss,
)
from learner.algorithms.once import LearnsOnce
from learner.algorithms.optimiser import FlatAdam
from learner.algorithms.responses import Grid, Index, Responses, read_responses
from learner.algorithms.rows import Gathered, Steps
from learner.algorithms.schedule import adapted, decayed, factor, warmup
from learner.algorithms.stored import copies, load_copies, under
from learner.algorithms.token_advantage import group_relative, leave_one_out, shaped, token_gae, whitened
from learner.batch import Batch
from penstock.policy.tokens import TokenOutputs, TokenPolicy, TokenRows
from penstock.runtime.settings import TokenPPOSection

METRICS: Final = (
    "policy_loss",
    "entropy",
    "gradient_norm",
    "kl_behaviour",
    "kl_proximal",
    "effective_sample_size",
    "max_ratio",
    "clip_fraction",
    "kl_reference",
    "kl_coefficient",
    "score",
    "response_length",
    "finished_fraction",
    "left_out",
    "learning_rate",
    "entropy_coefficient",
    "epochs",
)
"""As of PPO, of sampled tokens. `kl_reference`: KL(π_prox‖π_ref) in nats per response; it is what β
(`kl_coefficient`) is adapted to. `score`: mean reward of a response before penalties. `finished_fraction`: share of the
responses that ended by themselves. `left_out`: columns that are no whole response."""
CRITIC_METRICS: Final = (
    "value_loss",
    "explained_variance",
    "mean_value",
    "critic_gradient_norm",
    "critic_learning_rate",
)
"""Beside these where there is a critic."""

_KL_TOLERANCE: Final = 1.5
_OPTIMISERS: Final = ("policy", "critic")


@dataclass(frozen=True, slots=True)
class Prepared(Steps):
    """Of the n sampled tokens. columns: [6, n], see `Steps`. entropy: scalar. kl_reference: scalar, nats per response."""

    columns: Tensor
    entropy: Tensor
    kl_reference: Tensor


@dataclass(slots=True)
class Trace:
    """What the gradient steps leave behind, on the device. log_prob: [n], of π_θ before each step of the last epoch."""

    log_prob: Tensor
    policy_losses: list[Tensor] = field(default_factory=list)
    value_losses: list[Tensor] = field(default_factory=list)
    norms: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in _OPTIMISERS})
    epochs: int = 0
    gradient_steps: int = 0


class TokenPPO(LearnsOnce[TokenPPOSection]):
    """An `Algorithm`. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(
        self, policy: TokenPolicy, section: TokenPPOSection, *, seed: int, hardware: Hardware | None = None
    ) -> None:
        super().__init__(section)
        hardware = hardware or Hardware()
        self.policy = policy
        self._optimisers = {
            "policy": FlatAdam(policy.trained(), section.adam_epsilon),
            "critic": FlatAdam(policy.critic, section.adam_epsilon),
        }
        self._device = self._optimisers["policy"].parameters.device
        self._bfloat16 = hardware.bfloat16
        self._has_critic = section.advantage == "gae"
        self._permutations = torch.Generator().manual_seed(seed)
        self._kl_coefficient = section.kl_coefficient

    def published_modules(self) -> dict[str, nn.Module]:
        """The policy without its critic, as `default`."""
        return {"default": self.policy.published}

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Consume one batch with all its gradient steps."""
        responses = read_responses(batch)
        if responses is None:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        course = self._course(progress)
        with torch.no_grad():
            prepared = self._prepare(responses)
        backups = {name: optimiser.backup() for name, optimiser in self._optimisers.items()}
        trace = self._train(responses, prepared, course)
        with torch.no_grad():
            finite, metrics = self._measure(responses, prepared, trace)
        if finite:
            self._commit(len(responses), metrics)
        else:
            for name, optimiser in self._optimisers.items():
                optimiser.restore(backups[name])
        return Update(
            applied=finite,
            reason="" if finite else "nan",
            steps=responses.sampled,
            gradient_steps=trace.gradient_steps,
            metrics=metrics | course if finite else {},
        )

    def _course(self, progress: float) -> dict[str, float]:
        section = self.section
        share = factor(section.learning_rate_schedule, progress) * warmup(
            self._updates, section.warmup_updates
        )
        course = {
            "learning_rate": section.learning_rate * share if self._trains_policy else 0.0,
            "entropy_coefficient": decayed(
                section.entropy_coefficient, section.entropy_decay, section.entropy_floor, self._updates
            ),
            "kl_coefficient": self._kl_coefficient,
        }
        return course | (
            {"critic_learning_rate": section.critic_learning_rate * share} if self._has_critic else {}
        )

    @property
    def _trains_policy(self) -> bool:
        return not self._has_critic or self._updates >= self.section.critic_warmup_updates

    # ---- once per batch

    def _prepare(self, responses: Responses) -> Prepared:
        section, grid = self.section, Grid(responses)
        proximal, entropy, value, reference = self._read(responses)
        log_ratio = proximal - reference
        cut = torch.zeros_like(proximal).index_copy(0, responses.last, responses.cut_short.to(proximal.dtype))
        reward = shaped(
            responses.reward,
            log_ratio,
            cut,
            coefficient=self._kl_coefficient,
            bound=section.log_ratio_bound,
            eos_penalty=section.eos_penalty,
        )
        estimated = self._advantages(responses, grid, grid.spread(reward), grid.spread(value))
        advantage = grid.gather(estimated.advantage)
        if section.normalise_advantages and section.advantage != "group":
            advantage = whitened(advantage, len(responses))
        surrogate = decoupled(responses.behaviour, proximal, advantage, section.behaviour_weight_cap)
        target = grid.gather(estimated.target)
        fixed = (surrogate.anchor, surrogate.weighted_advantage, target, value, responses.behaviour, proximal)
        return Prepared(torch.stack(fixed), entropy.mean(), log_ratio.sum() / len(responses))

    def _read(self, responses: Responses) -> Tensor:
        """Log π_prox, entropy, V, log π_ref of every sampled token, [4, n]."""
        read = torch.empty((4, responses.sampled), device=self._device)
        everything = np.arange(len(responses))
        for part in responses.micro_batches(everything, self.section.micro_batch_tokens):
            outputs = self._outputs(part.rows)
            with self._precision():
                reference = self.policy.reference_log_prob(part.rows)
            read[:, part.index] = torch.stack(
                [outputs.log_prob, outputs.entropy, outputs.value, reference.float()]
            )
        return read

    def _advantages(self, responses: Responses, grid: Grid, reward: Tensor, value: Tensor) -> Advantages:
        """[S, R] each; without a critic its targets are its values."""
        section, sampled = self.section, grid.sampled
        match section.advantage:
            case "gae":
                return token_gae(
                    reward,
                    value,
                    sampled,
                    discount=section.discount,
                    trace=section.gae_lambda,
                    value_trace=section.value_lambda,
                )
            case "group":
                advantage = group_relative(
                    reward,
                    sampled,
                    responses.prompts(),
                    discount=section.discount,
                    by_deviation=section.normalise_advantages,
                )
            case "reinforce":
                advantage = leave_one_out(reward, sampled, discount=section.discount)
        return Advantages(advantage, value)

    # ---- the epochs

    def _train(self, responses: Responses, prepared: Prepared, course: dict[str, float]) -> Trace:
        trace = Trace(log_prob=torch.empty_like(prepared.proximal))
        for _ in range(self.section.epochs):
            order = torch.randperm(len(responses), generator=self._permutations).numpy()
            for rows in _minibatches(order, self.section.minibatches):
                self._gradient_step(responses, prepared, rows, course, trace)
            trace.epochs += 1
            if self._moved_far(prepared, trace):
                break
        return trace

    def _gradient_step(
        self, responses: Responses, prepared: Prepared, rows: Index, course: dict[str, float], trace: Trace
    ) -> None:
        """One minibatch: the gradients of its micro-batches add up to that of the mean over its tokens."""
        learning = [name for name in _OPTIMISERS if self._learns(name)]
        for name in learning:
            self._optimisers[name].flat_gradient.zero_()
        total = int(responses.counts[rows].sum())
        losses = torch.zeros(2, device=self._device)
        for part in responses.micro_batches(rows, self.section.micro_batch_tokens):
            outputs = self._outputs(part.rows)
            trace.log_prob[part.index] = outputs.log_prob.detach()
            columns = Gathered(prepared.columns[:, part.index])
            losses += self._accumulate(outputs, columns, total, course["entropy_coefficient"], learning)
        self._step(learning, course, trace)
        trace.policy_losses.append(losses[0])
        trace.value_losses.append(losses[1])
        trace.gradient_steps += 1

    def _accumulate(
        self,
        outputs: TokenOutputs,
        columns: Steps,
        total: int,
        entropy_coefficient: float,
        learning: list[str],
    ) -> Tensor:
        """Add a micro-batch's share of the gradient; its shares of policy and value loss, [2]."""
        section = self.section
        surrogate = policy_loss(
            outputs.log_prob.detach(),
            columns.anchor,
            columns.weighted_advantage,
            section.clip_range,
            section.dual_clip,
            total,
        )
        error = value_loss(
            outputs.value.detach(), columns.target, columns.old_value, section.value_clip, total
        )
        built, slopes = [], []
        if "policy" in learning:
            built, slopes = [outputs.log_prob], [surrogate.slope]
            if entropy_coefficient:
                built.append(outputs.entropy)
                slopes.append(torch.full_like(outputs.entropy, -entropy_coefficient / total))
        if "critic" in learning:
            built.append(outputs.value)
            slopes.append(error.slope.mul_(section.value_coefficient))
        optimisers = [self._optimisers[name] for name in learning]
        wanted = [own for optimiser in optimisers for own in optimiser.own]
        views = [view for optimiser in optimisers for view in optimiser.gradient_views]
        pieces = torch.autograd.grad(built, wanted, slopes, materialize_grads=True)
        for view, piece in zip(views, pieces, strict=True):
            view.add_(piece)
        return torch.stack([surrogate.loss, error.loss])

    def _step(self, learning: list[str], course: dict[str, float], trace: Trace) -> None:
        rates = {"policy": "learning_rate", "critic": "critic_learning_rate"}
        for name in learning:
            optimiser = self._optimisers[name]
            rate, most = course[rates[name]], self.section.max_gradient_norm
            trace.norms[name].append(optimiser.step(optimiser.flat_gradient, rate, most))

    def _learns(self, name: str) -> bool:
        return self._trains_policy if name == "policy" else self._has_critic

    def _moved_far(self, prepared: Prepared, trace: Trace) -> bool:
        """KL(π_prox‖π_θ) over the epoch just made exceeds its target; reads the device."""
        target = self.section.target_kl
        if target is None:
            return False
        return bool(divergence(prepared.proximal, trace.log_prob) > _KL_TOLERANCE * target)

    def _outputs(self, rows: TokenRows) -> TokenOutputs:
        with self._precision():
            return self.policy.outputs(rows)

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16)

    # ---- after it

    def _measure(
        self, responses: Responses, prepared: Prepared, trace: Trace
    ) -> tuple[bool, dict[str, float]]:
        """The one read of the device: is everything finite, and the metrics."""
        tensors = self._watched(responses, prepared, trace)
        judged = [optimiser.checksum() for optimiser in self._optimisers.values()]
        numbers = torch.stack([*tensors.values(), *judged]).tolist()
        metrics = dict(zip(tensors, numbers, strict=False))
        metrics |= {
            "response_length": responses.sampled / len(responses),
            "left_out": float(responses.left_out),
            "epochs": float(trace.epochs),
        }
        return all(map(math.isfinite, numbers)), metrics

    def _watched(self, responses: Responses, prepared: Prepared, trace: Trace) -> dict[str, Tensor]:
        log_prob, behaviour = trace.log_prob, prepared.behaviour
        nothing = log_prob.new_zeros(1)
        watched = {
            "policy_loss": torch.stack(trace.policy_losses).mean(),
            "entropy": prepared.entropy,
            "gradient_norm": torch.stack(trace.norms["policy"] or [nothing[0]]).mean(),
            "kl_behaviour": divergence(behaviour, log_prob),
            "kl_proximal": divergence(prepared.proximal, log_prob),
            "effective_sample_size": effective_sample_size(behaviour, log_prob),
            "max_ratio": (log_prob - behaviour).max().exp(),
            "clip_fraction": clip_fraction(log_prob, prepared.anchor, self.section.clip_range),
            "kl_reference": prepared.kl_reference,
            "score": responses.reward.sum() / len(responses),
            "finished_fraction": 1.0 - responses.cut_short.float().mean(),
        }
        if not self._has_critic:
            return watched
        return watched | {
            "value_loss": torch.stack(trace.value_losses).mean(),
            "explained_variance": explained_variance(prepared.old_value, prepared.target),
            "mean_value": prepared.old_value.mean(),
            "critic_gradient_norm": torch.stack(trace.norms["critic"]).mean(),
        }

    def _commit(self, count: int, metrics: dict[str, float]) -> None:
        section = self.section
        if section.kl_target is not None:
            self._kl_coefficient = adapted(
                self._kl_coefficient, metrics["kl_reference"], section.kl_target, count, section.kl_horizon
            )
        self._updates += 1

    # ---- a checkpoint

    def state(self) -> AlgorithmState:
        """Weights that are trained, moments, generator and β; copies. What is frozen is read from its folder again."""
        tensors = copies("policy", self.policy.published) | copies("critic", self.policy.critic)
        for name, optimiser in self._optimisers.items():
            tensors |= {f"optimiser/{name}/{key}": moment for key, moment in optimiser.moments().items()}
        tensors["generator/permutations"] = self._permutations.get_state()
        numbers = {
            "updates": self._updates,
            "gradient_steps": {name: optimiser.steps for name, optimiser in self._optimisers.items()},
            "kl_coefficient": self._kl_coefficient,
        }
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        missing = {"updates", "gradient_steps", "kl_coefficient"} - state.numbers.keys()
        if missing or "generator/permutations" not in state.tensors:
            raise ValueError(f"algorithm state: {sorted(missing) or 'generator/permutations'} missing")
        for name, optimiser in self._optimisers.items():
            moments = under(state.tensors, f"optimiser/{name}/")
            optimiser.load_moments(moments, int(state.numbers["gradient_steps"][name]))
        load_copies(self.policy.published, "policy", state.tensors)
        load_copies(self.policy.critic, "critic", state.tensors)
        self._permutations.set_state(state.tensors["generator/permutations"])
        self._updates = int(state.numbers["updates"])
        # A fixed one is the setting's, which a resumed run may have changed.
        if self.section.kl_target is not None:
            self._kl_coefficient = float(state.numbers["kl_coefficient"])


def _minibatches(order: Index, count: int) -> Iterator[Index]:
    """Nearly equal parts; fewer when there are fewer responses."""
    cuts = edges(len(order), count)
    for start, end in pairwise(cuts):
        yield order[start:end]
