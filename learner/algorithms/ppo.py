"""Proximal policy optimisation on stale experience: decoupled by default, coupled on request.

One `update` computes π_prox, values and advantages once, then runs epochs of minibatches, and reads
the device once at the end (per epoch only when a target KL is set). Sequence of an update:

    read → values, π_prox → advantages → [epoch: permute → minibatch steps → KL] → finite? → merge normaliser
                                                                                    └ no: everything back
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from learner.algorithm import AlgorithmState, Charged, Update
from learner.algorithms.group import Deal, Share
from learner.algorithms.hardware import Hardware
from learner.algorithms.loss import (
    clip_fraction,
    divergence,
    effective_sample_size,
    explained_variance,
    policy_loss,
    value_loss,
)
from learner.algorithms.network import network_of
from learner.algorithms.optimiser import FlatAdam
from learner.algorithms.preparation import Prepared, Rows, prepare
from learner.algorithms.reward_scale import RewardScale, Scaled
from learner.algorithms.schedule import factor, warmup
from learner.batch import Batch, send
from penstock.policy.policy import Policy
from penstock.runtime.settings import AlgorithmSection
from penstock.wire.schema import TensorRule

METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "gradient_norm",
    "kl_behaviour",
    "kl_proximal",
    "clip_fraction",
    "effective_sample_size",
    "max_ratio",
    "explained_variance",
    "mean_value",
    "learning_rate",
    "clip_range",
    "epochs",
)
"""`kl_behaviour` is KL(μ‖π_θ), `kl_proximal` KL(π_prox‖π_θ), both in nats; they, `clip_fraction`,
`effective_sample_size` and `max_ratio` (π_θ/μ) are of the last epoch, `entropy` (nats) and
`explained_variance` of the batch's start, losses and `gradient_norm` means over gradient steps."""

_KL_TOLERANCE = 1.5
_SUMMED = ("policy_loss", "value_loss", "entropy", "checksum")


@dataclass(slots=True)
class _Trace:
    """What the gradient steps leave behind, on the device. `rows`, `deal`: of the last epoch, as permuted.

    Losses are this rank's shares of the means over all ranks.
    """

    policy_losses: list[Tensor] = field(default_factory=list)
    value_losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    log_prob: list[Tensor] = field(default_factory=list)
    rows: Rows | None = None
    deal: Deal | None = None
    epochs: int = 0


