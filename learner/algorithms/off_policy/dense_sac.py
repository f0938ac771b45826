"""A gradient step of SAC by hand, where actor and critics are chains of linear layers on the CPU.

The same numbers as `sac.SAC` computes by autograd, up to rounding, in two thirds of the time: both critics
are one stack, every buffer is made once, and the actor's loss goes back through the smaller critic alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.learner.algorithms.gradient import FlatAdam, Hidden, Linear, hidden_backward, hidden_forward
from penstock.policy.acting.drawing import HALF_LOG_TWO_PI, LOG_STD_RANGE
from penstock.policy.distributions import ConditionalSquashedGaussian as SquashedHead
from penstock.policy.distributions import log_tanh_slope


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


def chain_over(chain: Chain, flat: Tensor) -> Chain:
    """Return the chain with the weights of `flat`, which are in the same order; its gradients are unused."""

    def moved(linear: Linear) -> Linear:
        both = (linear.weight, linear.bias)
        weight, bias = (flat.as_strided(one.shape, one.stride(), one.storage_offset()) for one in both)
        return Linear(weight, bias, linear.weight_gradient, linear.bias_gradient)

    hidden = [Hidden(moved(layer.linear), layer.activation) for layer in chain.hidden]
    return Chain(hidden, moved(chain.last), chain.inputs)


class ChainPass:
    """Forward and backward over M rows: fill `rows` [M, D], call `forward`, fill `slopes` [K, M, P], go back.

    outputs: [K, M, P], valid until the next `forward`. A backward pass uses up the features.
    """

    def __init__(self, chain: Chain, count: int) -> None:
        stack = len(chain.last.weight)
        flat = chain.last.weight
        self._chain = chain
        self.rows = flat.new_zeros(count, chain.inputs)
        self._features = [self.rows.expand(stack, count, chain.inputs)]
        calls = []
        for layer in chain.hidden:
            after = flat.new_empty(stack, count, layer.linear.bias.shape[-1])
            calls += hidden_forward(layer, self._features[-1], after)
            self._features.append(after)
        self._forward = calls
        self.outputs = flat.new_empty(stack, count, chain.last.bias.shape[-1])
        self.slopes = torch.zeros_like(self.outputs)
        self._deltas = [torch.empty_like(feature) for feature in self._features[1:]]
        self._backward = [
            hidden_backward(layer, before, after, delta)
            for layer, before, after, delta in zip(
                chain.hidden, self._features, self._features[1:], self._deltas, strict=False
            )
        ]

    def forward(self) -> Tensor:
        for call in self._forward:
            call()
        last = self._chain.last
        return torch.baddbmm(
            last.bias.unsqueeze(1), self._features[-1], last.weight.transpose(1, 2), out=self.outputs
        )

    def backward(self) -> None:
        """Write the gradients of all weights for the slopes of the outputs."""
        last = self._chain.last
        torch.sum(self.slopes, 1, out=last.bias_gradient)
        torch.bmm(self.slopes.transpose(1, 2), self._features[-1], out=last.weight_gradient)
        weight, slopes = last.weight, self.slopes
        for number in reversed(range(len(self._deltas))):
            torch.bmm(slopes, weight, out=self._deltas[number])
            for call in self._backward[number]:
                call()
            slopes, weight = self._deltas[number], self._chain.hidden[number].linear.weight

    def by_rows(self, chosen: Tensor, slope: float) -> Tensor:
        """Return ∂/∂rows [M, D] of the sum of slope · the single output of chain `chosen` [M] of each row.

        Only rows of the chain that was chosen go back through it.
        """
        result = torch.empty_like(self.rows)
        for number in range(len(self.outputs)):
            index = (chosen == number).nonzero().squeeze(1)
            if len(index):
                result[index] = self._by_rows_of(number, index, slope)
        return result

    def _by_rows_of(self, number: int, index: Tensor, slope: float) -> Tensor:
        layers = [layer.linear.weight[number] for layer in self._chain.hidden]
        delta = (self._chain.last.weight[number] * slope).expand(len(index), -1)
        for layer, feature, weight in zip(
            reversed(self._chain.hidden), reversed(self._features[1:]), reversed(layers), strict=True
        ):
            after = feature[number].index_select(0, index)
            by_activation = (
                (after > 0).to(after.dtype) if layer.activation is nn.ReLU else 1.0 - after.square()
            )
            delta = torch.mm(delta * by_activation, weight)
        return delta


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
        """Return ∂L/∂parameters [M, 2 A] from ∂L/∂action [M, A] and ∂L/∂log π of every row.

        ∂a/∂u = 1 − a², ∂log π/∂u = 2 a, ∂log π/∂log σ = −1; u = μ + σ ε.
        """
        by_drawn = by_action * (1.0 - self.action.square()) + self.action * (2.0 * by_log_prob)
        by_log_std = (by_drawn * self._spread - by_log_prob) * self._is_free
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
        self._heads, self._count = heads, count
        self._actor, self._next_actor = ChainPass(chains.actor, count), ChainPass(chains.actor, count)
        self._critics, self._target = ChainPass(chains.critics, count), ChainPass(chains.target, count)
        self._seen = chains.actor.inputs

    def draw(self, vector: Tensor, noise: Tensor) -> DrawnActions:
        """Draw actions for observations [M, D]; `descend` goes back through this pass."""
        self._actor.rows.copy_(vector)
        return DrawnActions(self._heads, self._actor.forward()[0], noise)

    def following(self, vector: Tensor, noise: Tensor, temperature: float) -> Tensor:
        """Return min_i Q_target,i(s', ã') − α log π(ã'|s'), [M], of observations [M, D]."""
        self._next_actor.rows.copy_(vector)
        drawn = DrawnActions(self._heads, self._next_actor.forward()[0], noise)
        return self._values(self._target, vector, drawn.action).amin(0) - temperature * drawn.log_prob

    def values(self, vector: Tensor, action: Tensor) -> Tensor:
        """Return both values [2, M] of actions [M, A]; `learn_values` goes back through this pass."""
        return self._values(self._critics, vector, action)

    def learn_values(self, by_value: Tensor) -> None:
        """Write the gradient of the critics for ∂L/∂Q [2, M]."""
        self._critics.slopes[..., 0] = by_value
        self._critics.backward()

    def descend(self, drawn: DrawnActions, temperature: float) -> Tensor:
        """Write the gradient of the actor's loss; returns the smaller value of each row, [M].

        Call `values` with the drawn actions before.
        """
        smaller, chosen = self._critics.outputs[..., 0].min(0)
        by_action = self._critics.by_rows(chosen, -1.0 / self._count)[:, self._seen :]
        self._actor.slopes[0] = drawn.by_parameters(by_action, temperature / self._count)
        self._actor.backward()
        return smaller

    def _values(self, critics: ChainPass, vector: Tensor, action: Tensor) -> Tensor:
        critics.rows[:, : self._seen], critics.rows[:, self._seen :] = vector, action
        return critics.forward()[..., 0]
