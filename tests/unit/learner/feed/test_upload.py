"""How batches reach the device."""

from functools import partial

import pytest
import torch

from penstock.learner.batch import Batch, Upload, assemble, tensors
from tests.support.experience.experience import Collector, Fragment, cartpoles, small_policy

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def fragments() -> list[Fragment]:
    """Two, of unequal length."""
    policy = small_policy()
    return [Collector(cartpoles(2), session).fragment(policy, 8 + session) for session in (1, 2)]


def same(one: Batch, other: Batch) -> bool:
    """Equal values, wherever they are."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(tensors(one), tensors(other), strict=True))


def test_on_a_cpu_a_batch_is_there_at_once() -> None:
    parts = fragments()
    batch = Upload(CPU).stage(partial(assemble, parts, CPU))
    batch.arrive()
    assert same(batch, assemble(parts, CPU))


def test_every_tensor_of_a_batch_is_named() -> None:
    batch = assemble(fragments(), CPU)
    assert len(list(tensors(batch))) == 8 + len(batch.observation) + len(batch.action) + len(
        batch.final_observation
    )


@needs_gpu
def test_a_batch_that_was_copied_beside_other_work_is_whole() -> None:
    parts, gpu = fragments(), torch.device("cuda", 0)
    upload = Upload(gpu)
    busy = torch.randn((4096, 4096), device=gpu)
    for _ in range(20):
        busy = busy @ busy
        batch = upload.stage(partial(assemble, parts, gpu))
        batch.arrive()
        assert same(batch, assemble(parts, CPU))
