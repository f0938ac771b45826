"""The benchmark of GPUs, proven where there is none."""

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.table import Options


def options(device: str) -> Options:
    """Of one run."""
    return Options(repeat=1, actors=1, rate=1.0, seconds=1.0, device=device)


@pytest.mark.slow
def test_the_small_form_fills_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each network in what it can, the convolutions on smaller images.

    The card, which is not there, tells nothing.
    """
    mlp, nature, lstm = gpu.NETWORKS
    networks = (mlp, replace(nature, observation=gpu._box((36, 36, 4), "uint8")), lstm)
    monkeypatch.setattr(gpu, "NETWORKS", networks)
    table = gpu.table(options("cpu"))
    both = ("float32", "bfloat16")
    wanted = [(network.name, p) for network in (mlp, nature) for p in both] + [(lstm.name, "float32")]
    assert [(row[0], row[2]) for row in table.rows] == wanted
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


@pytest.mark.parametrize("network", [gpu.NETWORKS[0], gpu.NETWORKS[2]], ids=lambda network: network.name)
def test_the_bare_loop_trains_the_same_network(network: gpu.Network) -> None:
    """From the first step on its parameters move."""
    loop = gpu.BareLoop(network, gpu.made_up(network, small=True), torch.device("cpu"), bfloat16=False)
    before = [own.detach().clone() for own in loop.policy.parameters()]
    loop.update()
    assert all(not torch.equal(old, new) for old, new in zip(before, loop.policy.parameters(), strict=True))


def test_the_bare_loop_runs_a_recurrent_core_through_time() -> None:
    """Its outputs are those that the policy gives one step after the other."""
    network = gpu.NETWORKS[2]
    fragments = gpu.made_up(network, small=True)
    loop = gpu.BareLoop(network, fragments, torch.device("cpu"), bfloat16=False)
    column = 2
    ours = loop.outputs(loop.rows[:, [column]].flatten()).parameters
    state = {path: torch.from_numpy(rows[:1]) for path, rows in loop.policy.initial_state(1).items()}
    for step, seen in enumerate(fragments[0][1]["observation"][:-1, column]):
        row = {"observation": torch.from_numpy(seen)[None], **state}
        actor, _, state = loop.policy._features(loop.policy.read(row))
        torch.testing.assert_close(loop.policy.actor_head(actor)[0], ours[step])
