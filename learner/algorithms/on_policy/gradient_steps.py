"""One minibatch: forward pass, both losses, gradient, optimiser.

Without dropout the ratio and its slope come from one pass. With dropout the ratio is that of the policy which
acts, and only the slope goes through a network from which features were dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from learner.algorithms.fast.network import Network
from learner.algorithms.fast.optimiser import FlatAdam
from learner.algorithms.shared.loss import Sloped
from learner.algorithms.shared.rank_group import MinibatchSplit, RankGroup
from learner.algorithms.shared.rows import Rows
from learner.algorithms.shared.schedule import ScheduleValues
from learner.algorithms.shared.sequences import Sequences
from penstock.config.sections.on_policy import OnPolicySection
from penstock.policy.actor_critic import Outputs
from penstock.policy.layers import thinned
from penstock.policy.networks import Inputs
from penstock.policy.policy import Policy

PolicyLoss = Callable[[Tensor, Rows, ScheduleValues], Sloped]
"""Loss of the policy and its slope, given log π_θ of the rows, [m], without gradient."""
ValueLoss = Callable[[Tensor, Rows], Sloped]
"""Loss of the critic and its slope, given the values of the rows, [m], without gradient."""

_RANK_STRIDE: Final = 0x9E3779B1
"""Between the seeds of ranks: no gradient step of one has the seed of another's, also in 32 bits, to which a
generator on the CPU cuts them."""


@dataclass(slots=True)
class GradientRecord:
    """What the gradient steps leave behind, on the device. `rows`, `split`: of the last epoch, as permuted.

    Losses are this rank's shares of the means over all ranks. used: steps of all ranks that gradient steps
    were of. numbers: more metrics.
    """

    policy_losses: list[Tensor] = field(default_factory=list)
    value_losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    log_prob: list[Tensor] = field(default_factory=list)
    rows: Rows | Sequences | None = None
    split: MinibatchSplit | None = None
    used: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


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

    def step(self, rows: Rows, scheduled: ScheduleValues, record: GradientRecord) -> Tensor:
        """Make one gradient step; returns log π_θ of this rank's rows from before the step, [m].

        rows: of a minibatch. scheduled: the numbers of this update. record: what the step adds to.
        """
        section = self._section
        outputs = self._network.outputs(rows.inputs)
        # Without a graph where no gradient goes back through it.
        parameters = outputs.parameters.detach() if self._policy.has_slope else outputs.parameters
        log_prob = self._policy.joint_log_prob(parameters, rows.action)
        before = log_prob.detach()
        surrogate = self._policy_loss(before, rows, scheduled)
        if self._policy.dropouts:
            # The ratio is that of the policy which acts; only its slope goes through a thinned network.
            outputs = self._thinned(rows.inputs)
        error = self._value_loss(outputs.value.detach(), rows)
        by_value = error.slope.mul_(section.value_coefficient)
        by_entropy = -scheduled.entropy_coefficient / rows.total
        slopes = surrogate.slope, by_value, by_entropy
        known = None if self._policy.dropouts else log_prob
        gradient = self._group.sum_(self._gradient(outputs, rows.action, known, slopes))
        record.norms.append(
            self._optimiser.step(gradient, scheduled.learning_rate, section.max_gradient_norm)
        )
        record.policy_losses.append(surrogate.loss)
        record.value_losses.append(error.loss)
        record.used += rows.total
        return before

    def _gradient(
        self,
        outputs: Outputs,
        action: Mapping[str, Tensor],
        log_prob: Tensor | None,
        slopes: tuple[Tensor, Tensor, float],
    ) -> Tensor:
        """Return the gradients of all parameters, flat.

        log_prob: [m] with its graph, where it is there already. slopes: by it, by the value, by each entropy.
        """
        by_log_prob, by_value, by_entropy = slopes
        if self._policy.has_slope:
            parameters = outputs.parameters.detach()
            return self._network.gradient_at(
                self._policy.slope(parameters, action, by_log_prob, by_entropy), by_value
            )
        if log_prob is None:
            log_prob = self._policy.joint_log_prob(outputs.parameters, action)
        built, by_built = [log_prob, outputs.value], [by_log_prob, by_value]
        if by_entropy:
            entropy = self._policy.joint_entropy(outputs.parameters)
            built.append(entropy)
            by_built.append(torch.full_like(entropy, by_entropy))
        return self._network.gradient(built, by_built)

    def _thinned(self, inputs: Inputs) -> Outputs:
        """Return outputs with features dropped.

        Which ones are dropped follows from the count of gradient steps, so a resume repeats them, and from
        the rank: rows of several ranks would otherwise lose the same features.
        """
        seed = self._seed + self._optimiser.steps + self._group.rank * _RANK_STRIDE
        device = inputs.vector.device
        with thinned(self._policy.dropouts, seed, device):
            return self._network.outputs(inputs)
