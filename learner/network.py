"""Forward and backward of a policy under training: outputs to build a loss on, and its flat gradient.

`AutogradNetwork` handles every policy. `DenseNetwork` handles chains of linear layers with tanh or
ReLU on the CPU: the same mathematics by hand, with reused buffers, gradients written straight into
the optimiser's vector, and numpy's tanh, which is an order of magnitude faster than torch's. Only the
loss, from the outputs on, is left to autograd.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from learner.optimiser import FlatAdam
from penstock.policy.networks import Inputs
from penstock.policy.policy import Outputs, Policy


class Network(Protocol):
    """Call `outputs`, build a scalar loss on them, call `gradient`; then again."""

    def outputs(self, inputs: Inputs) -> Outputs:
        """Of M rows; valid until the next call."""
        ...

    def gradient(self, loss: Tensor) -> Tensor:
        """∂loss/∂parameters, flat, of a loss built on the latest outputs; reused by the next call."""
        ...


class AutogradNetwork:
    """All of it by autograd."""

    def __init__(self, policy: Policy, optimiser: FlatAdam) -> None:
        self._policy = policy
        self._optimiser = optimiser

    def outputs(self, inputs: Inputs) -> Outputs:
        """`Policy.outputs`."""
        return self._policy.outputs(inputs)

    def gradient(self, loss: Tensor) -> Tensor:
        """Unused parameters get 0."""
        pieces = torch.autograd.grad(loss, self._optimiser.own, materialize_grads=True)
        flat = [piece.reshape(-1) for piece in pieces]
        return torch.cat(flat, out=self._optimiser.flat_gradient)


class DenseNetwork:
    """Linear layers by hand, the loss by autograd."""

    def __init__(self, policy: Policy, optimiser: FlatAdam) -> None:
        self._flat = optimiser.flat_gradient
        views = {id(own): view for own, view in zip(optimiser.own, optimiser.gradient_views, strict=True)}
        self._others = list(policy.heads.parameters())
        self._other_views = [views[id(own)] for own in self._others]
        trunk = list(policy.actor_body.layers)
        if policy.critic_body is None:
            self._trunk: Chain | None = Chain(trunk, views)
            self._actor = Chain([policy.actor_head], views)
            self._critic = Chain([policy.critic_head], views)
        else:
            self._trunk = None
            self._actor = Chain([*trunk, policy.actor_head], views)
            self._critic = Chain([*policy.critic_body.layers, policy.critic_head], views)
        self._leaves: tuple[Tensor, Tensor] | None = None

    def outputs(self, inputs: Inputs) -> Outputs:
        """Leaves of the loss's graph; differentiate through `gradient` only."""
        with torch.no_grad():
            rows = inputs.vector if self._trunk is None else self._trunk.forward(inputs.vector)
            parameters, value = self._actor.forward(rows), self._critic.forward(rows).squeeze(1)
        self._leaves = (parameters.detach().requires_grad_(), value.detach().requires_grad_())
        return Outputs(*self._leaves)

    def gradient(self, loss: Tensor) -> Tensor:
        """Unused parameters get 0."""
        assert self._leaves is not None, "no outputs to differentiate"
        wanted = [*self._leaves, *self._others]
        actor, critic, *others = torch.autograd.grad(loss, wanted, materialize_grads=True)
        with torch.no_grad():
            for view, piece in zip(self._other_views, others, strict=True):
                view.copy_(piece)
            shared = self._trunk is not None
            first = self._actor.backward(actor, into_input=shared)
            second = self._critic.backward(critic.unsqueeze(1), into_input=shared)
            if self._trunk is not None:
                self._trunk.backward(first.add_(second), into_input=False)
        return self._flat


class Chain:
    """Linear layers and activations, one after the other. Axes: M rows, then features."""

    def __init__(self, layers: Sequence[nn.Module], gradients: dict[int, Tensor]) -> None:
        self._layers = list(layers)
        self._gradients = gradients
        self._rows: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._deltas: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [M, D] → [M, F], in a buffer that the next call reuses; `rows` must stay until `backward`."""
        self._allocate(rows)
        count = len(rows)
        self._rows = [rows]
        for layer, buffer in zip(self._layers, self._outputs, strict=True):
            before, after = self._rows[-1], buffer[:count]
            if isinstance(layer, nn.Linear):
                torch.addmm(layer.bias, before, layer.weight.t(), out=after)
            elif isinstance(layer, nn.Tanh):
                np.tanh(before.numpy(), out=after.numpy())
            else:
                torch.clamp_min(before, 0, out=after)
            self._rows.append(after)
        return self._rows[-1]

    def backward(self, delta: Tensor, *, into_input: bool) -> Tensor:
        """Write the parameters' gradients for ∂loss/∂output [M, F]; returns ∂loss/∂rows where `into_input`."""
        for index in range(len(self._layers) - 1, -1, -1):
            layer, before, after = self._layers[index], self._rows[index], self._rows[index + 1]
            if isinstance(layer, nn.Linear):
                torch.mm(delta.t(), before, out=self._gradients[id(layer.weight)])
                torch.sum(delta, 0, out=self._gradients[id(layer.bias)])
                if index or into_input:
                    delta = torch.mm(delta, layer.weight, out=self._deltas[index][: len(before)])
            elif isinstance(layer, nn.Tanh):
                # δ (1 − y²); y is not needed any more and holds the product.
                delta.addcmul_(after.square_(), delta, value=-1)
            else:
                delta.mul_(after > 0)
        return delta

    def _allocate(self, rows: Tensor) -> None:
        if self._outputs and len(self._outputs[0]) >= len(rows):
            return
        width = rows.shape[1]
        self._outputs, self._deltas = [], []
        for layer in self._layers:
            self._deltas.append(rows.new_empty((len(rows), width)))
            width = layer.out_features if isinstance(layer, nn.Linear) else width
            self._outputs.append(rows.new_empty((len(rows), width)))


def network_of(policy: Policy, optimiser: FlatAdam) -> Network:
    """The fastest that can handle the policy where it lies."""
    bodies = [body for body in (policy.actor_body, policy.critic_body) if body is not None]
    layers = [layer for body in bodies for layer in body.layers]
    dense = all(isinstance(layer, nn.Linear | nn.Tanh | nn.ReLU) for layer in layers)
    if dense and not policy.reader.images and optimiser.parameters.device.type == "cpu":
        return DenseNetwork(policy, optimiser)
    return AutogradNetwork(policy, optimiser)
