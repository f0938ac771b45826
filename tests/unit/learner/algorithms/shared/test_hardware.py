"""What an update runs on: nothing reads the device while gradient steps are made; precision; compilation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.config.settings import PPOSection
from penstock.learner.algorithms.gradient import PLAIN, DenseNetwork, Hardware, Network
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import Batch, assemble
from penstock.policy import weights
from tests.support.experience.experience import Collector, cartpoles, collect, small_policy

READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)
"""Operations that wait for a GPU: a number is taken out, something is copied, a size depends on values."""


class Reads(TorchDispatchMode):
    """Counts READS."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operation."""
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def make(hardware: Hardware = PLAIN, **section: Any) -> PPO:
    """A small PPO whose networks go through autograd, as they do on a GPU."""
    policy = small_policy(0, activation="silu", normalise_observations=True)
    return PPO(policy, PPOSection(**section), seed=0, hardware=hardware)


def reads(**section: Any) -> int:
    """Of one update."""
    ppo = make(entropy_coefficient=0.01, value_clip=0.2, **section)
    batch = collect(ppo.policy)
    with Reads() as counted:
        assert ppo.update(batch, progress=0.0).applied
    return int(counted.count)


def test_no_gradient_step_reads_the_device() -> None:
    assert reads(epochs=1, minibatches=1) == reads(epochs=5, minibatches=4) > 0
    once, often = reads(epochs=1, target_kl=1e6), reads(epochs=4, target_kl=1e6)
    assert often - once == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_gradient_step_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    ppo = PPO(small_policy().to(device), PPOSection(), seed=0)
    train: Callable[..., Any] = ppo._train

    def strictly(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ppo, "_train", strictly)
    fragments = [Collector(cartpoles(2), 1).fragment(small_policy(), 16)]
    for _ in range(2):
        assert ppo.update(assemble(fragments, device), progress=0.0).applied


def first_gradient(hardware: Hardware) -> tuple[Batch, Tensor]:
    """Of one minibatch that is the whole batch."""
    ppo = make(hardware, epochs=1, minibatches=1, max_gradient_norm=0)
    batch = collect(small_policy(1))
    ppo.update(batch, progress=0.0)
    return batch, ppo._optimiser.flat_gradient.clone()


def test_mixed_precision_gives_nearly_the_same_gradient() -> None:
    _, exact = first_gradient(Hardware())
    _, rounded = first_gradient(Hardware(bfloat16=True))
    assert rounded.dtype is torch.float32
    assert not torch.equal(exact, rounded)
    assert float((exact - rounded).norm() / exact.norm()) < 0.05


def test_mixed_precision_fakes_no_ratio() -> None:
    ppo = make(Hardware(bfloat16=True), epochs=1, minibatches=1)
    assert ppo.update(collect(ppo.policy), progress=0.0).metrics["kl_proximal"] < 1e-8


def test_what_is_asked_for_goes_through_autograd() -> None:
    for hardware, kind in (
        (Hardware(), DenseNetwork),
        (Hardware(bfloat16=True), Network),
        (Hardware(compiled=True), Network),
    ):
        ppo = PPO(small_policy(), PPOSection(), seed=0, hardware=hardware)
        assert type(ppo._network) is kind


@pytest.mark.slow
def test_compiled_networks_learn_the_same() -> None:
    results = []
    for compiled in (False, True):
        ppo = make(Hardware(compiled=compiled), learning_rate=1e-3)
        for steps in (16, 11, 23):
            assert ppo.update(collect(small_policy(1), steps=steps), progress=0.0).applied
        results.append(weights.snapshot(ppo.policy))
    for name, array in results[0].items():
        torch.testing.assert_close(
            torch.from_numpy(array), torch.from_numpy(results[1][name]), rtol=1e-4, atol=1e-5
        )
