"""The skeleton of algorithms that learn from each batch once and forget it.

It has what they share: batches and budget, an update that leaves no trace when it fails, metrics, and what
a checkpoint holds. The algorithm itself says how advantages are estimated, what they weigh in the
surrogate, and which gradient steps are made with which loss:

    read → values, log π → `_advantages` → `_surrogate` → `_train`: `_policy_loss`, `_value_loss` → finite?
                                                        merge the statistics ←  yes ┘   └ no: everything back

An update reads the device once, at its end.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from learner.algorithm import AlgorithmState, Charged, Retained, Settles, Update
from learner.algorithms.advantage import Advantages, Unrolls
from learner.algorithms.loss import (
    Sloped,
    Surrogate,
    divergence,
    effective_sample_size,
    explained_variance,
    standardise,
    value_loss,
)
from learner.algorithms.network import network_of
from learner.algorithms.optimiser import FlatAdam
from learner.algorithms.preparation import Prepared, prepare
from learner.algorithms.reward_scale import RewardScale, Scaled
from learner.algorithms.rows import Rows, Steps
from learner.algorithms.schedule import decayed, factor, warmup
from learner.algorithms.sequences import Sequences
from learner.batch import Batch
from penstock.policy.layers import Measured, measure, thinned
from penstock.policy.networks import Inputs
from penstock.policy.policy import Outputs, Policy
from penstock.runtime.settings import OnPolicySection
from penstock.wire.schema import TensorRule

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
over gradient steps."""

Own = TypeVar("Own", bound=OnPolicySection)
Course = Mapping[str, float]
"""The scheduled numbers of one update, by the name of their metric."""


@dataclass(slots=True)
class Trace:
    """What the gradient steps leave behind, on the device. `rows`: of the last epoch, as permuted.

    numbers: more metrics.
    """

    policy_losses: list[Tensor] = field(default_factory=list)
    value_losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    log_prob: list[Tensor] = field(default_factory=list)
    rows: Rows | Sequences | None = None
    numbers: dict[str, float] = field(default_factory=dict)


