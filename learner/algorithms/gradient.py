"""The gradient of a policy and the step down it: Adam over one flat vector, networks by autograd or by hand.

All parameters lie in one tensor, and so do their gradients: a step, a norm, a copy for a rollback and a
finiteness test are a few kernels each, whatever the number of layers. `network_of` chooses how gradients are
computed. `DenseNetwork` handles chains of linear layers with tanh or ReLU on the CPU, as calls that are
prepared once for each number of rows: `gradient` leaves to autograd what a loss builds on the outputs,
`gradient_of` needs none, where the slopes of all distributions are known.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.settings import LearnerSection
from penstock.learner.algorithms.losses import Objective
from penstock.learner.algorithms.rows import RankGroup, Rows
from penstock.policy.acting.drawing import Reals
from penstock.policy.actor_critic import ActorCritic, Outputs
from penstock.policy.distributions import ActionHead, Categorical, Gaussian, MultiCategorical
from penstock.policy.networks import Inputs, masked
from penstock.policy.policy import Policy
from penstock.protocol.tensor import Array

_SMALL = 32_768
"""Up to this many parameters on the CPU the step is in numpy, where a call costs less than in torch."""

GoBack = Callable[[], None]
"""Restores the state from which it was made; may be called repeatedly."""


def backup_of(*tensors: Tensor) -> GoBack:
    copies = [tensor.clone() for tensor in tensors]

    def go_back() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    return go_back


def flatten(module: nn.Module | Mapping[str, nn.Parameter]) -> Tensor:
    """Move all parameters of a module, or these, into one flat tensor [P] that they become views of."""
    parameters = list(module.parameters() if isinstance(module, nn.Module) else module.values())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([own.numel() for own in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


class FlatAdam:
    """Adam (Kingma and Ba 2015) of every parameter of `module`, or of those that are given by name.

    Moves the parameters into one flat tensor (`parameters`) that they become views of: do not move or
    convert the module afterwards. `own` are the module's parameters in the vector's order.
    Gradients are written into `flat_gradient` or, by parameter, `gradient_views`.
    """

    def __init__(
        self,
        module: nn.Module | Mapping[str, nn.Parameter],
        epsilon: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        named = dict(module.named_parameters() if isinstance(module, nn.Module) else module)
        self._names = list(named)
        self.own = list(named.values())
        ends = list(accumulate(parameter.numel() for parameter in self.own))
        self._cuts = [slice(end - own.numel(), end) for end, own in zip(ends, self.own, strict=True)]
        self._starts = {id(own): cut.start for own, cut in zip(self.own, self._cuts, strict=True)}
        self._epsilon, (self._beta_1, self._beta_2) = epsilon, betas
        self.parameters = flatten(named)
        self.first = torch.zeros_like(self.parameters)
        self.second = torch.zeros_like(self.parameters)
        self.flat_gradient = torch.zeros_like(self.parameters)
        self.gradient_views = [
            self.flat_gradient[cut].view_as(own) for cut, own in zip(self._cuts, self.own, strict=True)
        ]
        self.steps = 0
        # `step` corrects the bias itself: to torch every step is one so late that nothing is left to correct.
        self._late = torch.full((), 1e9, device=self.parameters.device)
        self._arrays = None
        if self.parameters.device.type == "cpu" and len(self.parameters) <= _SMALL:
            vectors = self.parameters, self.first, self.second, torch.empty_like(self.parameters)
            self._arrays = tuple(vector.numpy() for vector in vectors)

    def stacked(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return views of K of `own`, and of their gradients: [K, *shape] each, and no copies.

        parameters: of one shape, and all as far from the one before.
        """
        first, starts = parameters[0], [self._starts[id(parameter)] for parameter in parameters]
        apart = starts[1] - starts[0] if len(starts) > 1 else first.numel()
        shape, strides = (len(starts), *first.shape), (apart, *first.stride())
        assert starts == [starts[0] + apart * k for k in range(len(starts))]
        assert all(parameter.shape == first.shape for parameter in parameters)
        views = [flat.as_strided(shape, strides, starts[0]) for flat in (self.parameters, self.flat_gradient)]
        return views[0], views[1]

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Return ∂loss/∂parameters by autograd, flat [P]; loss: scalar. The next call reuses the tensor."""
        pieces = torch.autograd.grad(loss, self.own, materialize_grads=True)
        return torch.cat([piece.reshape(-1) for piece in pieces], out=self.flat_gradient)

    def step(self, gradient: Tensor, learning_rate: float, max_norm: float) -> Tensor:
        """Take one step down `gradient` [P], which is scaled to `max_norm` where longer (0: never), in place.

        Returns the gradient's norm before that, a scalar on the device.
        """
        self.steps += 1
        # first/(√second/root + ε) with both sides times root: one pass less over the vector.
        root = math.sqrt(1.0 - self._beta_2**self.steps)
        rate = learning_rate * root / (1.0 - self._beta_1**self.steps)
        norm: Tensor = torch.linalg.vector_norm(gradient)
        step = self._step if self._arrays is None else self._array_step
        step(gradient, norm, max_norm, rate, self._epsilon * root)
        return norm

    def _step(self, gradient: Tensor, norm: Tensor, max_norm: float, rate: float, epsilon: float) -> None:
        if max_norm > 0:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        torch._fused_adam_(
            [self.parameters], [gradient], [self.first], [self.second], [], [self._late],
            lr=rate, beta1=self._beta_1, beta2=self._beta_2, eps=epsilon,
            weight_decay=0.0, amsgrad=False, maximize=False,
        )  # fmt: skip

    def _array_step(
        self, gradient: Tensor, norm: Tensor, max_norm: float, rate: float, epsilon: float
    ) -> None:
        """Do as `_step` in numpy: more passes over the vector, and cheaper calls."""
        assert self._arrays is not None
        parameters, first, second, change = self._arrays
        slope = gradient.numpy()
        with np.errstate(all="ignore"):
            if max_norm > 0:
                np.multiply(slope, min(1.0, max_norm / (float(norm.numpy()) + 1e-6)), out=slope)
            np.multiply(slope, 1.0 - self._beta_1, out=change)
            np.multiply(first, self._beta_1, out=first)
            np.add(first, change, out=first)
            np.square(slope, out=change)
            np.multiply(change, 1.0 - self._beta_2, out=change)
            np.multiply(second, self._beta_2, out=second)
            np.add(second, change, out=second)
            np.sqrt(second, out=change)
            np.add(change, epsilon, out=change)
            np.divide(first, change, out=change)
            np.multiply(change, rate, out=change)
            np.subtract(parameters, change, out=parameters)

    def checksum(self) -> Tensor:
        """Return a scalar that is finite where parameters, moments and their sums are, and nowhere else."""
        return self.parameters.sum() + self.first.sum() + self.second.sum()

    def backup(self) -> GoBack:
        """Copy parameters, moments and the count of steps."""
        tensors_back, steps = backup_of(self.parameters, self.first, self.second), self.steps

        def go_back() -> None:
            tensors_back()
            self.steps = steps

        return go_back

    def moments(self) -> dict[str, Tensor]:
        """Return copies of both moments on the CPU, `first/NAME` and `second/NAME`, shaped as parameters."""
        result = {}
        for kind, flat in (("first", self.first), ("second", self.second)):
            for name, parameter, cut in zip(self._names, self.own, self._cuts, strict=True):
                result[f"{kind}/{name}"] = flat[cut].view(parameter.shape).to("cpu", copy=True)
        return result

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Take over what `moments` returned. Raises ValueError that names a missing or misshapen one."""
        flats = []
        for kind in ("first", "second"):
            for name, parameter in zip(self._names, self.own, strict=True):
                moment = moments.get(f"{kind}/{name}")
                if moment is None or moment.shape != parameter.shape:
                    found = "nothing" if moment is None else tuple(moment.shape)
                    raise ValueError(f"optimiser {kind}/{name}: {found} for {tuple(parameter.shape)}")
                flats.append(moment.reshape(-1).to(self.parameters))
        both = torch.cat(flats)
        self.first.copy_(both[: len(self.first)])
        self.second.copy_(both[len(self.first) :])
        self.steps = steps


