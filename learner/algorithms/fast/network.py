"""Forward and backward of a policy under training: outputs to build a loss on, and its flat gradient.

`AutogradNetwork` handles every policy. `DenseNetwork` handles chains of linear layers with tanh or
ReLU on the CPU: the same mathematics by hand, with reused buffers, gradients written straight into
the optimiser's vector, and numpy's tanh, which is an order of magnitude faster than torch's. Only
distributions that do not know their slopes are left to autograd.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from learner.algorithms.fast.optimiser import FlatAdam
from learner.algorithms.shared.hardware import Hardware
from penstock.policy.actor_critic import Outputs
from penstock.policy.masking import masked
from penstock.policy.networks import Inputs
from penstock.policy.policy import Policy

_REMEMBERED_SIZES = 16
_NARROW = 16
"""Weights of fewer inputs or outputs are left to numpy.

Their gradients take torch three to twenty times as long, on one thread.
"""


class Network(Protocol):
    """A network that gives outputs and the gradient of a loss of them.

    Call `outputs`, then `gradient` with tensors built on them, or `gradient_at` with their slopes, and repeat
    the two.
    """

    def outputs(self, inputs: Inputs) -> Outputs:
        """Return the outputs of M rows; valid until the next call."""
        ...

    def gradient(self, built: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """Return ∂loss/∂parameters, flat, for what was built on the latest outputs.

        built: scalars or [M, ...] each. slopes: ∂loss/∂built, of the same shapes. The tensor is reused by the
        next call; parameters that nothing depends on get 0.
        """
        ...

    def gradient_at(self, by_parameters: Tensor, by_value: Tensor) -> Tensor:
        """Do as `gradient`, for ∂loss/∂parameters [M, P] and ∂loss/∂value [M] of the latest outputs.

        Only these slopes are read.
        """
        ...


class AutogradNetwork:
    """All of it by autograd, where asked for in mixed precision and compiled.

    In mixed precision (autocast) matrix products and convolutions are in bfloat16; weights, what comes out
    here and gradients keep their dtype. Neither is for a policy with a recurrent core
    (`learner.algorithms.registry.check_hardware` refuses them at start).
    """

    def __init__(self, policy: Policy, optimiser: FlatAdam, hardware: Hardware | None = None) -> None:
        hardware = hardware or Hardware()
        self._policy = policy
        self._optimiser = optimiser
        self._device = optimiser.parameters.device.type
        self._bfloat16 = hardware.bfloat16
        self._is_plain = not (hardware.bfloat16 or hardware.compiled)
        self._forward = torch.compile(self._unmasked) if hardware.compiled else self._unmasked

    def outputs(self, inputs: Inputs) -> Outputs:
        """`Policy.outputs`."""
        self._latest = self._policy.outputs(inputs) if self._is_plain else self._cheaper(inputs)
        return self._latest

    def _cheaper(self, inputs: Inputs) -> Outputs:
        assert inputs.time is None, "a recurrent core is neither compiled nor in mixed precision"
        with torch.autocast(self._device, torch.bfloat16, enabled=self._bfloat16):
            parameters, value = self._forward(inputs.vector, inputs.images)
        parameters = masked(parameters.to(self._policy.dtype), inputs.forbidden)
        return Outputs(parameters, value.to(self._policy.dtype))

    def _unmasked(self, vector: Tensor, images: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Tensors in and out, as the compiler wants them."""
        outputs = self._policy.outputs(Inputs(vector, images))
        return outputs.parameters, outputs.value

    def gradient(self, built: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """See `Network`."""
        pieces = torch.autograd.grad(built, self._optimiser.own, slopes, materialize_grads=True)
        flat = [piece.reshape(-1) for piece in pieces]
        return torch.cat(flat, out=self._optimiser.flat_gradient)

    def gradient_at(self, by_parameters: Tensor, by_value: Tensor) -> Tensor:
        """See `Network`."""
        return self.gradient([self._latest.parameters, self._latest.value], [by_parameters, by_value])


class DenseNetwork:
    """Linear layers by hand; what is built on their outputs by autograd, where its slopes are not known."""

    def __init__(self, policy: Policy, optimiser: FlatAdam) -> None:
        self._flat = optimiser.flat_gradient
        views = {id(own): view for own, view in zip(optimiser.own, optimiser.gradient_views, strict=True)}
        self._others = list(policy.heads.parameters())
        self._other_views = [views[id(own)] for own in self._others]
        trunk = list(policy.actor_body.chain or ())
        if policy.critic_body is None:
            self._trunk: Chain | None = Chain(trunk, views)
            self._actor = Chain([policy.actor_head], views)
            self._critic = Chain([policy.critic_head], views)
        else:
            self._trunk = None
            self._actor = Chain([*trunk, policy.actor_head], views)
            self._critic = Chain([*(policy.critic_body.chain or ()), policy.critic_head], views)
        self._leaves: tuple[Tensor, ...] = ()
        self._forbidden: Tensor | None = None

    def outputs(self, inputs: Inputs) -> Outputs:
        """Leaves of autograd's graph; differentiate through `gradient` or `gradient_at` only."""
        with torch.no_grad():
            rows = inputs.vector if self._trunk is None else self._trunk.forward(inputs.vector)
            parameters, value = self._actor.forward(rows), self._critic.forward(rows).squeeze(1)
        self._leaves = (parameters.detach().requires_grad_(), value.detach().requires_grad_())
        self._forbidden = inputs.forbidden
        return Outputs(masked(self._leaves[0], inputs.forbidden), self._leaves[1])

    def gradient(self, built: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """See `Network`."""
        wanted = [*self._leaves, *self._others]
        actor, critic, *others = torch.autograd.grad(built, wanted, slopes, materialize_grads=True)
        with torch.no_grad():
            for view, piece in zip(self._other_views, others, strict=True):
                view.copy_(piece)
        return self._backward(actor, critic)

    def gradient_at(self, by_parameters: Tensor, by_value: Tensor) -> Tensor:
        """See `Network`."""
        if self._forbidden is not None:
            by_parameters = by_parameters.masked_fill(self._forbidden, 0.0)
        for view in self._other_views:
            view.zero_()
        return self._backward(by_parameters, by_value)

    def _backward(self, actor: Tensor, critic: Tensor) -> Tensor:
        """From ∂loss/∂outputs, [M, P] and [M], on."""
        with torch.no_grad():
            shared = self._trunk is not None
            first = self._actor.backward(actor, into_input=shared)
            second = self._critic.backward(critic.unsqueeze(1), into_input=shared)
            if self._trunk is not None:
                self._trunk.backward(first.add_(second), into_input=False)
        return self._flat


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer as views: looking parameters up in a module costs as much as a small kernel."""

    weight: Tensor
    transposed: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor


class Chain:
    """Linear layers and activations, one after the other. Axes: M rows, then features."""

    def __init__(self, layers: Sequence[nn.Module], gradients: Mapping[int, Tensor]) -> None:
        self._layers: list[_Linear | nn.Module] = []
        for layer in layers:
            if isinstance(layer, nn.Linear):
                weight, bias = layer.weight.detach(), layer.bias.detach()
                views = (gradients[id(layer.weight)], gradients[id(layer.bias)])
                self._layers.append(_Linear(weight, weight.t(), bias, *views))
            else:
                self._layers.append(layer)
        self._rows: list[Tensor] = []
        self._capacity = -1  # of several ranks one may have no rows
        self._whole: list[tuple[Tensor, Tensor]] = []
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [M, D] → [M, F], in a buffer that the next call reuses; `rows` must stay until `backward`."""
        self._allocate(rows)
        self._rows = [rows]
        for layer, (after, _) in zip(self._layers, self._buffers, strict=True):
            before = self._rows[-1]
            if isinstance(layer, _Linear):
                torch.addmm(layer.bias, before, layer.transposed, out=after)
            elif isinstance(layer, nn.Tanh):
                np.tanh(before.numpy(), out=after.numpy())
            else:
                torch.clamp_min(before, 0, out=after)
            self._rows.append(after)
        return self._rows[-1]

    def backward(self, delta: Tensor, *, into_input: bool) -> Tensor:
        """Write the parameters' gradients for ∂loss/∂output [M, F].

        Returns ∂loss/∂rows where `into_input`. Uses up the outputs of `forward`.
        """
        for index in range(len(self._layers) - 1, -1, -1):
            layer, before, after = self._layers[index], self._rows[index], self._rows[index + 1]
            if isinstance(layer, _Linear):
                if before.shape[1] < _NARROW or delta.shape[1] < _NARROW:
                    np.dot(delta.numpy().T, before.numpy(), out=layer.weight_gradient.numpy())
                else:
                    torch.mm(delta.t(), before, out=layer.weight_gradient)
                torch.sum(delta, 0, out=layer.bias_gradient)
                if index or into_input:
                    delta = torch.mm(delta, layer.weight, out=self._buffers[index][1])
            elif isinstance(layer, nn.Tanh):
                # δ (1 − y²)
                delta.addcmul_(after.square_(), delta, value=-1)
            else:
                delta.mul_(after > 0)
        return delta

    def _allocate(self, rows: Tensor) -> None:
        """Buffers of M rows: the first rows of larger ones."""
        count, width = rows.shape
        if count > self._capacity:
            self._capacity, self._views = count, {}
            self._whole = []
            for layer in self._layers:
                delta = rows.new_empty((count, width))
                width = len(layer.weight) if isinstance(layer, _Linear) else width
                self._whole.append((rows.new_empty((count, width)), delta))
        if count not in self._views:
            if len(self._views) == _REMEMBERED_SIZES:
                self._views.clear()
            self._views[count] = [(output[:count], delta[:count]) for output, delta in self._whole]
        self._buffers = self._views[count]


def network_of(policy: Policy, optimiser: FlatAdam, hardware: Hardware | None = None) -> Network:
    """Return the fastest that can handle the policy where it lies, in the way that was asked for."""
    hardware = hardware or Hardware()
    bodies = [body for body in (policy.actor_body, policy.critic_body) if body is not None]
    chains = [body.chain for body in bodies]
    dense = all(
        chain is not None and all(isinstance(layer, nn.Linear | nn.Tanh | nn.ReLU) for layer in chain)
        for chain in chains
    )
    asked_for = hardware.bfloat16 or hardware.compiled
    by_hand = dense and not asked_for and not policy.memory.is_recurrent and not policy.combines_heads
    if by_hand and optimiser.parameters.device.type == "cpu":
        return DenseNetwork(policy, optimiser)
    return AutogradNetwork(policy, optimiser, hardware)
