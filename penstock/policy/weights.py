"""Weights as bytes: safetensors, SHA-256, and a strict way back; no pickle.

A blob comes from outside, so before anything is copied into a module its header is bounded and its
names, shapes and dtypes must be exactly the module's.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor, nn

from penstock.wire.tensor import Array

MAX_HEADER_BYTES = 256 * 1024
"""Most bytes of a header: names, dtypes and shapes of some two thousand tensors.

So many has the adapter of a model of 80 layers. A header is parsed before anything else is checked.
"""


def snapshot(module: nn.Module) -> dict[str, Array]:
    """Return copies of all parameters and buffers by name, on the CPU; later updates do not change them."""
    return {name: array_of(tensor) for name, tensor in module.state_dict().items()}


def array_of(tensor: Tensor) -> Array:
    """Return a copy of a tensor of any device as a contiguous array."""
    array: Array = tensor.detach().to("cpu", copy=True).contiguous().numpy()
    return array


def encode(weights: nn.Module | Mapping[str, Array]) -> bytes:
    """Return a module, or a `snapshot` of one, as a safetensors blob; equal weights give equal bytes."""
    arrays = snapshot(weights) if isinstance(weights, nn.Module) else weights
    return bytes(save_arrays({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}))


def sha256(blob: bytes) -> str:
    """Return the digest of a blob, lower-case hexadecimal."""
    return hashlib.sha256(blob).hexdigest()


def decode(blob: bytes) -> dict[str, Array]:
    """Return the arrays by name.

    Raises ValueError when the blob is not whole safetensors with a bounded header.
    """
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > MAX_HEADER_BYTES:
        raise ValueError(
            f"weights: {len(blob)} bytes with a header of {size}; at most {MAX_HEADER_BYTES} are allowed"
        )
    try:
        arrays: dict[str, Array] = load_arrays(blob)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"weights: not a whole safetensors blob: {error}") from error
    return arrays


def load_into(module: nn.Module, blob: bytes) -> None:
    """Copy a blob's tensors into a module, all or none.

    Raises ValueError that names the tensor when names, shapes or dtypes differ from the module's;
    the usual cause is a different policy section or environment than the blob was made with.
    """
    arrays, own = decode(blob), module.state_dict()
    if arrays.keys() != own.keys():
        missing, unknown = sorted(own.keys() - arrays.keys()), sorted(arrays.keys() - own.keys())
        raise ValueError(f"weights: missing {missing[:8]}, unknown {unknown[:8]}; is it the same policy?")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise ValueError(
                f"weights.{name}: {tensor.dtype}{tuple(tensor.shape)} does not fit "
                f"{own[name].dtype}{tuple(own[name].shape)}; is it the same policy?"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