# ---- How the outputs and the gradient of a policy are computed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the networks of an update run on.

    group: the ranks. bfloat16: networks run in mixed precision. compiled: they go through `torch.compile`.
    """

    group: RankGroup = field(default_factory=RankGroup)
    bfloat16: bool = False
    compiled: bool = False


PLAIN: Final = Hardware()
"""One rank, in the policy's dtype, not compiled."""


def hardware_of(section: LearnerSection, group: RankGroup) -> Hardware:
    """Return the hardware that the settings ask for."""
    return Hardware(group=group, bfloat16=section.precision == "bfloat16", compiled=section.compile)


class Network:
    """Computes the outputs of a policy and, by autograd, the gradient of a loss of them.

    In mixed precision (autocast) matrix products and convolutions are in bfloat16; weights, outputs and
    gradients keep their dtype. Neither this nor compilation is for a policy with a recurrent core
    (`registry.check_hardware` refuses them at start).
    """

    def __init__(self, policy: Policy, optimiser: FlatAdam, hardware: Hardware = PLAIN) -> None:
        self.policy = policy
        self.optimiser = optimiser
        self._bfloat16 = hardware.bfloat16
        self._is_plain = not (hardware.bfloat16 or hardware.compiled)
        self._forward = torch.compile(self._unmasked) if hardware.compiled else self._unmasked

    def outputs(self, inputs: Inputs) -> Outputs:
        """Return the outputs of M rows for a loss; valid until the next call."""
        if self._is_plain:
            return self.policy.outputs(inputs)
        assert inputs.time is None, "a recurrent core is neither compiled nor in mixed precision"
        device, dtype = self.optimiser.parameters.device.type, self.policy.dtype
        with torch.autocast(device, torch.bfloat16, enabled=self._bfloat16):
            parameters, value = self._forward(inputs.vector, inputs.images)
        return Outputs(masked(parameters.to(dtype), inputs.forbidden), value.to(dtype))

    def _unmasked(self, vector: Tensor, images: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Compute with tensors in and out, as the compiler requires."""
        outputs = self.policy.outputs(Inputs(vector, images))
        return outputs.parameters, outputs.value

    def log_prob(self, parameters: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """Log π [M] under parameters [M, P], computed as gradient steps compute it."""
        return self.policy.joint_log_prob(parameters, action)

    def gradient(self, loss: Tensor) -> Tensor:
        """Return ∂loss/∂parameters, flat, of a scalar of the latest outputs; the next call reuses it."""
        return self.optimiser.gradient_of(loss)


def network_of(policy: Policy, optimiser: FlatAdam, hardware: Hardware = PLAIN) -> Network:
    """Return the fastest network that can compute the policy on its device with this hardware."""
    bodies = [body for body in (policy.actor_body, policy.critic_body) if body is not None]
    chains = [body.chain for body in bodies]
    dense = all(
        chain is not None and all(isinstance(layer, nn.Linear | nn.Tanh | nn.ReLU) for layer in chain)
        for chain in chains
    )
    is_plain = not (hardware.bfloat16 or hardware.compiled)
    by_hand = dense and is_plain and not policy.memory.is_recurrent and not policy.combines_heads
    if by_hand and optimiser.parameters.device.type == "cpu":
        return DenseNetwork(policy, optimiser)
    return Network(policy, optimiser, hardware)


class MinibatchGradient(NamedTuple):
    """The gradient of a minibatch, and figures of it.

    log_prob: log π_θ of its rows, [m].   gradient: flat.   losses: [2], of policy and value.
    """

    log_prob: Tensor
    gradient: Tensor
    losses: Tensor


_REMEMBERED_SIZES = 16


class DenseNetwork(Network):
    """Linear layers by hand; losses on their outputs by autograd, or in closed form."""

    def __init__(self, policy: Policy, optimiser: FlatAdam) -> None:
        super().__init__(policy, optimiser)
        self.is_closed = has_slopes(policy)
        """Whether `gradient_of` may be called."""
        self._flat = optimiser.flat_gradient
        self._heads = list(policy.heads.parameters())
        self._head_views = [optimiser.stacked([own])[1][0] for own in self._heads]
        self._dense = _dense_of(policy, optimiser)
        self._capacity = -1  # of several ranks one may have no rows
        self._memory: list[Tensor] = []
        self._passes: dict[int, DensePass] = {}
        self._leaves: tuple[Tensor, ...] = ()

    def outputs(self, inputs: Inputs) -> Outputs:
        self._run(inputs)
        both = torch.from_numpy(self._pass.parameters), torch.from_numpy(self._pass.value)
        self._leaves = tuple(output.requires_grad_() for output in both)
        return Outputs(masked(self._leaves[0], inputs.forbidden), self._leaves[1])

    def gradient(self, loss: Tensor) -> Tensor:
        wanted = [*self._leaves, *self._heads]
        actor, critic, *heads = torch.autograd.grad(loss, wanted, materialize_grads=True)
        self._pass.by_parameters[...], self._pass.by_value[...] = actor.numpy(), critic.numpy()
        with np.errstate(all="ignore"):
            return self._back([piece.numpy() for piece in heads])

    def log_prob(self, parameters: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        if not self.is_closed:
            return super().log_prob(parameters, action)
        with np.errstate(all="ignore"):
            return torch.from_numpy(closed_form(self.policy, parameters.numpy(), action).log_prob)

    def gradient_of(self, rows: Rows, objective: Objective) -> MinibatchGradient:
        """Return what `OnPolicy.gradient_of` computes by autograd, in closed form."""
        # Numbers that are not finite are found at the end of the update.
        with np.errstate(all="ignore"):
            self._run(rows.inputs)
            parameters, value, forbidden = self._pass.parameters, self._pass.value, rows.inputs.forbidden
            if forbidden is not None:
                np.copyto(parameters, np.finfo(parameters.dtype).min, where=forbidden.numpy())
            columns, total = rows.columns.numpy(), rows.total
            form = closed_form(self.policy, parameters, rows.action)
            policy_loss, by_log_prob = _policy_slope(form.log_prob, columns[0], columns[1], objective, total)
            value_loss, by_value = _value_slope(value, columns[2], columns[3], objective.value_clip, total)
            by_parameters, by_heads = form.slopes(by_log_prob, -objective.entropy_coefficient / total)
            self._pass.by_parameters[...] = by_parameters
            self._pass.by_value[...] = by_value * objective.value_coefficient
            if forbidden is not None:
                np.copyto(self._pass.by_parameters, 0.0, where=forbidden.numpy())
            losses = torch.from_numpy(np.array((policy_loss, value_loss)))
            return MinibatchGradient(torch.from_numpy(form.log_prob), self._back(by_heads), losses)

    def _back(self, by_heads: Sequence[Array]) -> Tensor:
        """Run the backward pass from its slopes. by_heads: gradients of the heads' own parameters."""
        for view, piece in zip(self._head_views, by_heads, strict=True):
            view.numpy()[...] = piece
        self._pass.backward()
        return self._flat

    def _run(self, inputs: Inputs) -> None:
        count = len(inputs.vector)
        if count not in self._passes:
            self._passes[count] = self._new_pass(count)
        self._pass = self._passes[count]
        self._pass.rows[...] = inputs.vector.numpy()
        self._pass.forward()

    def _new_pass(self, count: int) -> "DensePass":
        """Make a pass in the memory that passes of all sizes share."""
        if count > self._capacity or len(self._passes) == _REMEMBERED_SIZES:
            self._passes.clear()
        if count > self._capacity:
            self._capacity = count
            self._memory = [self._flat.new_empty(width * count) for width in self._dense.widths()]
        return DensePass(self._dense, self._memory, count)


def _dense_of(policy: Policy, optimiser: FlatAdam) -> "Dense":
    bodies = [body for body in (policy.actor_body, policy.critic_body) if body is not None]
    layers: list[Any] = list(zip(*(body.chain or () for body in bodies), strict=True))
    hidden = [
        Hidden(Linear.of(optimiser, linears), type(activations[0]))
        for linears, activations in zip(layers[::2], layers[1::2], strict=True)
    ]
    heads = [Linear.of(optimiser, [head]).of_one() for head in (policy.actor_head, policy.critic_head)]
    return Dense(hidden, heads[0], heads[1], len(bodies), policy.reader.width)


# ---- The losses of `losses` and the distributions of `penstock.policy`, with their slopes.


def _policy_slope(
    log_prob: Reals, anchor: Reals, weighted_advantage: Reals, objective: Objective, total: int
) -> tuple[Reals, Reals]:
    """Return `policy_gradient` or `policy_loss`, and its slope by log π_θ, [n].

    ∂(r A)/∂log π_θ = r A where the unclipped term is the smaller; elsewhere the clipped one is constant.
    """
    clip, dual_clip = objective.clip_range, objective.dual_clip
    if clip is None:
        return (log_prob * weighted_advantage).sum() / -total, weighted_advantage * (-1.0 / total)
    ratio = np.exp(log_prob - anchor)
    clipped = ratio.clip(1.0 - clip, 1.0 + clip) * weighted_advantage
    unclipped = ratio * weighted_advantage
    smaller = np.minimum(unclipped, clipped)
    slope = (unclipped <= clipped) * unclipped
    if dual_clip is not None:
        floor = weighted_advantage.clip(max=0.0) * dual_clip
        slope *= smaller >= floor
        smaller = np.maximum(smaller, floor)
    slope *= -1.0 / total
    return smaller.sum() / -total, slope


def _value_slope(
    value: Reals, target: Reals, old_value: Reals, clip: float | None, total: int
) -> tuple[Reals, Reals]:
    """Return `value_loss`, and its slope by the value, [n]."""
    difference = value - target
    error = difference * difference
    slope = difference * (1.0 / total)
    if clip is not None:
        moved = value - old_value
        held = old_value + moved.clip(-clip, clip) - target
        held_error = held * held
        # Within ± clip both errors are equal up to rounding, which must not decide.
        slope *= (error >= held_error) | (abs(moved) <= clip)
        error = np.maximum(error, held_error)
    return error.sum() * (0.5 / total), slope


class ClosedForm(NamedTuple):
    """Log-probabilities of actions, [n], and their slopes without a graph.

    slopes: from ∂L/∂log π of each row, [n], and ∂L/∂H of every row, a float, to ∂L/∂parameters, [n, size],
        and ∂L by each parameter that the heads themselves have, in their order and of their shapes.
    """

    log_prob: Reals
    slopes: Callable[[Reals, float], tuple[Reals, list[Reals]]]


def has_slopes(policy: Policy) -> bool:
    """Return whether `closed_form` knows the distribution of each independent part of a policy's action."""
    kind = type(policy)
    is_usual = (
        kind.joint_log_prob is ActorCritic.joint_log_prob and kind.joint_entropy is ActorCritic.joint_entropy
    )
    return is_usual and all(type(head) in _FORMS for head in policy.action_heads)


def closed_form(policy: Policy, parameters: Reals, action: Mapping[str, Tensor]) -> ClosedForm:
    """Return log π of stored actions [n, *shape] by path under outputs of the network [n, P], with slopes."""
    forms, start = [], 0
    for head in policy.action_heads:
        taken = action[head.path].numpy()
        forms.append(_FORMS[type(head)](head, parameters[:, start : start + head.size], taken))
        start += head.size
    return _joint(forms)


def _joint(forms: Sequence[ClosedForm]) -> ClosedForm:
    """Return the closed form of independent parts, whose parameters are concatenated."""
    if len(forms) == 1:
        return forms[0]

    def slopes(by_log_prob: Reals, by_entropy: float) -> tuple[Reals, list[Reals]]:
        by_parameters, own = zip(*(form.slopes(by_log_prob, by_entropy) for form in forms), strict=True)
        return np.concatenate(by_parameters, -1), [one for part in own for one in part]

    return ClosedForm(np.add.reduce([form.log_prob for form in forms]), slopes)


def _categorical(head: ActionHead, parameters: Reals, action: Array) -> ClosedForm:
    """∂log π(a)/∂z = 1[a] − p and ∂H/∂z = −p (log p + H).

    Raises IndexError for an action outside the choices.
    """
    log_p = parameters - np.maximum.reduce(parameters, -1)[:, None]
    log_p -= np.log(np.add.reduce(np.exp(log_p), -1))[:, None]
    # Choice by choice in memory, as a dense network's outputs are.
    taken = (np.arange(head.size)[:, None] == action).T
    # Its log-probability would be 0, that of a certain action.
    if np.count_nonzero(taken.T) != len(action):
        raise IndexError(f"an action is none of {head.size} choices")
    probability = np.exp(log_p)

    def slopes(by_log_prob: Reals, by_entropy: float) -> tuple[Reals, list[Reals]]:
        rows = by_log_prob[:, None]
        slope = taken * rows - probability * rows
        if by_entropy:
            entropy = -(probability * log_p).sum(-1)
            slope -= by_entropy * probability * (log_p + entropy[:, None])
        return slope, []

    return ClosedForm((taken * log_p).sum(-1), slopes)


def _multi_categorical(head: MultiCategorical, parameters: Reals, action: Array) -> ClosedForm:
    pieces = zip(head.parts, head.cuts, action.T, strict=True)
    return _joint([_categorical(part, parameters[:, cut], one) for part, cut, one in pieces])


def _gaussian(head: Gaussian, parameters: Reals, action: Array) -> ClosedForm:
    """∂log π/∂μ = z/σ, ∂log π/∂log σ = z² − 1 and ∂H/∂log σ = 1; z = (a − μ)/σ."""
    log_std = head.log_std.detach().numpy()
    deviation = np.exp(-log_std)
    scaled = (np.asarray(action, parameters.dtype).reshape(parameters.shape) - parameters) * deviation
    square = scaled * scaled

    def slopes(by_log_prob: Reals, by_entropy: float) -> tuple[Reals, list[Reals]]:
        rows = by_log_prob[:, None]
        return rows * scaled * deviation, [(rows * (square - 1.0)).sum(0) + by_entropy * len(rows)]

    constant = log_std.sum() + head.size * 0.5 * math.log(2.0 * math.pi)
    return ClosedForm(-0.5 * square.sum(-1) - constant, slopes)


_FORMS: dict[type[ActionHead], Callable[[Any, Reals, Array], ClosedForm]] = {
    Categorical: _categorical,
    MultiCategorical: _multi_categorical,
    Gaussian: _gaussian,
}


# ---- Forward and backward over M rows.
#
# The bodies of actor and critic have one shape, so their layers are stacked: K = 2 of them take one product,
# one activation and one sum; a shared trunk is K = 1. A call on a few hundred rows takes microseconds, and
# finding its operands would take as long, so every view is made beforehand.
#
#     rows [M, D] → K layers' worth of [K, M, F] → parameters [M, P] by the first of K, value [M] by the last
#
# Outputs and their slopes are stored output by output, so that numpy loops over many rows, not few outputs.

Call = Callable[[], object]

_NARROW = 16
"""Gradients of weights with fewer inputs are computed transposed: a product with so few columns takes torch
three to eight times as long as one with so few rows."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer and its gradients: weights [..., F, D], biases [..., F], all of them views."""

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor

    @classmethod
    def of(cls, optimiser: FlatAdam, layers: Sequence[nn.Linear]) -> Self:
        """Return K layers of one shape, stacked, whose parameters `optimiser` has."""
        weight, weight_gradient = optimiser.stacked([layer.weight for layer in layers])
        bias, bias_gradient = optimiser.stacked([layer.bias for layer in layers])
        return cls(weight, bias, weight_gradient, bias_gradient)

    def of_one(self) -> "Linear":
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

    memory: a flat tensor for each of `Dense.widths`, of that times M = `count` numbers or more.

    Arrays: rows [M, D]; parameters, value: outputs, [M, P] and [M]; by_parameters, by_value: ∂loss/∂outputs.
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
            self._forward += hidden_forward(layer, *features[-2:])
        actor, critic = features[-1][0], features[-1][-1]
        self._forward += _head_forward(dense.actor, actor, parameters)
        self._forward += _head_forward(dense.critic, critic, value)
        self._backward = _head_backward(dense.actor, actor, by_parameters)
        self._backward += _head_backward(dense.critic, critic, by_value)
        if dense.hidden:
            self._backward += _bodies_backward(dense, features, (by_parameters, by_value), memory[5:7])

    def forward(self) -> None:
        for call in self._forward:
            call()

    def backward(self) -> None:
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


def hidden_forward(layer: Hidden, before: Tensor, after: Tensor) -> list[Call]:
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


def hidden_backward(layer: Hidden, before: Tensor, after: Tensor, delta: Tensor) -> list[Call]:
    """Take ∂loss/∂after [K, M, F] to before the activation, in place; uses up `after`."""
    if layer.activation is nn.ReLU:
        back = torch.ops.aten.threshold_backward.grad_input
        calls: list[Call] = [partial(back, delta, after, 0.0, grad_input=delta)]
    else:
        y, slope = after.numpy(), delta.numpy()
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
    """Go back from ∂loss/∂outputs, [P, M] and [1, M]. memory: two places for ∂loss/∂features in turn."""
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
        calls += hidden_backward(layer, before, features[index + 1], delta)
        if index:
            below = _part(next(places), before.shape)
            calls.append(_product(delta, layer.linear.weight, below))
            delta = below
    return calls


def _part(flat: Tensor, shape: Sequence[int]) -> Tensor:
    return flat[: math.prod(shape)].view(shape)
