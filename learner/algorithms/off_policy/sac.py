"""Soft actor-critic from replay (Haarnoja et al. 2018b).

It has a squashed Gaussian, twin critics, and a temperature that tunes itself.

A gradient step for a sample of transitions s, a, R, γ', s', in this order:

    temperature   L = −log α · mean(log π(ã|s) + H̄)                        eq. 18, by log α; H̄ = −dim(a)
    critics       y = R + γ' (min_i Q_target,i(s', ã') − α log π(ã'|s'))    eq. 5
                  L = ½ Σ_i mean w (Q_i(s, a) − y)²
    actor         L = mean(α log π(ã|s) − min_i Q_i(s, ã))                  eq. 9
                  ã = tanh(mean + std · noise)
    targets       θ' ← (1 − τ) θ' + τ θ

α is the one from before the step. Only the actor is published; it has no critic of its own, so the value it
returns is 0. Actions in fragments are those before the tanh; critics see them after it.
"""

import math

import torch
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, PolicySection, SACSection
from penstock.learner.algorithms.gradient import FlatAdam
from penstock.learner.algorithms.off_policy.chains import (
    DenseSAC,
    SACChains,
    actor_chain,
    chain_of,
    chain_over,
)
from penstock.learner.algorithms.off_policy.memory import Sample, Transitions
from penstock.learner.algorithms.off_policy.off_policy import OffPolicy, Stepped, Target
from penstock.policy.distributions import ConditionalSquashedGaussian
from penstock.policy.networks import Body, Inputs, Reader, initialise
from penstock.policy.policy import Policy

METRICS = (
    "value_loss", "policy_loss", "entropy", "temperature", "mean_error", "mean_value", "gradient_norm",
)  # fmt: skip
"""Means over gradient steps.

Losses of critics and actor, −log π in nats, α, |y − Q|, Q(s, a) and the norm of the critics' gradient.
"""


_HIDDEN_GAIN = 2.0**0.5