class OnPolicy(ABC, Generic[Own]):
    """An `Algorithm`. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(self, policy: Policy, section: Own, *, seed: int) -> None:
        self.policy = policy
        self.section = section
        self.lock_step = section.lock_step
        self.settles = Settles.ON_PUBLISH
        self.hard_staleness: int | None = section.stale_after or 4 * (section.staleness + 1)
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser)
        self._seed = seed
        self._permutations = torch.Generator().manual_seed(seed)
        self._reward_scale = RewardScale(section.discount) if section.scale_rewards else None
        self._updates = 0

    # ---- what an algorithm says of itself

    @abstractmethod
    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        """Once per batch. log_ratios: log π/μ with the policy at the start of the batch, [T, B]."""

    @abstractmethod
    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        """Once per batch. log μ, log π at the start of the batch, advantages: [n]."""

    @abstractmethod
    def _policy_loss(self, log_prob: Tensor, rows: Rows, course: Course) -> Sloped:
        """Of a gradient step. log_prob: log π_θ, [m], without gradient."""

    def _value_loss(self, value: Tensor, rows: Rows) -> Sloped:
        """Of a gradient step. value: [m], without gradient."""
        return value_loss(value, rows.target, rows.old_value, None)

    def _train(self, batch: Batch, prepared: Prepared, course: Course) -> Trace:
        """One gradient step on the whole batch."""
        trace = Trace(rows=prepared.rows)
        trace.log_prob = [self._gradient_step(rows, course, trace) for rows in prepared.rows.cut(1)]
        return trace

    def _trained(self, batch: Batch) -> Tensor:
        """Which steps enter the losses, bool [T, B]."""
        return batch.valid

    def _course(self, progress: float) -> dict[str, float]:
        section = self.section
        rise = warmup(self._updates, section.warmup_updates)
        return {
            "learning_rate": section.learning_rate * factor(section.learning_rate_schedule, progress) * rise,
            "entropy_coefficient": decayed(
                section.entropy_coefficient, section.entropy_decay, section.entropy_floor, self._updates
            ),
        }

    def _watch(self, batch: Batch, rows: Steps, log_prob: Tensor, course: Course) -> dict[str, Tensor]:
        """More metrics, of the last epoch, scalars on the device."""
        return {}

    # ---- batches

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

    def retains(self, fragment_bytes: int) -> Retained:
        """Nothing."""
        return Retained()

    def recall(self, batch: Batch) -> None:
        """Never asked: it retains nothing."""

    def end_recall(self) -> int:
        """Nothing was needed."""
        return 0

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Consume one batch with all its gradient steps."""
        trained = self._trained(batch)
        if not bool(trained.any()):
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        course = self._course(progress)
        with torch.no_grad():
            scaled = self._reward_scale.scale(batch) if self._reward_scale is not None else None
            rewards = scaled.rewards if scaled else batch.reward
            prepared = self.prepare(batch, rewards, trained)
        if not len(prepared.rows):
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        backup = self._optimiser.backup()
        trace = self._train(batch, prepared, course)
        activations = measure(self.policy, lambda: self.policy.bodies(prepared.rows.alone()))
        with torch.no_grad():
            finite, metrics = self._measure(batch, prepared, activations, trace, course)
        if finite:
            self._commit(prepared, activations, scaled, metrics)
        else:
            self._optimiser.restore(backup)
        return Update(
            applied=finite,
            reason="" if finite else "nan",
            steps=prepared.rows.steps,
            gradient_steps=len(trace.norms),
            metrics=metrics if finite else {},
        )

    def prepare(self, batch: Batch, rewards: Tensor, trained: Tensor) -> Prepared:
        """What is computed once per batch; call it without gradients. See `preparation.prepare`."""
        return prepare(self.policy, self._network, batch, rewards, trained, self._advantages, self._weigh)

    def _weigh(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        chosen = standardise(advantage) if self.section.normalise_advantages else advantage
        return self._surrogate(behaviour, proximal, chosen)

    def _gradient_step(self, rows: Rows, course: Course, trace: Trace) -> Tensor:
        """One minibatch; returns its log-probabilities [m] from before the step."""
        section = self.section
        outputs = self._network.outputs(rows.inputs)
        log_prob = self.policy.joint_log_prob(outputs.parameters, rows.action)
        before = log_prob.detach()
        surrogate = self._policy_loss(before, rows, course)
        if self.policy.dropouts:
            # The ratio is that of the policy which acts; only its slope goes through a thinned network.
            outputs = self._thinned(rows.inputs)
            log_prob = self.policy.joint_log_prob(outputs.parameters, rows.action)
        error = self._value_loss(outputs.value.detach(), rows)
        built = [log_prob, outputs.value]
        slopes = [surrogate.slope, error.slope.mul_(section.value_coefficient)]
        coefficient = course["entropy_coefficient"]
        if coefficient:
            entropy = self.policy.joint_entropy(outputs.parameters)
            built.append(entropy)
            slopes.append(torch.full_like(entropy, -coefficient / len(entropy)))
        gradient = self._network.gradient(built, slopes)
        trace.norms.append(self._optimiser.step(gradient, course["learning_rate"], section.max_gradient_norm))
        trace.policy_losses.append(surrogate.loss)
        trace.value_losses.append(error.loss)
        return before

    def _thinned(self, inputs: Inputs) -> Outputs:
        """Outputs with features dropped; which ones follows from the count of gradient steps, so a resume repeats them."""
        seed, device = self._seed + self._optimiser.steps, inputs.vector.device
        with thinned(self.policy.dropouts, seed, device):
            return self._network.outputs(inputs)

    def _measure(
        self, batch: Batch, prepared: Prepared, activations: Measured | None, trace: Trace, course: Course
    ) -> tuple[bool, dict[str, float]]:
        """The one read of the device: is everything finite, and the metrics."""
        rows = trace.rows
        assert rows is not None, "an update has at least one epoch"
        log_prob = torch.cat(trace.log_prob)
        tensors = {
            "policy_loss": torch.stack(trace.policy_losses).mean(),
            "value_loss": torch.stack(trace.value_losses).mean(),
            "gradient_norm": torch.stack(trace.norms).mean(),
            "entropy": prepared.entropy,
            "kl_behaviour": divergence(rows.behaviour, log_prob),
            "effective_sample_size": effective_sample_size(rows.behaviour, log_prob),
            "max_ratio": (log_prob - rows.behaviour).max().exp(),
            "explained_variance": explained_variance(rows.old_value, rows.target),
            "mean_value": rows.old_value.mean(),
            **self._watch(batch, rows, log_prob, course),
        }
        judged = {"optimiser": self._optimiser.checksum()}
        if prepared.observed is not None:
            judged["observed"] = prepared.observed.checksum().to(log_prob.dtype)
        if activations is not None:
            judged["activations"] = activations.checksum().to(log_prob.dtype)
        numbers = torch.stack([*tensors.values(), *judged.values()]).tolist()
        metrics = dict(zip(tensors, numbers, strict=False))
        return all(map(math.isfinite, numbers)), {**metrics, **course, **trace.numbers}

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