class PPO:
    """An `Algorithm`. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(
        self, policy: Policy, section: AlgorithmSection, *, seed: int, hardware: Hardware | None = None
    ) -> None:
        hardware = hardware or Hardware()
        self.policy = policy
        self.section = section
        self.lock_step = section.staleness == 0
        self.hard_staleness: int | None = section.stale_after or 4 * (section.staleness + 1)
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser, hardware)
        self._group = hardware.group
        self._permutations = torch.Generator().manual_seed(seed)
        self._reward_scale = RewardScale(section.discount, self._group) if section.scale_rewards else None
        self._updates = 0

    @property
    def updates(self) -> int:
        """Applied updates in this model's own lineage."""
        return self._updates

    def requires(self) -> tuple[TensorRule, ...]:
        """Nothing beyond the standard tensors."""
        return ()

    def budget(self, fragment_charge: int) -> int:
        """(S+1)·B; raises ValueError with both numbers when it is below one fragment."""
        budget = (self.section.staleness + 1) * self.section.batch_steps
        if budget < fragment_charge:
            raise ValueError(
                f"algorithm.batch_steps: the budget of {budget} steps is below one fragment of "
                f"{fragment_charge}; raise batch_steps or lower actor.unroll_length or environment.count"
            )
        return budget

    def take(self, pending: Sequence[Charged]) -> int:
        """The fewest fragments whose charges reach B."""
        total = 0
        for count, fragment in enumerate(pending, 1):
            total += fragment.charge
            if total >= self.section.batch_steps:
                return count
        return 0

    def published_modules(self) -> dict[str, nn.Module]:
        """The policy, as `default`."""
        return {"default": self.policy}

    def scalars(self, progress: float) -> dict[str, float]:
        """None."""
        return {}

    def retain_from(self) -> int | None:
        """Nothing behind the settled position."""
        return None

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Consume one batch with all its epochs."""
        share = self._group.share(batch.valid)
        if not share.total:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        rate, clip = self._rate(progress), self._clip(progress)
        with torch.no_grad():
            scaled = self._reward_scale.scale(batch) if self._reward_scale is not None else None
            rewards = scaled.rewards if scaled else batch.reward
            prepared = prepare(self.policy, self._network, self.section, batch, rewards, self._group, share)
        backup = self._optimiser.backup()
        trace = self._train(prepared.rows, share, rate, clip)
        with torch.no_grad():
            finite, metrics = self._measure(prepared, trace, clip)
        if finite:
            self._commit(prepared, scaled)
        else:
            self._optimiser.restore(backup)
        metrics |= {"learning_rate": rate, "clip_range": clip, "epochs": float(trace.epochs)}
        return Update(
            applied=finite,
            reason="" if finite else "nan",
            steps=share.total,
            gradient_steps=len(trace.norms),
            metrics=metrics if finite else {},
        )

    def _rate(self, progress: float) -> float:
        course = factor(self.section.learning_rate_schedule, progress)
        return self.section.learning_rate * course * warmup(self._updates, self.section.warmup_updates)

    def _clip(self, progress: float) -> float:
        return self.section.clip_range * factor(self.section.clip_schedule, progress)

    def _train(self, rows: Rows, share: Share, rate: float, clip: float) -> _Trace:
        trace = _Trace()
        for _ in range(self.section.epochs):
            order = torch.randperm(share.total, generator=self._permutations)
            trace.deal = deal = share.deal(order, self.section.minibatches)
            trace.rows = rows.select(send(deal.index, rows.columns.device))
            parts = trace.rows.cut(own for own, _ in deal.sizes)
            trace.log_prob = [
                self._gradient_step(part, total, rate, clip, trace)
                for part, (_, total) in zip(parts, deal.sizes, strict=True)
            ]
            trace.epochs += 1
            if self._moved_far(trace.rows, trace.log_prob, deal):
                break
        return trace

    def _gradient_step(self, rows: Rows, total: int, rate: float, clip: float, trace: _Trace) -> Tensor:
        """One minibatch of `total` rows on all ranks; returns log-probabilities [m] of these from before."""
        section = self.section
        outputs = self._network.outputs(rows.inputs)
        log_prob = self.policy.joint_log_prob(outputs.parameters, rows.action)
        before = log_prob.detach()
        surrogate = policy_loss(before, rows.anchor, rows.weighted_advantage, clip, total)
        error = value_loss(outputs.value.detach(), rows.target, rows.old_value, section.value_clip, total)
        built = [log_prob, outputs.value]
        slopes = [surrogate.slope, error.slope.mul_(section.value_coefficient)]
        if section.entropy_coefficient:
            entropy = self.policy.joint_entropy(outputs.parameters)
            built.append(entropy)
            slopes.append(torch.full_like(entropy, -section.entropy_coefficient / total))
        gradient = self._group.sum_(self._network.gradient(built, slopes))
        trace.norms.append(self._optimiser.step(gradient, rate, section.max_gradient_norm))
        trace.policy_losses.append(surrogate.loss)
        trace.value_losses.append(error.loss)
        return before

    def _moved_far(self, rows: Rows, log_prob: list[Tensor], deal: Deal) -> bool:
        """KL(π_prox‖π_θ) over the epoch just made exceeds its target; reads the device."""
        target = self.section.target_kl
        if target is None:
            return False
        proximal, now = deal.gather(torch.stack([rows.proximal, torch.cat(log_prob)]))
        return bool(divergence(proximal, now) > _KL_TOLERANCE * target)

    def _measure(self, prepared: Prepared, trace: _Trace, clip: float) -> tuple[bool, dict[str, float]]:
        """The one read of the device: is everything finite, on every rank, and the metrics."""
        rows, deal = trace.rows, trace.deal
        assert rows is not None, "an update has at least one epoch"
        assert deal is not None, "an update has at least one epoch"
        log_prob = deal.gather(torch.cat(trace.log_prob))
        anchor, _, target, old_value, behaviour, proximal = deal.gather(rows.columns)
        tensors = dict(zip(_SUMMED, self._group.sum_(self._summed(prepared, trace)), strict=True))
        tensors |= {
            "gradient_norm": torch.stack(trace.norms).mean(),
            "kl_behaviour": divergence(behaviour, log_prob),
            "kl_proximal": divergence(proximal, log_prob),
            "clip_fraction": clip_fraction(log_prob, anchor, clip),
            "effective_sample_size": effective_sample_size(behaviour, log_prob),
            "max_ratio": (log_prob - behaviour).max().exp(),
            "explained_variance": explained_variance(old_value, target),
            "mean_value": old_value.mean(),
        }
        if prepared.observed is not None:
            tensors["observed"] = prepared.observed.checksum().to(log_prob.dtype)
        numbers = dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
        finite = all(math.isfinite(number) for number in numbers.values())
        return finite, {name: numbers[name] for name in METRICS if name in numbers}

    def _summed(self, prepared: Prepared, trace: _Trace) -> Tensor:
        """What is added up over the ranks, in the order of `_SUMMED`: one that is not finite anywhere is so everywhere."""
        losses = [torch.stack(trace.policy_losses).mean(), torch.stack(trace.value_losses).mean()]
        return torch.stack([*losses, prepared.entropy, self._optimiser.checksum()])

    def _commit(self, prepared: Prepared, scaled: Scaled | None) -> None:
        if prepared.observed is not None and self.policy.normaliser is not None:
            self.policy.normaliser.merge(prepared.observed)
        if scaled is not None and self._reward_scale is not None:
            self._reward_scale.commit(scaled)
        self._updates += 1

    def state(self) -> AlgorithmState:
        """Weights, moments, generator and returns so far; copies."""
        tensors = {
            f"policy/{k}": v.detach().to("cpu", copy=True) for k, v in self.policy.state_dict().items()
        }
        tensors |= {f"optimiser/{name}": moment for name, moment in self._optimiser.moments().items()}
        tensors["generator/permutations"] = self._permutations.get_state()
        if self._reward_scale is not None:
            tensors |= {f"rewards/{k}": v for k, v in self._reward_scale.state().items()}
        numbers = {"updates": self._updates, "gradient_steps": self._optimiser.steps}
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        weights = _under(state.tensors, "policy/")
        own = self.policy.state_dict()
        for name, tensor in own.items():
            if name not in weights or weights[name].shape != tensor.shape:
                raise ValueError(
                    f"policy/{name}: missing or not {tuple(tensor.shape)}; is it the same policy?"
                )
        missing = [key for key in ("updates", "gradient_steps") if key not in state.numbers]
        if missing or "generator/permutations" not in state.tensors:
            raise ValueError(f"algorithm state: {missing or 'generator/permutations'} missing")
        moments_by_name = _under(state.tensors, "optimiser/")
        self._optimiser.load_moments(moments_by_name, int(state.numbers["gradient_steps"]))
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        self._permutations.set_state(state.tensors["generator/permutations"])
        if self._reward_scale is not None:
            self._reward_scale.load(_under(state.tensors, "rewards/"))
        self._updates = int(state.numbers["updates"])


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