class Temperature(nn.Module):
    """Holds α as its logarithm."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(start)]))

    def forward(self) -> Tensor:
        return self.log.detach().exp().squeeze(0)


class Critic(nn.Module):
    """Computes Q(s, a): the hidden layers of a `Body` over features, vector part and action."""

    def __init__(self, reader: Reader, actions: int, section: PolicySection) -> None:
        super().__init__()
        body = Body(reader, section, extra=actions)
        # By these names checkpoints hold them.
        self.images, self.layers = body.images, body.layers
        self.head = nn.Linear(body.width, 1)

    def forward(self, inputs: Inputs, action: Tensor) -> Tensor:
        """Q [M] of actions [M, A]."""
        seen = [encoder(image) for encoder, image in zip(self.images, inputs.images, strict=True)]
        value: Tensor = self.head(self.layers(torch.cat([inputs.vector, *seen, action], 1)))
        return value.squeeze(1)


class TwinCritics(nn.Module):
    """Two critics, of which the smaller value counts (Fujimoto et al. 2018, section 4.2)."""

    def __init__(self, reader: Reader, actions: int, section: PolicySection, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.both = nn.ModuleList(Critic(reader, actions, section) for _ in range(2))
        for critic in self.both:
            initialise(critic, _HIDDEN_GAIN, generator)
            assert isinstance(critic, Critic)
            initialise(critic.head, 1.0, generator)

    def forward(self, inputs: Inputs, action: Tensor) -> Tensor:
        """Both values [2, M] of actions [M, A]."""
        return torch.stack([critic(inputs, action) for critic in self.both])


class SAC(OffPolicy):
    """Soft actor-critic: an `Algorithm` for continuous actions between bounds."""

    section: SACSection

    def __init__(self, policy: Policy, section: SACSection, *, seed: int) -> None:
        super().__init__(policy, section, seed=seed)
        self._heads = tuple(
            head for head in policy.action_heads if isinstance(head, ConditionalSquashedGaussian)
        )
        if len(self._heads) != len(policy.action_heads):
            raise ConfigurationError(
                f"algorithm.name='sac': action_space={policy.action_space!r} is not made of Boxes alone; use "
                "'dqn' for one Discrete, 'ppo' for any other"
            )
        nn.init.zeros_(policy.critic_head.weight)
        counts = [head.count for head in self._heads]
        self._target_entropy = float(
            -sum(counts) if section.target_entropy is None else section.target_entropy
        )
        layers = PolicySection(hidden_sizes=section.critic_hidden_sizes, activation=section.critic_activation)
        critics = TwinCritics(policy.reader, sum(counts), layers, seed=seed)
        self._critics = critics.to(policy.actor_head.weight)
        self._temperature = Temperature(section.temperature).to(policy.actor_head.weight)
        epsilon = section.adam_epsilon
        self._actor_optimiser = FlatAdam(policy, epsilon)
        self._critic_optimiser = FlatAdam(self._critics, epsilon)
        self._temperature_optimiser = FlatAdam(self._temperature, epsilon)
        self._target = Target(
            self._critics, self._critic_optimiser, period=section.target_period, rate=section.target_rate
        )
        self._noise = torch.Generator().manual_seed(seed)
        self.modules = {
            "policy": policy,
            "critics": self._critics,
            "target": self._target.module,
            "temperature": self._temperature,
        }
        # That of the temperature makes no step where it is not tuned.
        self.optimisers = {
            "policy": self._actor_optimiser,
            "critics": self._critic_optimiser,
            "temperature": self._temperature_optimiser,
        }
        self.targets, self.generators = {"target": self._target}, {"noise": self._noise}
        self._chains = self._chains_of(policy)
        self._passes: dict[int, DenseSAC] = {}

    def _chains_of(self, policy: Policy) -> SACChains | None:
        """Return the networks as chains where actor and critics are dense and on the CPU, else None."""
        critics = [critic for critic in self._critics.both if isinstance(critic, Critic)]
        actor = actor_chain(policy, self._actor_optimiser)
        if len(critics[0].images):
            return None
        both = chain_of(self._critic_optimiser, [[*critic.layers, critic.head] for critic in critics])
        if actor is None or both is None:
            return None
        return SACChains(actor, both, chain_over(both, self._target.parameters))

    def gradient_step(self, sample: Sample, learning_rate: float) -> Stepped:
        if self._chains is not None:
            return self._dense_step(self._chains, sample, learning_rate)
        rows = sample.transitions
        inputs = self.policy.read(rows.observation)
        action, log_prob = self._draw(inputs)
        temperature = self._temperature()
        if self.section.tune_temperature:
            self._tune(log_prob.detach(), learning_rate)
        target = self._targets(rows, temperature)
        value_loss, error, value, norm = self._learn_values(inputs, sample, target, learning_rate)
        policy_loss = (temperature * log_prob - self._critics(inputs, action).amin(0)).mean()
        self._descend(self._actor_optimiser, policy_loss, learning_rate)
        self._target.follow()
        losses = (value_loss, policy_loss.detach(), -log_prob.detach().mean(), temperature)
        metrics = dict(zip(METRICS, (*losses, error.abs().mean(), value.mean(), norm), strict=True))
        return Stepped(error, metrics)

    @torch.no_grad()
    def _dense_step(self, chains: SACChains, sample: Sample, learning_rate: float) -> Stepped:
        """Do as `gradient_step` without a graph."""
        rows, count = sample.transitions, len(sample.transitions)
        if count not in self._passes:
            self._passes = {count: DenseSAC(chains, self._heads, count)}
        dense, limit = self._passes[count], self.section.max_gradient_norm
        vector, following = (self.policy.read(row).vector for row in (rows.observation, rows.following))
        temperature = self._temperature()
        noise = torch.cat([self._noise_of(count), self._noise_of(count)])
        drawn = dense.draw(vector, following, noise)
        log_prob = drawn.log_prob[:count]
        if self.section.tune_temperature:
            self._tune(log_prob, learning_rate)
        after = dense.following(drawn, float(temperature))
        target = rows.reward.to(after.dtype) + rows.discount.to(after.dtype) * after
        value = dense.values(self._taken(rows, target))
        error, mean = value - target, value.mean()
        weighted = sample.weight.to(target.dtype) * error
        value_loss = 0.5 * (weighted * error).mean(1).sum()
        dense.learn_values(weighted / count)
        optimiser = self._critic_optimiser
        norm = optimiser.step(optimiser.flat_gradient, learning_rate, limit)
        policy_loss = (temperature * log_prob - dense.descend(drawn, float(temperature))).mean()
        self._actor_optimiser.step(self._actor_optimiser.flat_gradient, learning_rate, limit)
        self._target.follow()
        losses = (value_loss, policy_loss, -log_prob.mean(), temperature)
        error = error.mean(0)
        metrics = dict(zip(METRICS, (*losses, error.abs().mean(), mean, norm), strict=True))
        return Stepped(error, metrics)

    def _noise_of(self, count: int) -> Tensor:
        """Return normal draws [count, A], head by head."""
        dtype = self.policy.dtype
        sizes = [(count, head.count) for head in self._heads]
        return torch.cat([torch.randn(size, generator=self._noise, dtype=dtype) for size in sizes], 1)

    def _taken(self, rows: Transitions, target: Tensor) -> Tensor:
        """Return the actions that were taken, [n, A] in (−1, 1)."""
        taken = [rows.action[head.path].reshape(len(target), -1).to(target.dtype) for head in self._heads]
        return torch.cat(taken, 1).tanh()

    def _draw(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Draw actions [n, A] in (−1, 1), and their log-probabilities [n], differentiable."""
        parameters = self.policy.outputs(inputs).parameters
        drawn = {}
        for head, (_, part) in zip(self._heads, self.policy.pieces(parameters), strict=True):
            mean, log_std = head.split(part)
            noise = torch.randn(mean.shape, generator=self._noise, dtype=mean.dtype).to(mean.device)
            drawn[head.path] = mean + log_std.exp() * noise
        return torch.cat([*drawn.values()], 1).tanh(), self.policy.joint_log_prob(parameters, drawn)

    def _tune(self, log_prob: Tensor, learning_rate: float) -> None:
        """Take one step of the temperature; its loss is linear in log α, so the gradient is a mean."""
        gradient = self._temperature_optimiser.flat_gradient
        gradient.copy_(-(log_prob + self._target_entropy).mean())
        self._temperature_optimiser.step(gradient, learning_rate, 0.0)

    @torch.no_grad()
    def _targets(self, rows: Transitions, temperature: Tensor) -> Tensor:
        """Return y, [n]."""
        inputs = self.policy.read(rows.following)
        action, log_prob = self._draw(inputs)
        value: Tensor = self._target.module(inputs, action).amin(0) - temperature * log_prob
        return rows.reward.to(value.dtype) + rows.discount.to(value.dtype) * value

    def _learn_values(
        self, inputs: Inputs, sample: Sample, target: Tensor, learning_rate: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take one step of the critics; loss, mean error and mean value of both [n], norm of the gradient."""
        value = self._critics(inputs, self._taken(sample.transitions, target))
        error = value - target
        loss = 0.5 * (sample.weight.to(target.dtype) * error.square()).mean(1).sum()
        norm = self._descend(self._critic_optimiser, loss, learning_rate)
        return loss.detach(), error.detach().mean(0), value.detach().mean(0), norm

    def _descend(self, optimiser: FlatAdam, loss: Tensor, learning_rate: float) -> Tensor:
        return optimiser.step(optimiser.gradient_of(loss), learning_rate, self.section.max_gradient_norm)
