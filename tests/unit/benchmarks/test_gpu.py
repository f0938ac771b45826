"""The benchmark of GPUs, proven where there is none."""

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.table import Options


def options(device: str) -> Options:
    """Of one run."""
    return Options(repeat=1, actors=1, rate=1.0, seconds=1.0, device=device)


def test_the_small_form_fills_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each network in both precisions, the convolutions on smaller images; the card, which is not there, tells nothing."""
    networks = (gpu.NETWORKS[0], replace(gpu.NETWORKS[1], observation=gpu._box((36, 36, 4), "uint8")))
    monkeypatch.setattr(gpu, "NETWORKS", networks)
    table = gpu.table(options("cpu"))
    assert [row[0] for row in table.rows] == [network.name for network in gpu.NETWORKS for _ in range(2)]
    for row in table.rows:
        shown = dict(zip(table.columns, row, strict=True))
        assert isinstance(shown["updates/s"], float)
        assert shown["updates/s"] > 0
        assert shown["GPU busy"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so nothing is skipped")
def test_without_a_gpu_it_says_so() -> None:
    """And what can be done instead."""
    table = gpu.table(options("cuda"))
    assert (list(table.rows), "no CUDA device" in table.note) == ([], True)


def test_the_bare_loop_trains_the_same_network() -> None:
    """From the first step on its parameters move."""
    network = gpu.NETWORKS[0]
    loop = gpu.BareLoop(network, gpu.made_up(network, small=True), torch.device("cpu"), bfloat16=False)
    before = [own.detach().clone() for own in loop.policy.parameters()]
    loop.update()
    assert all(not torch.equal(old, new) for old, new in zip(before, loop.policy.parameters(), strict=True))
