"""Gradient steps from replay by hand, where the networks are chains of linear layers on the CPU.

The same numbers as `dqn.DQN` and `sac.SAC` compute by autograd, up to rounding: every buffer and call is made
once, both critics are one stack, and the actor's loss goes back through the smaller critic alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.learner.algorithms.gradient import (
    Call,
    FlatAdam,
    Hidden,
    Linear,
    hidden_backward,
    hidden_forward,
)
from penstock.policy.acting.drawing import HALF_LOG_TWO_PI, LOG_STD_RANGE
from penstock.policy.distributions import ConditionalSquashedGaussian as SquashedHead
from penstock.policy.distributions import log_tanh_slope
from penstock.policy.networks import Inputs, masked
from penstock.policy.policy import Policy

_SLOPES: Final[dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: partial(torch.ops.aten.threshold_backward.default, threshold=0.0),
    nn.Tanh: torch.ops.aten.tanh_backward.default,
}
"""From ∂/∂y and y of an activation to ∂/∂x."""


@dataclass(frozen=True, slots=True)
class Chain:
    """K chains of linear layers, stacked, with an activation behind all but the last. inputs: D."""

    hidden: Sequence[Hidden]
    last: Linear
    inputs: int


def chain_of(optimiser: FlatAdam, chains: Sequence[Sequence[nn.Module]]) -> Chain | None:
    """Return chains of one shape, of modules that `optimiser` owns; None for other layers than linear ones.

    Behind each linear layer but the last is tanh or ReLU.
    """
    columns: list[Any] = list(zip(*chains, strict=True))
    is_dense = all(
        isinstance(module, nn.Tanh | nn.ReLU if number % 2 else nn.Linear)
        for number, column in enumerate(columns)
        for module in column
    )
    if not is_dense or optimiser.parameters.device.type != "cpu":
        return None
    hidden = [
        Hidden(Linear.of(optimiser, layers), type(activations[0]))
        for layers, activations in zip(columns[:-1:2], columns[1::2], strict=True)
    ]
    return Chain(hidden, Linear.of(optimiser, columns[-1]), columns[0][0].in_features)


def actor_chain(policy: Policy, optimiser: FlatAdam) -> Chain | None:
    """Return body and head of the actor as one chain, where its outputs are those of a chain on the CPU."""
    body = policy.actor_body.chain
    if body is None or policy.combines_heads:
        return None
    return chain_of(optimiser, [[*body, policy.actor_head]])


def chain_over(chain: Chain, flat: Tensor) -> Chain:
    """Return the chain with the weights of `flat`, which are in the same order; its gradients are unused."""

    def moved(linear: Linear) -> Linear:
        both = (linear.weight, linear.bias)
        weight, bias = (flat.as_strided(one.shape, one.stride(), one.storage_offset()) for one in both)
        return Linear(weight, bias, linear.weight_gradient, linear.bias_gradient)

    hidden = [Hidden(moved(layer.linear), layer.activation) for layer in chain.hidden]
    return Chain(hidden, moved(chain.last), chain.inputs)


class ChainPass:
    """Forward and backward over M rows: fill `rows` [M, D], call `forward`, fill `slopes` [K, L, P], go back.

    outputs: [K, M, P], valid until the next `forward`. Only the first L = `learned` rows go back, once.
    """

    def __init__(self, chain: Chain, count: int, learned: int = 0) -> None:
        stack, last = len(chain.last.weight), chain.last
        self._chain = chain
        self.rows = last.weight.new_zeros(count, chain.inputs)
        self._features = [self.rows.expand(stack, count, chain.inputs)]
        self._forward: list[Call] = []
        for layer in chain.hidden:
            after = self.rows.new_empty(stack, count, layer.linear.bias.shape[-1])
            self._forward += hidden_forward(layer, self._features[-1], after)
            self._features.append(after)
        self.outputs = self.rows.new_empty(stack, count, last.bias.shape[-1])
        bias, weight = last.bias.unsqueeze(1), last.weight.transpose(1, 2)
        self._forward.append(partial(torch.baddbmm, bias, self._features[-1], weight, out=self.outputs))
        self.slopes = torch.zeros_like(self.outputs[:, :learned])
        self._backward = self._calls_back(learned) if learned else []

    def _calls_back(self, learned: int) -> list[Call]:
        last, features = self._chain.last, [feature[:, :learned] for feature in self._features]
        slopes, weight = self.slopes, last.weight
        calls: list[Call] = [
            partial(torch.sum, slopes, 1, out=last.bias_gradient),
            partial(torch.bmm, slopes.transpose(1, 2), features[-1], out=last.weight_gradient),
        ]
        for layer, before, after in zip(
            reversed(self._chain.hidden), features[-2::-1], features[:0:-1], strict=True
        ):
            delta = torch.empty_like(after)
            calls.append(partial(torch.bmm, slopes, weight, out=delta))
            calls += hidden_backward(layer, before, after, delta)
            slopes, weight = delta, layer.linear.weight
        return calls

    def forward(self) -> Tensor:
        for call in self._forward:
            call()
        return self.outputs

    def backward(self) -> None:
        """Write the gradients of all weights for the slopes of the outputs."""
        for call in self._backward:
            call()

    def by_rows(self, chosen: Tensor, slope: float, start: int) -> Tensor:
        """Return ∂/∂rows [M, start:D] of the sum of slope · the single output of chain `chosen` [M] of each.

        Only rows of the chain that was chosen go back through it.
        """
        result = self.rows.new_empty(len(self.rows), self._chain.inputs - start)
        for number in range(len(self.outputs)):
            index = (chosen == number).nonzero().squeeze(1)
            if len(index):
                result[index] = self._by_rows_of(number, index, slope)[:, start:]
        return result

    def _by_rows_of(self, number: int, index: Tensor, slope: float) -> Tensor:
        delta = (self._chain.last.weight[number] * slope).expand(len(index), -1)
        for layer, feature in zip(reversed(self._chain.hidden), reversed(self._features[1:]), strict=True):
            after = feature[number].index_select(0, index)
            delta = torch.mm(_SLOPES[layer.activation](delta, after), layer.linear.weight[number])
        return delta


class DenseDQN:
    """The passes of a gradient step over M rows; both parts of it in turn."""

    def __init__(self, online: Chain, target: Chain, count: int, *, double: bool) -> None:
        self._count, self._double = count, double
        self._online = ChainPass(online, 2 * count if double else count, count)
        self._target = ChainPass(target, count)
        self._forbidden: Tensor | None = None

    def values(self, inputs: Inputs, following: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q(s, ·), what chooses a*, and Q_target(s', ·), [M, P] each."""
        self._forbidden = inputs.forbidden
        seen = [inputs.vector, following.vector] if self._double else [inputs.vector]
        torch.cat(seen, out=self._online.rows)
        self._target.rows.copy_(following.vector)
        values = self._online.forward()[0]
        after = masked(self._target.forward()[0], following.forbidden)
        best = masked(values[self._count :], following.forbidden) if self._double else after
        return masked(values[: self._count], inputs.forbidden), best, after

    def learn(self, action: Tensor, slope: Tensor) -> None:
        """Write the gradient for ∂L/∂Q(s, a), [M], of the actions int64 [M, 1]."""
        slopes = self._online.slopes[0].zero_().scatter_(1, action, slope.unsqueeze(1))
        if self._forbidden is not None:
            slopes.masked_fill_(self._forbidden, 0.0)
        self._online.backward()


