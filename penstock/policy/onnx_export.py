"""A policy as an ONNX model: raw observations in; actions, what they are drawn from, and the value out.

Inputs are the leaves of the observation space by their paths, [batch, *shape] in their dtypes, raw:
normaliser and encoders are in the model. The action masks of a run with masks follow, `mask/PATH`, bool
[batch, n], true where allowed.

Outputs are, for every leaf of the action space, `mode/PATH`, the deterministic action in the form of the
environment, and `logits/PATH`, `values/PATH`, or `mean/PATH` and `log_std/PATH`; `parameters` [batch, P], the
concatenated outputs of the network; and `value` [batch]. The metadata has `action` and `observation`: path,
space with bounds, and for actions how to draw one (`docs/onnx.md`). Needs the extra `onnx`.
"""

import copy
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx  # noqa: F401 - raises ImportError here
import onnxscript  # noqa: F401
import torch
from torch import Tensor, nn

from penstock.policy import distributions as heads
from penstock.policy.acting.drawing import LARGEST_BOUND
from penstock.policy.networks import Inputs
from penstock.policy.policy import Policy
from penstock.protocol.schema import choices
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, leaves

# ---- Outputs and description of each action head in an exported model.

MODE: Final = "mode"


def figures(head: heads.ActionHead, parameters: Tensor) -> dict[str, Tensor]:
    """Return the outputs of a head by name, the mode first; parameters: [M, size]."""
    match head:
        case heads.EpsilonGreedy():
            return {MODE: _mode_of_choice(head, parameters), "values": parameters}
        case heads.Categorical():
            return {MODE: _mode_of_choice(head, parameters), "logits": parameters}
        case heads.MultiCategorical():
            parts = [parameters[:, cut].argmax(-1) for cut in head.cuts]
            return {MODE: _typed(head, torch.stack(parts, -1)), "logits": parameters}
        case heads.Bernoulli():
            return {MODE: _typed(head, parameters > 0), "logits": parameters}
        case heads.Gaussian():
            return _of_gaussian(head, parameters)
        case _:
            raise ValueError(f"{head.path}: {type(head).__name__} has no ONNX form: export safetensors")


def how_to_act(head: heads.ActionHead) -> str:
    """Return how to draw an action from the outputs, in one line for the model's metadata."""
    match head:
        case heads.EpsilonGreedy():
            return "mode: start + argmax(values)"
        case heads.Categorical():
            return "mode: start + argmax(logits); drawn: start + i with probability softmax(logits)[i]"
        case heads.MultiCategorical():
            return "logits of the choices behind one another; each: argmax, or drawn with softmax"
        case heads.Bernoulli():
            return "mode: logits > 0; drawn: 1 with probability sigmoid(logits)"
        case heads.SquashedGaussian():
            return "u = mean, or drawn: mean + exp(log_std)·noise; (low+high)/2 + (high-low)/2·tanh(u)"
        case _:
            return (
                "u = mean, or drawn: mean + exp(log_std)·noise; (low+high)/2 + (high-low)/2·u, or u where a "
                "bound is null, clipped to low..high"
            )


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


def _mode_of_choice(head: heads.Categorical, parameters: Tensor) -> Tensor:
    return _typed(head, parameters.argmax(-1) + head.start)


def _of_gaussian(head: heads.Gaussian, parameters: Tensor) -> dict[str, Tensor]:
    mean, log_std = head.split(parameters)
    shape = (-1, *head.shape)
    raw = _typed(head, mean).reshape(shape)
    low, high = torch.from_numpy(np.array(head.low)), torch.from_numpy(np.array(head.high))
    inside = raw.double()
    if isinstance(head, heads.SquashedGaussian):
        inside = inside.tanh()
    stretched = _typed(head, torch.from_numpy(head.centre) + torch.from_numpy(head.reach) * inside)
    mode = torch.minimum(torch.maximum(stretched, low), high)
    return {MODE: mode, "mean": mean.reshape(shape), "log_std": log_std.expand(mean.shape).reshape(shape)}


def _typed(head: heads.ActionHead, values: Tensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, head.action_dtype.name)
    return values.to(dtype)


def _finite(bounds: np.ndarray) -> list[float | None]:
    return [float(one) if abs(one) < LARGEST_BOUND else None for one in bounds.flatten()]


