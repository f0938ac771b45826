"""One minibatch: forward pass, both losses, gradient, optimiser.

Without dropout the ratio and its slope come from one pass. With dropout the ratio is that of the policy which
acts, and only the slope goes through a network from which features were dropped.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.config.sections.on_policy import OnPolicySection
from penstock.learner.algorithms.fast.network import Network
from penstock.learner.algorithms.fast.optimiser import FlatAdam
from penstock.learner.algorithms.shared.loss import Sloped
from penstock.learner.algorithms.shared.rank_group import MinibatchSplit, RankGroup
from penstock.learner.algorithms.shared.rows import Rows
from penstock.learner.algorithms.shared.schedule import ScheduleValues
from penstock.learner.algorithms.shared.sequences import Sequences
from penstock.policy.layers import thinned
from penstock.policy.networks import Inputs
from penstock.policy.numbers import Numbers
from penstock.policy.policy import Policy

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
