"""A blob of weights: safetensors, SHA-256, and a strict way back; no pickle.

A blob comes from outside, so before anything is taken from it its header is bounded and its names, shapes and
dtypes must be exactly those that are expected.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from penstock.protocol.tensor import Array

MAX_HEADER_BYTES: Final = 256 * 1024
"""Most bytes of a header: names, dtypes and shapes of some two thousand tensors.

So many has the adapter of a model of 80 layers. A header is parsed before anything else is checked.
"""

Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def decode(blob: bytes) -> dict[str, Array]:
    """Return the arrays by name; raises ValueError for what is no whole blob with a bounded header."""
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


def fitting(blob: bytes, forms: Mapping[str, Form]) -> dict[str, Array]:
    """Return the arrays of a blob by name; raises ValueError that names the tensor unless `forms` are met."""
    arrays = decode(blob)
    if arrays.keys() != forms.keys():
        missing, unknown = sorted(forms.keys() - arrays.keys()), sorted(arrays.keys() - forms.keys())
        raise ValueError(f"weights: missing {missing[:8]}, unknown {unknown[:8]}; is it the same policy?")
    for name, array in arrays.items():
        dtype, shape = forms[name]
        if (array.dtype.name, array.shape) != (dtype, shape):
            raise ValueError(
                f"weights.{name}: {array.dtype.name}{array.shape} does not fit {dtype}{shape}; "
                "is it the same policy?"
            )
    return arrays
