"""Deep Q-networks from replay: double, dueling, n-step, prioritised, with a target network.

A gradient step (Mnih et al. 2015, algorithm 1, for a sample of transitions s, a, R, γ', s'):

    a* = argmax_a Q(s', a)              double (van Hasselt et al. 2016, eq. 4); else of the target network
    y  = R + γ' Q_target(s', a*)        R over n steps, γ' = γ^n or 0 where the episode terminated
    δ  = Q(s, a) − y
    L  = mean w · huber(δ)              w: importance weights of prioritised replay, else 1

Dueling streams are the policy's (`penstock.policy.policy.QPolicy`).
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.config.settings import ConfigurationError, DQNSection
from penstock.learner.algorithms.gradient import FlatAdam, network_of
from penstock.learner.algorithms.off_policy.memory import Sample, Transitions
from penstock.learner.algorithms.off_policy.off_policy import OffPolicy, Stepped, Target
from penstock.policy.distributions import EpsilonGreedy
from penstock.policy.policy import Policy

METRICS = ("value_loss", "mean_error", "mean_value", "gradient_norm")
"""Means over gradient steps: the loss, |δ| and Q(s, a), and the gradient's norm before it is clipped."""


class DQN(OffPolicy):
    """Deep Q-network: an `Algorithm` for one choice of n."""

    section: DQNSection

    def __init__(self, policy: Policy, section: DQNSection, *, seed: int) -> None:
        super().__init__(policy, section, seed=seed)
        if [type(head) for head in policy.action_heads] != [EpsilonGreedy]:
            raise ConfigurationError(
                f"algorithm.name='dqn': action_space={policy.action_space!r} is not one Discrete; use 'sac' "
                "for a Box with bounds, 'ppo' for any other"
            )
        (self._head,) = policy.action_heads
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser)
        self._target = Target(policy, self._optimiser, period=section.target_period, rate=section.target_rate)
        self.modules = {"policy": policy, "target": self._target.module}
        self.optimisers, self.targets = {"policy": self._optimiser}, {"target": self._target}

    def scalars(self, progress: float) -> dict[str, float]:
        """Return `epsilon` and `epsilon_spread` (see `penstock.policy.distributions.EpsilonGreedy`)."""
        return {
            "epsilon": epsilon(self.section, progress),
            "epsilon_spread": self.section.epsilon_spread,
        }

    def gradient_step(self, sample: Sample, learning_rate: float) -> Stepped:
        rows = sample.transitions
        target = self._targets(rows)
        outputs = self._network.outputs(self.policy.read(rows.observation))
        action = rows.action[self._head.path].long().unsqueeze(1)
        value = outputs.parameters.gather(1, action).squeeze(1)
        error = value - target
        loss = huber(error, sample.weight.to(error.dtype))
        gradient = self._network.gradient(loss)
        norm = self._optimiser.step(gradient, learning_rate, self.section.max_gradient_norm)
        self._target.follow()
        metrics = (loss.detach(), error.detach().abs().mean(), value.detach().mean(), norm)
        return Stepped(error.detach(), dict(zip(METRICS, metrics, strict=True)))

    @torch.no_grad()
    def _targets(self, rows: Transitions) -> Tensor:
        """Return y, [n]."""
        inputs = self.policy.read(rows.following)
        following = self._target.module.outputs(inputs).parameters
        chosen = self._network.outputs(inputs).parameters if self.section.double else following
        value = following.gather(1, chosen.argmax(1, keepdim=True)).squeeze(1)
        return rows.reward.to(value.dtype) + rows.discount.to(value.dtype) * value


def epsilon(section: DQNSection, progress: float) -> float:
    """Return ε, which falls linearly from its first value to its last over a share of the run."""
    share = min(1.0, progress / section.epsilon_fraction) if section.epsilon_fraction > 0 else 1.0
    return section.epsilon_initial + share * (section.epsilon_final - section.epsilon_initial)


def huber(error: Tensor, weight: Tensor) -> Tensor:
    """Return mean w · (½ δ² where |δ| ≤ 1, else |δ| − ½) (Huber 1964); error, weight: δ and w, [n]."""
    return (weight * functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