PARAMETERS: Final = "parameters"
VALUE: Final = "value"
_EXAMPLE_ROWS: Final = 2


class Exported(nn.Module):
    """The forward pass with one argument per leaf and mask, and one result per output."""

    def __init__(self, policy: Policy, masks: Sequence[str]) -> None:
        super().__init__()
        self._policy = policy
        self._paths = [*input_names(policy), *masks]
        self._masked = bool(masks)

    def forward(self, *rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(*rows).values())

    def outputs(self, *rows: Tensor) -> dict[str, Tensor]:
        given = dict(zip(self._paths, rows, strict=True))
        outputs = self._policy.outputs(self._read(given))
        found: dict[str, Tensor] = {}
        for head, part in self._policy.pieces(outputs.parameters):
            found |= {f"{name}/{head.path}": tensor for name, tensor in figures(head, part).items()}
        return {**found, PARAMETERS: outputs.parameters, VALUE: outputs.value}

    def _read(self, given: Mapping[str, Tensor]) -> Inputs:
        inputs = self._policy.read({path: given[path] for path in input_names(self._policy)})
        if not self._masked:
            return inputs
        # Concatenated: the export of a write into a new tensor would fix the number of rows.
        free = torch.zeros_like(inputs.vector[:, :1], dtype=torch.bool)
        parts = [
            ~given[name] if (name := f"mask/{head.path}") in given else free.expand(-1, head.size)
            for head in self._policy.action_heads
        ]
        return replace(inputs, forbidden=torch.cat(parts, 1))


def to_onnx(policy: Policy, metadata: Mapping[str, str], *, masks: Sequence[str] = ()) -> bytes:
    """Return an ONNX model with the present weights of `policy`, which is not changed.

    metadata: further entries of the model's metadata. masks: names of the masks of the run's observations,
    such as `mask/action`. Raises ValueError for a policy with state.
    """
    if policy.state_space.spaces:
        remembered = ", ".join(path for path, _ in leaves(policy.state_space, "state"))
        raise ValueError(
            f"a policy that remembers ({remembered}) has no ONNX form here: export it as safetensors, or set "
            "policy.recurrent='none' and policy.frame_stack=1"
        )
    module = Exported(copy.deepcopy(policy).cpu(), masks).eval()
    example = _example(policy, masks)
    model = _exported(
        module, example, [*input_names(policy), *masks], list(module.outputs(*example))
    ).model_proto
    observed = leaves(policy.observation_space, "observation")
    observation = [{"path": path, "space": described(leaf)} for path, leaf in observed]
    described_spaces = {"action": json.dumps(_actions(policy)), "observation": json.dumps(observation)}
    for key, value in {**metadata, **described_spaces}.items():
        model.metadata_props.add(key=key, value=value)
    return bytes(model.SerializeToString())


def input_names(policy: Policy) -> list[str]:
    return [path for path, _ in leaves(policy.observation_space, "observation")]


def _example(policy: Policy, masks: Sequence[str]) -> tuple[Tensor, ...]:
    observed = (
        torch.full(
            (_EXAMPLE_ROWS, *leaf.shape),
            leaf.start if isinstance(leaf, Discrete) else 0,
            dtype=getattr(torch, leaf.dtype),
        )
        for _, leaf in leaves(policy.observation_space, "observation")
    )
    sizes = {f"mask/{path}": choices(leaf) for path, leaf in leaves(policy.action_space, "action")}
    return (*observed, *(torch.ones((_EXAMPLE_ROWS, sizes[name]), dtype=torch.bool) for name in masks))


def _exported(
    module: Exported, example: tuple[Tensor, ...], inputs: Sequence[str], outputs: Sequence[str]
) -> Any:
    batch = torch.export.Dim("batch")
    # It warns about packages that are not needed.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            module,
            example,
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=(tuple({0: batch} for _ in example),),
        )


def _actions(policy: Policy) -> list[dict[str, Any]]:
    found, start = [], 0
    spaces = leaves(policy.action_space, "action")
    for head, (path, leaf) in zip(policy.action_heads, spaces, strict=True):
        place = {"path": path, "kind": type(head).__name__, "start": start, "size": head.size}
        found.append({**place, "space": described(leaf), "act": how_to_act(head)})
        start += head.size
    return found
