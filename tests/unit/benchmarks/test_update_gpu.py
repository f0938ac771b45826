"""The benchmark of GPUs, proven where there is none."""

from dataclasses import replace

import pytest
import torch

from benchmarks import update
from benchmarks.stand import Options


@pytest.mark.slow
def test_the_small_form_fills_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, nature = update.NETWORKS
    networks = (mlp, replace(nature, observation=update.box(36, 36, 4, dtype="uint8")))
    monkeypatch.setattr(update, "NETWORKS", networks)
    table = update.gpu_table(Options(device="cpu"))
    both = ("float32", "bfloat16")
    wanted = [(network.name, precision) for network in networks for precision in both]
    assert [(row[0], row[2]) for row in table.rows] == wanted
    for row in table.rows:
        shown = dict(zip(table.columns, row, strict=True))
        assert isinstance(shown["updates/s"], float)
        assert shown["updates/s"] > 0
        assert shown["GPU busy"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so nothing is skipped")
def test_without_a_gpu_it_says_so() -> None:
    table = update.gpu_table(Options(device="cuda"))
    assert (list(table.rows), "no CUDA device" in table.note) == ([], True)


def test_the_bare_loop_trains_the_same_network() -> None:
    network = update.NETWORKS[0]
    fragments = update.experience(network, small=True)
    loop = update.BareLoop(network, fragments, torch.device("cpu"), bfloat16=False)
    before = [own.detach().clone() for own in loop.policy.parameters()]
    loop.update()
    assert all(not torch.equal(old, new) for old, new in zip(before, loop.policy.parameters(), strict=True))
