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
from penstock.learner.algorithms.gradient import FlatAdam
from penstock.learner.algorithms.off_policy.chains import DenseDQN, actor_chain, chain_over
from penstock.learner.algorithms.off_policy.memory import Sample, Transitions
from penstock.learner.algorithms.off_policy.off_policy import OffPolicy, Stepped, Target
from penstock.policy.distributions import EpsilonGreedy
from penstock.policy.networks import Inputs
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
        self._target = Target(policy, self._optimiser, period=section.target_period, rate=section.target_rate)
        self.modules = {"policy": policy, "target": self._target.module}
        self.optimisers, self.targets = {"policy": self._optimiser}, {"target": self._target}
        self._chain = actor_chain(policy, self._optimiser)
        self._passes: dict[int, DenseDQN] = {}

    def scalars(self, progress: float) -> dict[str, float]:
        """Return `epsilon` and `epsilon_spread` (see `penstock.policy.distributions.EpsilonGreedy`)."""
        return {
            "epsilon": epsilon(self.section, progress),
            "epsilon_spread": self.section.epsilon_spread,
        }

    def gradient_step(self, sample: Sample, learning_rate: float) -> Stepped:
        rows = sample.transitions
        values, target = self._values(rows)
        action = rows.action[self._head.path].long().unsqueeze(1)
        value = values.gather(1, action).squeeze(1)
        error, weight = value - target, sample.weight.to(target.dtype)
        loss = huber(error, weight)
        if self._chain is None:
            gradient = self._optimiser.gradient_of(loss)
        else:
            self._passes[len(rows)].learn(action, weight * error.clamp(-1.0, 1.0) / len(rows))
            gradient = self._optimiser.flat_gradient
        norm = self._optimiser.step(gradient, learning_rate, self.section.max_gradient_norm)
        self._target.follow()
        metrics = (loss.detach(), error.detach().abs().mean(), value.detach().mean(), norm)
        return Stepped(error.detach(), dict(zip(METRICS, metrics, strict=True)))

    def _values(self, rows: Transitions) -> tuple[Tensor, Tensor]:
        """Return Q(s, ·), [n, P], with a graph unless the network is a chain, and y, [n]."""
        inputs, following = self.policy.read(rows.observation), self.policy.read(rows.following)
        if self._chain is None:
            values, best, after = self._by_autograd(inputs, following)
        else:
            count = len(rows)
            if count not in self._passes:
                target = chain_over(self._chain, self._target.parameters)
                self._passes = {count: DenseDQN(self._chain, target, count, double=self.section.double)}
            values, best, after = self._passes[count].values(inputs, following)
        value = after.gather(1, best.argmax(1, keepdim=True)).squeeze(1)
        return values, rows.reward.to(value.dtype) + rows.discount.to(value.dtype) * value

    def _by_autograd(self, inputs: Inputs, following: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `DenseDQN.values` returns."""
        values = self.policy.outputs(inputs).parameters
        with torch.no_grad():
            after = self._target.module.outputs(following).parameters
            best = self.policy.outputs(following).parameters if self.section.double else after
        return values, best, after


def epsilon(section: DQNSection, progress: float) -> float:
    """Return ε, which falls linearly from its first value to its last over a share of the run."""
    share = min(1.0, progress / section.epsilon_fraction) if section.epsilon_fraction > 0 else 1.0
    return section.epsilon_initial + share * (section.epsilon_final - section.epsilon_initial)


def huber(error: Tensor, weight: Tensor) -> Tensor:
    """Return mean w · (½ δ² where |δ| ≤ 1, else |δ| − ½) (Huber 1964); error, weight: δ and w, [n]."""
    return (weight * functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
