"""Tensors of a checkpoint by path, "part/name", and back into modules."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.learner.algorithms.algorithm import AlgorithmState


def copies(part: str, module: nn.Module) -> dict[str, Tensor]:
    """Return copies of what a module's `state_dict` holds, on the CPU, of equal shape and dtype.

    part: first element of their paths.
    """
    return {
        f"{part}/{key}": value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()
    }


def load_copies(module: nn.Module, part: str, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `copies` returned back into a module, all or nothing.

    tensors: by path, of the module's shapes. Raises ValueError that names what is missing or misshapen.
    """
    own, found = module.state_dict(), under(tensors, f"{part}/")
    for key, tensor in own.items():
        if key not in found or found[key].shape != tensor.shape:
            raise ValueError(f"{part}/{key}: missing or not {tuple(tensor.shape)}; is it the same policy?")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(found[key])


def taken_over(own: AlgorithmState, found: AlgorithmState, *, going_on: Collection[str]) -> AlgorithmState:
    """Return `own` with what a restore takes from `found`: tensors, and the optimisers' counts of steps.

    Args:
        own: of the algorithm as it is.
        found: of a checkpoint.
        going_on: prefixes of the tensors that stay as they are, such as generators.

    Raises:
        ValueError: a tensor is missing or has another shape, or the counts of steps are missing.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in own.tensors.items():
        if name.startswith(tuple(going_on)):
            tensors[name] = tensor
        elif name not in found.tensors or found.tensors[name].shape != tensor.shape:
            there = tuple(found.tensors[name].shape) if name in found.tensors else "nothing"
            raise ValueError(f"{name}: {there} for {tuple(tensor.shape)}; it is of another network or space")
        else:
            tensors[name] = found.tensors[name]
    steps: Any = found.numbers.get("gradient_steps")
    if type(steps) is not type(own.numbers["gradient_steps"]):
        raise ValueError("gradient_steps: missing; it is of another algorithm")
    return AlgorithmState(tensors=tensors, numbers=own.numbers | {"gradient_steps": steps})


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose path begins with `prefix`, by the rest of it; shape and dtype stay."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
