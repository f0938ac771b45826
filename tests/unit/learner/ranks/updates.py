"""Updates of PPO by one rank or by several, for the comparison of the two.

`python -m tests.unit.learner.ranks.updates FOLDER UPDATES CASE…` is one rank of several, by its environment.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from learner.algorithms.group import Group
from learner.algorithms.hardware import Hardware
from learner.algorithms.ppo import PPO
from learner.batch import assemble, nothing
from learner.ranks.collectives import TorchGroup
from learner.ranks.division import divide
from penstock.runtime.settings import AlgorithmSection
from penstock.wire.schema import fragment_schema
from penstock.wire.spaces import Box, Discrete
from tests.experience import Collector, Fragment, cartpoles, small_policy

SCHEMA = fragment_schema(Box(np.full(4, -10, np.float32), np.full(4, 10, np.float32)), Discrete(2))
SHAPES = ((16, 3), (9, 1), (12, 2), (16, 2))
"""Steps and slots of the fragments of a batch."""
EVERY_TERM: dict[str, Any] = {
    "entropy_coefficient": 0.01,
    "value_clip": 0.2,
    "minibatches": 3,
    "target_kl": 0.01,
    "scale_rewards": True,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "every-term": (EVERY_TERM, {"normalise_observations": True}),
    "vtrace-shared": (
        {"advantage": "vtrace", "objective": "coupled", "normalise_advantages": False},
        {"shared_trunk": True, "activation": "silu"},
    ),
}
"""By name: what differs from the defaults of the algorithm and of the policy."""


def batches(updates: int) -> list[list[Fragment]]:
    """Ragged fragments of one behaviour policy, some steps not valid; environments move from rank to rank."""
    behaviour = small_policy(7)
    collectors = [Collector(cartpoles(slots, max_episode_steps=30), n) for n, (_, slots) in enumerate(SHAPES)]
    made = []
    for update in range(updates):
        fragments = [
            _gap(collector.fragment(behaviour, steps), update)
            for collector, (steps, _) in zip(collectors, SHAPES, strict=True)
        ]
        made.append(fragments[update % 4 :] + fragments[: update % 4])
    # Fewer fragments than ranks.
    made[3] = made[3][:1]
    return made


def _gap(fragment: Fragment, update: int) -> Fragment:
    header, arrays = fragment
    valid = arrays["valid"].copy()
    valid[update % 5 : update % 5 + 2, 0] = False
    return header, arrays | {"valid": valid}


def learn(name: str, updates: int, group: Group, rank: int) -> dict[str, Tensor]:
    """The gradient of the first minibatch and the state after all updates, with what each update reported."""
    section, policy = CASES[name]
    ppo = PPO(
        small_policy(3, **policy).double(),
        AlgorithmSection(learning_rate=1e-3, **section),
        seed=5,
        hardware=Hardware(group=group),
    )
    gradients: list[Tensor] = []
    step: Callable[..., Tensor] = ppo._optimiser.step

    def noting(gradient: Tensor, learning_rate: float, max_norm: float) -> Tensor:
        gradients.append(gradient.clone())
        return step(gradient, learning_rate, max_norm)

    ppo._optimiser.step = noting  # type: ignore[method-assign]
    metrics = []
    for fragments in batches(updates):
        mine = divide([header.charge for header, _ in fragments], group.size)[rank]
        batch = assemble(fragments[mine] or [nothing(SCHEMA)], torch.device("cpu"))
        update = ppo.update(batch, progress=0.0)
        assert update.applied
        metrics.append([float(update.steps), float(update.gradient_steps), *update.metrics.values()])
    return ppo.state().tensors | {"gradient": gradients[0], "metrics": torch.tensor(metrics)}


def main(folder: Path, updates: int, names: list[str]) -> None:
    """Cases, as a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    group = TorchGroup(dist.group.WORLD)
    for name in names:
        save_file(learn(name, updates, group, group.rank), folder / f"{name}-{group.rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
