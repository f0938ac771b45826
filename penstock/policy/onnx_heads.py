"""What an exported model says of each action head: outputs to act by, and how to read them.

`mode/PATH` is the action that the policy takes when it is deterministic, as an environment takes it. Beside
it stand the figures that an action is drawn from.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from penstock.policy.distributions import (
    ActionHead,
    Bernoulli,
    Categorical,
    ConditionalSquashedGaussian,
    EpsilonGreedy,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete

MODE: Final = "mode"


def figures(head: ActionHead, parameters: Tensor) -> dict[str, Tensor]:
    """Return the outputs of a head by name, the mode first; parameters: [M, size].

    Raises ValueError for a head that is not known here.
    """
    match head:
        case EpsilonGreedy():
            return {MODE: _mode_of_choice(head, parameters), "values": parameters}
        case Categorical():
            return {MODE: _mode_of_choice(head, parameters), "logits": parameters}
        case MultiCategorical():
            parts = [parameters[:, cut].argmax(-1) for cut in head.cuts]
            return {MODE: _typed(head, torch.stack(parts, -1)), "logits": parameters}
        case Bernoulli():
            return {MODE: _typed(head, parameters > 0), "logits": parameters}
        case Gaussian():
            return _of_gaussian(head, parameters)
        case _:
            raise ValueError(f"{head.path}: {type(head).__name__} has no ONNX form: export safetensors")


def how_to_act(head: ActionHead) -> str:
    """Return how an action is drawn from the figures, in one line for the model's metadata."""
    match head:
        case EpsilonGreedy():
            return "mode: start + argmax(values)"
        case Categorical():
            return "mode: start + argmax(logits); drawn: start + i with probability softmax(logits)[i]"
        case MultiCategorical():
            return "logits of the choices behind one another; each: argmax, or drawn with softmax"
        case Bernoulli():
            return "mode: logits > 0; drawn: 1 with probability sigmoid(logits)"
        case SquashedGaussian():
            return "u = mean, or drawn: mean + exp(log_std)·noise; (low+high)/2 + (high-low)/2·tanh(u)"
        case _:
            return "u = mean, or drawn: mean + exp(log_std)·noise; u clipped to low..high"


def described(leaf: Leaf) -> dict[str, Any]:
    """Return a leaf of a space as JSON; a bound that is not finite is null."""
    match leaf:
        case Discrete():
            return {"type": "Discrete", "dtype": leaf.dtype, "n": leaf.n, "start": leaf.start}
        case MultiDiscrete():
            return {"type": "MultiDiscrete", "dtype": leaf.dtype, "nvec": list(leaf.nvec)}
        case MultiBinary():
            return {"type": "MultiBinary", "dtype": leaf.dtype, "n": leaf.n}
        case Box():
            bounds = {"low": _finite(leaf.low), "high": _finite(leaf.high)}
            return {"type": "Box", "dtype": leaf.dtype, "shape": list(leaf.shape), **bounds}


def _mode_of_choice(head: Categorical, parameters: Tensor) -> Tensor:
    return _typed(head, parameters.argmax(-1) + head.start)


def _of_gaussian(head: Gaussian, parameters: Tensor) -> dict[str, Tensor]:
    if isinstance(head, ConditionalSquashedGaussian):
        mean, log_std = head.split(parameters)
    else:
        mean, log_std = parameters, head.log_std.expand(parameters.shape)
    shape = (-1, *head.shape)
    raw = _typed(head, mean).reshape(shape)
    low, high = torch.from_numpy(np.array(head.low)), torch.from_numpy(np.array(head.high))
    if isinstance(head, SquashedGaussian):
        mode = 0.5 * (high + low) + 0.5 * (high - low) * raw.tanh()
    else:
        mode = torch.minimum(torch.maximum(raw, low), high)
    return {MODE: mode, "mean": mean.reshape(shape), "log_std": log_std.reshape(shape)}


def _typed(head: ActionHead, values: Tensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, head.action_dtype.name)
    return values.to(dtype)


def _finite(bounds: np.ndarray) -> list[float | None]:
    return [float(one) if np.isfinite(one) else None for one in bounds.flatten()]
