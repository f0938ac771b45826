"""Tensors of a checkpoint by path, "part/name", and back into modules."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def copies(part: str, module: nn.Module) -> dict[str, Tensor]:
    """What a module's `state_dict` holds, on the CPU."""
    return {
        f"{part}/{key}": value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()
    }


def load_copies(module: nn.Module, part: str, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of `copies`, all or nothing; raises ValueError that names what is missing or misshapen."""
    own, found = module.state_dict(), under(tensors, f"{part}/")
    for key, tensor in own.items():
        if key not in found or found[key].shape != tensor.shape:
            raise ValueError(f"{part}/{key}: missing or not {tuple(tensor.shape)}; is it the same policy?")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(found[key])


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose path begins so, by the rest of it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
