"""Forward and backward of a policy under training: outputs to build a loss on, and its flat gradient.

`AutogradNetwork` handles every policy. `DenseNetwork` handles chains of linear layers with tanh or
ReLU on the CPU: the same mathematics by hand, as calls that are prepared once for each number of rows
(`penstock.learner.algorithms.fast.dense_pass`), and gradients written straight into the optimiser's vector.
Only distributions that do not know their slopes are left to autograd.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.learner.algorithms.fast.dense_pass import Dense, DensePass, Hidden, Linear
from penstock.learner.algorithms.fast.optimiser import FlatAdam
from penstock.learner.algorithms.shared.schedule import Hardware
from penstock.policy.acting.drawing import Reals
from penstock.policy.actor_critic import Outputs
from penstock.policy.distributions import Numbers
from penstock.policy.networks import Inputs, masked
from penstock.policy.policy import Policy

_REMEMBERED_SIZES = 16


class Network(Protocol):
    """A network that gives outputs and the gradient of a loss of them.

    Call `outputs`, then `gradient` with tensors built on them, or `gradient_at` with their slopes, and repeat
    the two.
    """

    @property
    def in_arrays(self) -> bool:
        """Whether it computes in numpy's arrays, and gives and takes them where no graph is needed."""
        ...

    def outputs(self, inputs: Inputs) -> Outputs:
        """Return the outputs of M rows; valid until the next call."""
        ...

    def gradient(self, built: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """Return ∂loss/∂parameters, flat, for what was built on the latest outputs.

        built: scalars or [M, ...] each. slopes: ∂loss/∂built, of the same shapes. The tensor is reused by the
        next call; parameters that nothing depends on get 0.
        """
        ...

    def plain_outputs(self, inputs: Inputs) -> tuple[Numbers, Numbers]:
        """Return parameters [M, P] and values [M] without a graph, to go on with `gradient_at`.

        Arrays where `in_arrays`, else tensors; valid until the next call.
        """
        ...

    def gradient_at(
        self, by_parameters: Numbers, by_value: Numbers, by_heads: Sequence[Numbers] = ()
    ) -> Tensor:
        """Do as `gradient`, for ∂loss/∂parameters [M, P] and ∂loss/∂value [M] of the latest outputs.

        by_heads: ∂loss/∂parameter of each that the distributions themselves have; (): 0. All are only read.
        """
        ...


class AutogradNetwork:
    """All of it by autograd, where asked for in mixed precision and compiled.

    In mixed precision (autocast) matrix products and convolutions are in bfloat16; weights, what comes out
    here and gradients keep their dtype. Neither is for a policy with a recurrent core
    (`penstock.learner.algorithms.registry.check_hardware` refuses them at start).
    """

    in_arrays = False

    def __init__(self, policy: Policy, optimiser: FlatAdam, hardware: Hardware | None = None) -> None:
        hardware = hardware or Hardware()
        self._policy = policy
        self._optimiser = optimiser
        self._device = optimiser.parameters.device.type
        self._bfloat16 = hardware.bfloat16
        self._head_views = [optimiser.stacked([own])[1][0] for own in policy.heads.parameters()]
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

    def plain_outputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """See `Network`; `gradient_at` goes back through their graph."""
        outputs = self.outputs(inputs)
        return outputs.parameters.detach(), outputs.value.detach()

    def gradient(self, built: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """See `Network`."""
        pieces = torch.autograd.grad(built, self._optimiser.own, slopes, materialize_grads=True)
        flat = [piece.reshape(-1) for piece in pieces]
        return torch.cat(flat, out=self._optimiser.flat_gradient)

    def gradient_at(self, by_parameters: Tensor, by_value: Tensor, by_heads: Sequence[Tensor] = ()) -> Tensor:
        """See `Network`."""
        flat = self.gradient([self._latest.parameters, self._latest.value], [by_parameters, by_value])
        for view, piece in zip(self._head_views, by_heads, strict=False):
            view.copy_(piece)
        return flat


class DenseNetwork:
    """Linear layers by hand; what is built on their outputs by autograd, where its slopes are not known."""

    in_arrays = True

    def __init__(self, policy: Policy, optimiser: FlatAdam) -> None:
        self._flat = optimiser.flat_gradient
        self._heads = list(policy.heads.parameters())
        self._head_views = [optimiser.stacked([own])[1][0] for own in self._heads]
        self._dense = _dense_of(policy, optimiser)
        self._capacity = -1  # of several ranks one may have no rows
        self._memory: list[Tensor] = []
        self._passes: dict[int, DensePass] = {}
        self._leaves: tuple[Tensor, ...] = ()
        self._forbidden: Tensor | None = None

    def outputs(self, inputs: Inputs) -> Outputs:
        """Leaves of autograd's graph; differentiate through `gradient` or `gradient_at` only."""
        self._run(inputs)
        both = torch.from_numpy(self._pass.parameters), torch.from_numpy(self._pass.value)
        self._leaves = tuple(output.requires_grad_() for output in both)
        return Outputs(masked(self._leaves[0], inputs.forbidden), self._leaves[1])

    def plain_outputs(self, inputs: Inputs) -> tuple[Reals, Reals]:
        """See `Network`."""
        self._run(inputs)
        parameters, value = self._pass.parameters, self._pass.value
        if inputs.forbidden is not None:
            np.copyto(parameters, np.finfo(parameters.dtype).min, where=inputs.forbidden.numpy())
        return parameters, value

    def gradient(self, built: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """See `Network`."""
        wanted = [*self._leaves, *self._heads]
        actor, critic, *heads = torch.autograd.grad(built, wanted, slopes, materialize_grads=True)
        for view, piece in zip(self._head_views, heads, strict=True):
            view.copy_(piece)
        self._pass.by_parameters[...], self._pass.by_value[...] = actor.numpy(), critic.numpy()
        with np.errstate(all="ignore"):
            self._pass.backward()
        return self._flat

    def gradient_at(
        self, by_parameters: Numbers, by_value: Numbers, by_heads: Sequence[Numbers] = ()
    ) -> Tensor:
        """See `Network`."""
        for view, piece in zip(self._head_views, by_heads or [0.0] * len(self._head_views), strict=True):
            view.numpy()[...] = piece
        self._pass.by_parameters[...], self._pass.by_value[...] = by_parameters, by_value
        if self._forbidden is not None:
            np.copyto(self._pass.by_parameters, 0.0, where=self._forbidden.numpy())
        self._pass.backward()
        return self._flat

    def _run(self, inputs: Inputs) -> None:
        count = len(inputs.vector)
        if count not in self._passes:
            self._passes[count] = self._new_pass(count)
        self._pass, self._forbidden = self._passes[count], inputs.forbidden
        self._pass.rows[...] = inputs.vector.numpy()
        self._pass.forward()

    def _new_pass(self, count: int) -> DensePass:
        """All sizes lie in the memory of the largest."""
        if count > self._capacity or len(self._passes) == _REMEMBERED_SIZES:
            self._passes.clear()
        if count > self._capacity:
            self._capacity = count
            self._memory = [self._flat.new_empty(width * count) for width in self._dense.widths()]
        return DensePass(self._dense, self._memory, count)


def _dense_of(policy: Policy, optimiser: FlatAdam) -> Dense:
    bodies = [body for body in (policy.actor_body, policy.critic_body) if body is not None]

    def linear(layers: Sequence[nn.Linear]) -> Linear:
        weight, weight_gradient = optimiser.stacked([layer.weight for layer in layers])
        bias, bias_gradient = optimiser.stacked([layer.bias for layer in layers])
        return Linear(weight, bias, weight_gradient, bias_gradient)

    layers: list[Any] = list(zip(*(body.chain or () for body in bodies), strict=True))
    hidden = [
        Hidden(linear(linears), type(activations[0]))
        for linears, activations in zip(layers[::2], layers[1::2], strict=True)
    ]
    heads = [linear([head]).of_one() for head in (policy.actor_head, policy.critic_head)]
    return Dense(hidden, heads[0], heads[1], len(bodies), policy.reader.width)


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