class DrawnActions:
    """Actions that were drawn from an actor's outputs, and their slopes.

    action: tanh u, [M, A].  log_prob: log π, [M].
    """

    def __init__(self, heads: Sequence[SquashedHead], parameters: Tensor, noise: Tensor) -> None:
        """parameters: outputs of the actor, [M, 2 A], head by head.  noise: normal draws, [M, A]."""
        self._counts = [head.count for head in heads]
        halves = parameters.split([count for count in self._counts for _ in range(2)], 1)
        raw = torch.cat(halves[1::2], 1) + heads[0].initial_log_std
        log_std = raw.clamp(*LOG_STD_RANGE)
        self._is_free = (raw == log_std).to(raw.dtype)
        self._spread = log_std.exp() * noise
        drawn = torch.cat(halves[::2], 1) + self._spread
        self.action = drawn.tanh()
        constant = HALF_LOG_TWO_PI * noise.shape[1]
        self.log_prob = -(0.5 * noise.square() + log_std + log_tanh_slope(drawn)).sum(1) - constant

    def by_parameters(self, by_action: Tensor, by_log_prob: float) -> Tensor:
        """Return ∂L/∂parameters [L, 2 A] of the first L rows from ∂L/∂action [L, A] and ∂L/∂log π of each.

        ∂a/∂u = 1 − a², ∂log π/∂u = 2 a, ∂log π/∂log σ = −1; u = μ + σ ε.
        """
        action, spread, is_free = (
            each[: len(by_action)] for each in (self.action, self._spread, self._is_free)
        )
        by_drawn = by_action * (1.0 - action.square()) + action * (2.0 * by_log_prob)
        by_log_std = (by_drawn * spread - by_log_prob) * is_free
        if len(self._counts) == 1:
            return torch.cat([by_drawn, by_log_std], 1)
        pieces = zip(by_drawn.split(self._counts, 1), by_log_std.split(self._counts, 1), strict=True)
        return torch.cat([part for pair in pieces for part in pair], 1)


