"""Weights as bytes, and everything that is refused on the way back."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from penstock.policy import weights
from penstock.policy.acting.array_policy import MAX_HEADER_BYTES
from tests.support.experience.experience import small_policy


def blob_of(header: object, body: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_a_blob_restores_every_parameter_and_buffer() -> None:
    first, second = small_policy(0, normalise_observations=True), small_policy(1, normalise_observations=True)
    blob = weights.encode(first)
    assert blob != weights.encode(second)
    weights.load_into(second, blob)
    assert weights.encode(second) == blob
    assert weights.sha256(blob) == weights.sha256(weights.encode(first))
    assert second.normaliser is not None
    assert second.normaliser.mean.dtype == torch.float64


def test_a_snapshot_does_not_follow_later_updates() -> None:
    policy = small_policy()
    blob, taken = weights.encode(policy), weights.snapshot(policy)
    with torch.no_grad():
        policy.actor_head.bias.add_(1.0)
    assert weights.encode(taken) == blob != weights.encode(policy)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "0 bytes"),
        (b"short", "5 bytes"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * 64, "header of 262145"),
        ((1 << 63).to_bytes(8, "little"), "header of"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{not json", "not a whole safetensors"),
        (blob_of({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8), "not a whole"),
        (
            blob_of({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 4]}}, b"\0" * 4),
            "not a whole",
        ),
        (blob_of({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4), "not a whole"),
        (b"\x80\x04pickle!" * 4, "header of"),
    ],
)
def test_what_is_not_a_blob_is_refused(blob: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights.decode(blob)


def test_a_truncated_blob_is_refused() -> None:
    blob = weights.encode(small_policy())
    for length in range(0, len(blob), 97):
        with pytest.raises(ValueError, match="weights"):
            weights.decode(blob[:length])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": np.zeros(1, np.float32)}, r"unknown \['extra'\]"),
        ({"weight": np.zeros((2, 3), np.float32)}, r"weights.weight.*\(2, 3\) does not fit.*\(3, 2\)"),
        ({"weight": np.zeros((3, 2), np.float64)}, r"weights.weight.*float64.*does not fit"),
    ],
)
def test_a_blob_of_another_module_changes_nothing(change: dict[str, np.ndarray], message: str) -> None:
    module = nn.Linear(2, 3)
    before = weights.encode(module)
    with pytest.raises(ValueError, match=message):
        weights.load_into(module, weights.encode(weights.snapshot(module) | change))
    assert weights.encode(module) == before


def test_a_missing_tensor_is_named() -> None:
    module = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"missing \['bias'\]"):
        weights.load_into(module, weights.encode({"weight": np.zeros((3, 2), np.float32)}))
