"""The name of a device, by that in a configuration."""

import pytest

pytest.importorskip("transformers", reason="language models need the extra rlhf")

import torch

from penstock.workloads.language.cached_generation import device_of


def test_what_is_named_is_taken_and_auto_is_what_there_is() -> None:
    there = "cuda" if torch.cuda.is_available() else "cpu"
    assert [device_of(name) for name in ("cpu", "cuda:1", "auto")] == ["cpu", "cuda:1", there]