@dataclass(frozen=True, slots=True)
class SACChains:
    """The networks of SAC as chains; the critics of both kinds are stacks of two."""

    actor: Chain
    critics: Chain
    target: Chain


class DenseSAC:
    """The passes of a gradient step over M rows; each method is one part of the step."""

    def __init__(self, chains: SACChains, heads: Sequence[SquashedHead], count: int) -> None:
        self._heads, self._count, self._seen = heads, count, chains.actor.inputs
        self._actor = ChainPass(chains.actor, 2 * count, count)
        self._critics, self._target = ChainPass(chains.critics, count, count), ChainPass(chains.target, count)

    def draw(self, vector: Tensor, following: Tensor, noise: Tensor) -> DrawnActions:
        """Draw actions for observations and those that follow, [M, D] each; noise: [2 M, A].

        `descend` goes back through the first half.
        """
        torch.cat([vector, following], out=self._actor.rows)
        self._critics.rows[:, : self._seen], self._target.rows[:, : self._seen] = vector, following
        return DrawnActions(self._heads, self._actor.forward()[0], noise)

    def following(self, drawn: DrawnActions, temperature: float) -> Tensor:
        """Return min_i Q_target,i(s', ã') − α log π(ã'|s'), [M]."""
        value = self._values(self._target, drawn.action[self._count :])
        return torch.minimum(value[0], value[1]).sub_(drawn.log_prob[self._count :], alpha=temperature)

    def values(self, action: Tensor) -> Tensor:
        """Return both values [2, M] of actions [M, A]; `learn_values` goes back through this pass."""
        return self._values(self._critics, action)

    def learn_values(self, by_value: Tensor) -> None:
        """Write the gradient of the critics for ∂L/∂Q [2, M]."""
        self._critics.slopes[..., 0] = by_value
        self._critics.backward()

    def descend(self, drawn: DrawnActions, temperature: float) -> Tensor:
        """Write the gradient of the actor's loss; returns the smaller value of each row, [M]."""
        smaller, chosen = self.values(drawn.action[: self._count]).min(0)
        by_action = self._critics.by_rows(chosen, -1.0 / self._count, self._seen)
        self._actor.slopes[0] = drawn.by_parameters(by_action, temperature / self._count)
        self._actor.backward()
        return smaller

    def _values(self, critics: ChainPass, action: Tensor) -> Tensor:
        critics.rows[:, self._seen :] = action
        return critics.forward()[..., 0]
