"""Updates by one rank or by several, compared: processes that meet as under torchrun.

`python -m tests.support.run.rank_updates FOLDER UPDATES CASE…` is one rank of several, by its environment.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its documentation

from penstock.config.settings import ImpalaSection, OnPolicySection, PPOSection, ReinforceSection
from penstock.learner.algorithms.gradient import Hardware
from penstock.learner.algorithms.ppo import OnPolicy
from penstock.learner.algorithms.registry import make
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.batch import assemble, nothing
from penstock.learner.ranks.roles import divide
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete
from tests.support.experience.experience import Collector, Fragment, cartpoles, small_policy
from tests.support.run.forked_process import MODULE, ForkedProcess

PATIENCE_S = 120.0


@contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """A store on loopback, and what torchrun's agent would put into the environment about it."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    del store


def run(size: int, folder: Path, module: str, *words: str) -> None:
    """Run each rank of `python -m MODULE WORDS…`; AssertionError with what one said that fails.

    folder: where each writes what it says.
    """
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    with meeting_place() as place:
        started = [
            ForkedProcess(
                MODULE,
                module,
                *words,
                output=log,
                environment={**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": str(size)},
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for process, log in zip(started, logs, strict=True):
                assert process.wait(PATIENCE_S) == 0, log.read_text()
        finally:
            for process in started:
                process.kill()


SCHEMA = fragment_schema(Box(np.full(4, -10, np.float32), np.full(4, 10, np.float32)), Discrete(2))
SHAPES = ((16, 3), (9, 1), (12, 2), (16, 2))
"""Steps and slots of the fragments of a batch."""
UPDATES_BEHIND = 2
"""By which a fragment lags more than the one before it, as far as the run has come."""
EVERY_TERM = PPOSection(
    learning_rate=1e-3,
    entropy_coefficient=0.01,
    value_clip=0.2,
    dual_clip=3.0,
    minibatches=3,
    target_kl=0.01,
    adaptive_kl=0.005,
    scale_rewards=True,
    staleness=2,
    lagging_epochs=2,
    mask_after=4,
)
CASES: dict[str, tuple[OnPolicySection, dict[str, Any]]] = {
    "plain": (PPOSection(learning_rate=1e-3), {}),
    "every-term": (EVERY_TERM, {"normalise_observations": True}),
    "vtrace-shared": (
        PPOSection(learning_rate=1e-3, advantage="vtrace", objective="coupled", normalise_advantages=False),
        {"shared_trunk": True, "activation": "silu"},
    ),
    "batch-norm": (PPOSection(learning_rate=1e-3, minibatches=2), {"hidden_norm": "batch"}),
    "impala": (ImpalaSection(learning_rate=1e-3, entropy_coefficient=0.01), {"hidden_norm": "layer"}),
    "reinforce": (ReinforceSection(learning_rate=1e-3, scale_rewards=True), {}),
    "dropout": (PPOSection(learning_rate=1e-3, minibatches=2), {"dropout": 0.5, "hidden_norm": "batch"}),
    "poisoned": (PPOSection(learning_rate=1e-3, epochs=1, minibatches=2), {"normalise_observations": True}),
}
"""By name: the algorithm, and what differs from the defaults of the policy."""


def batches(updates: int) -> list[list[Fragment]]:
    """Ragged fragments of one behaviour policy, some steps not valid; environments move from rank to rank."""
    behaviour = small_policy(7)
    collectors = [Collector(cartpoles(slots, max_episode_steps=30), n) for n, (_, slots) in enumerate(SHAPES)]
    made = []
    for update in range(updates):
        fragments = [
            _lagging(_gap(collector.fragment(behaviour, steps), update), max(0, update - UPDATES_BEHIND * n))
            for n, (collector, (steps, _)) in enumerate(zip(collectors, SHAPES, strict=True))
        ]
        made.append(fragments[update % 4 :] + fragments[: update % 4])
    # Fewer fragments than ranks.
    made[3] = made[3][:1]
    return made


def _lagging(fragment: Fragment, update: int) -> Fragment:
    header, arrays = fragment
    spans = tuple(span._replace(update=update) for span in header.weights)
    return replace(header, weights=spans), arrays


def _gap(fragment: Fragment, update: int) -> Fragment:
    header, arrays = fragment
    valid = arrays["valid"].copy()
    valid[update % 5 : update % 5 + 2, 0] = False
    return header, arrays | {"valid": valid}


def poisoned(fragments: list[Fragment]) -> list[Fragment]:
    """Spoil the first and the last of several: an impossible log-probability, a reward of no size."""
    if len(fragments) == 1:
        return fragments
    first, *others, last = fragments
    return [_spoiled(first, "log_prob", -200.0), *others, _spoiled(last, "reward", np.inf)]


def _spoiled(fragment: Fragment, name: str, value: float) -> Fragment:
    header, arrays = fragment
    array = arrays[name].copy()
    array[arrays["valid"]] = value
    return header, arrays | {name: array}


def learn(name: str, updates: int, group: RankGroup, rank: int) -> dict[str, Tensor]:
    """The gradient of the first minibatch and the state after all updates, with what each update reported."""
    section, policy = CASES[name]
    algorithm = make(small_policy(3, **policy).double(), section, seed=5, hardware=Hardware(group=group))
    assert isinstance(algorithm, OnPolicy)
    gradients: list[Tensor] = []
    step: Callable[..., Tensor] = algorithm._optimiser.step

    def noting(gradient: Tensor, learning_rate: float, max_norm: float) -> Tensor:
        if gradient.isfinite().all():
            gradients.append(gradient.clone())
        return step(gradient, learning_rate, max_norm)

    algorithm._optimiser.step = noting  # type: ignore[method-assign]
    metrics: list[list[float]] = []
    culprits: list[int] = []
    left_out: list[int] = []
    for count, honest in enumerate(batches(updates)):
        fragments = poisoned(honest) if name == "poisoned" else honest
        mine = divide([header.charge for header, _ in fragments], group.size)[rank]
        entries = [(10 * count + place, 100) for place in range(1, len(fragments) + 1)]
        batch = assemble(fragments[mine] or [nothing(SCHEMA)], torch.device("cpu"), entries[mine] or None)
        update = algorithm.update(batch, progress=0.0)
        assert update.applied
        metrics.append([float(update.steps), float(update.gradient_steps), *update.metrics.values()])
        culprits += sorted(update.culprits)
        left_out.append(update.left_out)
    told = {"metrics": metrics, "culprits": culprits, "left_out": left_out}
    tensors = {key: torch.tensor(numbers) for key, numbers in told.items()}
    return algorithm.state().tensors | tensors | {"gradient": gradients[0]}


def main(folder: Path, updates: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    group = RankGroup(dist.group.WORLD)
    for name in names:
        save_file(learn(name, updates, group, group.rank), folder / f"{name}-{group.rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
