"""Weights of a module as bytes, and back: see `penstock.policy.acting.array_policy`."""

from collections.abc import Mapping

import numpy as np
import torch
from safetensors.numpy import save as save_arrays
from torch import Tensor, nn

from penstock.policy.acting.array_policy import decode, fitting, sha256
from penstock.protocol.tensor import Array

__all__ = ["array_of", "decode", "encode", "load_into", "sha256", "snapshot"]


def snapshot(module: nn.Module) -> dict[str, Array]:
    """Return copies of all parameters and buffers by name, on the CPU; later updates do not change them."""
    return {name: array_of(tensor) for name, tensor in module.state_dict().items()}


def array_of(tensor: Tensor) -> Array:
    array: Array = tensor.detach().to("cpu", copy=True).contiguous().numpy()
    return array


def encode(weights: nn.Module | Mapping[str, Array]) -> bytes:
    """Return a module, or a `snapshot` of one, as a safetensors blob; equal weights give equal bytes."""
    arrays = snapshot(weights) if isinstance(weights, nn.Module) else weights
    return bytes(save_arrays({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}))


def load_into(module: nn.Module, blob: bytes) -> None:
    """Copy a blob's tensors into a module, all or none; raises ValueError that names what does not fit."""
    own = module.state_dict()
    forms = {name: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in own.items()}
    arrays = fitting(blob, forms)
    with torch.no_grad():
        for name, array in arrays.items():
            own[name].copy_(torch.from_numpy(array))
