"""Forward and backward of a dense policy over M rows, as calls that are prepared once for each M.

The bodies of actor and critic are of one shape, so their layers are stacked: K = 2 of them take one product,
one activation and one sum; a shared trunk is K = 1. A call on a few hundred rows is over in microseconds,
of which finding its operands and viewing them would be a good part, so every view is made beforehand.

    rows [M, D] → K layers' worth of [K, M, F] → parameters [M, P] by the first of K, value [M] by the last

Outputs and their slopes lie output by output, so that numpy walks over many rows and not over few outputs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

Call = Callable[[], object]

_NARROW = 16
"""Gradients by weights of fewer inputs are computed the other way round.

A product with so few columns takes torch three to eight times as long as one with so few rows.
"""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer and its gradients: weights [..., F, D], biases [..., F], all of them views."""

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor

    def of_one(self) -> "Linear":
        """Return the first of those that are stacked."""
        return Linear(self.weight[0], self.bias[0], self.weight_gradient[0], self.bias_gradient[0])


@dataclass(frozen=True, slots=True)
class Hidden:
    """K linear layers, stacked, and the activation behind them."""

    linear: Linear
    activation: type[nn.Module]


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense policy: hidden layers of K bodies, and both heads, which are not stacked. inputs: D."""

    hidden: Sequence[Hidden]
    actor: Linear
    critic: Linear
    bodies: int
    inputs: int

    def widths(self) -> list[int]:
        """Return how many numbers per row each tensor of a `DensePass` has."""
        hidden = [self.bodies * layer.linear.bias.shape[-1] for layer in self.hidden]
        outputs, widest = len(self.actor.bias), max(hidden, default=0)
        return [self.inputs, outputs, 1, outputs, 1, widest, widest, *hidden]


class DensePass:
    """One size of minibatch: fill `rows`, call `forward`, fill the slopes, call `backward`.

    Args:
        dense: the policy's layers, as views of parameters and gradients.
        memory: a flat tensor for each of `Dense.widths`, of that times `count` numbers or more.
        count: M.

    Attributes, arrays all of them:
        rows: [M, D].
        parameters, value: the outputs, [M, P] and [M].
        by_parameters, by_value: ∂loss/∂outputs, of the same shapes.
    """

    def __init__(self, dense: Dense, memory: Sequence[Tensor], count: int) -> None:
        rows, parameters, value, by_parameters, by_value, *_ = [
            _part(flat, (width, count)) for flat, width in zip(memory, dense.widths(), strict=True)
        ]
        inputs = rows.view(count, dense.inputs)
        self.rows = inputs.numpy()
        self.parameters, self.value = parameters.t().numpy(), value[0].numpy()
        self.by_parameters, self.by_value = by_parameters.t().numpy(), by_value[0].numpy()
        self._forward: list[Call] = []
        features = [inputs.expand(dense.bodies, count, dense.inputs)]
        for layer, flat in zip(dense.hidden, memory[7:], strict=True):
            features.append(_part(flat, (dense.bodies, count, layer.linear.bias.shape[-1])))
            self._forward += _hidden_forward(layer, *features[-2:])
        actor, critic = features[-1][0], features[-1][-1]
        self._forward += _head_forward(dense.actor, actor, parameters)
        self._forward += _head_forward(dense.critic, critic, value)
        self._backward = _head_backward(dense.actor, actor, by_parameters)
        self._backward += _head_backward(dense.critic, critic, by_value)
        if dense.hidden:
            self._backward += _bodies_backward(dense, features, (by_parameters, by_value), memory[5:7])

    def forward(self) -> None:
        """Compute `parameters` and `value` of `rows`."""
        for call in self._forward:
            call()

    def backward(self) -> None:
        """Write the gradients of all layers for `by_parameters` and `by_value`."""
        for call in self._backward:
            call()


def _product(left: Tensor, right: Tensor, out: Tensor) -> Call:
    """Prepare out = left · right, [..., a, b] · [..., b, c] of one or of K matrices."""
    return partial(torch.bmm if left.dim() == 3 else torch.mm, left, right, out=out)


def _weight_gradient(delta: Tensor, before: Tensor, out: Tensor) -> list[Call]:
    """Σ δ xᵀ of K layers over M rows: [K, M, F] and [K, M, D] → [K, F, D]."""
    if out.shape[-1] >= _NARROW:
        return [_product(delta.transpose(1, 2), before, out)]
    turned = out.new_empty(out.transpose(1, 2).shape)
    copy = partial(np.copyto, out.numpy(), turned.transpose(1, 2).numpy())
    return [_product(before.transpose(1, 2), delta, turned), copy]


def _hidden_forward(layer: Hidden, before: Tensor, after: Tensor) -> list[Call]:
    """[K, M, D] → [K, M, F]."""
    bias, weight = layer.linear.bias.unsqueeze(1), layer.linear.weight.transpose(1, 2)
    if layer.activation is nn.ReLU:
        linear = partial(torch.baddbmm, bias, before, weight, out=after)
        return [linear, partial(torch.clamp_min, after, 0.0, out=after)]
    # tanh x = 2 σ(2x) − 1 takes half of the time of tanh, torch's or numpy's. In float32 it is
    # off by up to 1e-7, whatever x: much of a feature that is as small, and little of what a head sums up.
    return [
        partial(torch.baddbmm, bias, before, weight, beta=2, alpha=2, out=after),
        partial(torch.sigmoid, after, out=after),
        partial(torch.add, after.new_tensor(-1.0), after, alpha=2, out=after),
    ]


def _hidden_backward(layer: Hidden, before: Tensor, after: Tensor, delta: Tensor) -> list[Call]:
    """Take ∂loss/∂after [K, M, F] to before the activation, in place; uses up `after`."""
    y, slope = after.numpy(), delta.numpy()
    if layer.activation is nn.ReLU:
        calls: list[Call] = [partial(np.greater, y, 0.0, y), partial(np.multiply, slope, y, slope)]
    else:
        # δ (1 − y²)
        calls = [
            partial(np.square, y, y),
            partial(np.multiply, y, slope, y),
            partial(np.subtract, slope, y, slope),
        ]
    calls.append(partial(torch.sum, delta, 1, out=layer.linear.bias_gradient))
    return calls + _weight_gradient(delta, before, layer.linear.weight_gradient)


def _head_forward(head: Linear, features: Tensor, outputs: Tensor) -> list[Call]:
    """[M, F] → [P, M]."""
    return [partial(torch.addmm, head.bias.unsqueeze(1), head.weight, features.t(), out=outputs)]


def _head_backward(head: Linear, features: Tensor, slopes: Tensor) -> list[Call]:
    """Gradients of a head for ∂loss/∂outputs [P, M]."""
    add = partial(np.add.reduce, slopes.numpy(), 1, None, head.bias_gradient.numpy())
    return [add, _product(slopes, features, head.weight_gradient)]


def _bodies_backward(
    dense: Dense, features: Sequence[Tensor], slopes: tuple[Tensor, Tensor], memory: Sequence[Tensor]
) -> list[Call]:
    """From ∂loss/∂outputs, [P, M] and [1, M], on. memory: two places in which ∂loss/∂features lie in turn."""
    delta, other = (_part(flat, features[-1].shape) for flat in memory)
    # A trunk that both heads read gets the sum of their slopes.
    critic = other if dense.bodies == 1 else delta
    calls = [
        _product(slopes[0].t(), dense.actor.weight, delta[0]),
        _product(slopes[1].t(), dense.critic.weight, critic[-1]),
    ]
    if critic is other:
        calls.append(partial(np.add, delta.numpy(), other.numpy(), delta.numpy()))
    places = cycle(reversed(memory))
    for index in reversed(range(len(dense.hidden))):
        layer, before = dense.hidden[index], features[index]
        calls += _hidden_backward(layer, before, features[index + 1], delta)
        if index:
            below = _part(next(places), before.shape)
            calls.append(_product(delta, layer.linear.weight, below))
            delta = below
    return calls


def _part(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """The first numbers of a flat tensor, in a shape."""
    return flat[: math.prod(shape)].view(shape)
