"""The learner's update on a GPU, fed as in a run, beside the same update in a bare loop on data in place.

Fed: a thread assembles fragments into pinned memory and copies them on a stream of its own, two batches
ahead, while PPO trains on the one before. Bare: the same networks, all rows on the device beforehand, and per
minibatch only forward, the clipped losses, backward by autograd, `clip_grad_norm_` and torch's fused
Adam; it prepares, measures and checks nothing. Seconds are those of the clock, from the first update after
warming up to the end of the last.

    fed, of bare       updates per second of the one by those of the other
    GPU busy           share of the time in which the card ran a kernel by nvidia-smi, fed
    waits for data     share of the time that the updating thread waited for a batch
    copying            share of the time in which batches were copied, beside the updates or not

A recurrent core is neither compiled nor in mixed precision, so it has one row.

`--device cpu` does the same in a small form, to check that this script works; its figures say nothing about
GPUs.
"""

import queue
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.table import Cell, Options, Table
from learner.algorithms.on_policy.ppo import PPO
from learner.algorithms.shared.hardware import Hardware
from learner.batch import Fragments, assemble
from learner.feed.upload import Staged, Upload, tensors, upload_to
from penstock.config.settings import PolicySection, PPOSection
from penstock.policy.actor_critic import Outputs
from penstock.policy.build import build as build_policy
from penstock.policy.policy import Policy
from penstock.policy.recurrent import Core
from penstock.wire.fragment import FragmentHeader, Slot, WeightSpan
from penstock.wire.schema import FragmentSchema, fragment_schema, state_rules
from penstock.wire.spaces import Box, Discrete
from penstock.wire.tensor import DTYPES, Array

PREFETCH: Final = 2
WARM: Final = 3
_SAMPLE_S: Final = 0.2
_ACTIONS: Final = Discrete(6)
_COLUMNS: Final = (
    "network",
    "rows",
    "precision",
    "updates/s",
    "of bare",
    "GPU busy",
    "waits for data",
    "copying",
)
_TITLE: Final = "PPO's update, 4 epochs of 4 minibatches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network to train, on `fragments` × `steps` × `slots` rows.

    A CPU trains on `small` of their steps of four slots.
    """

    name: str
    observation: Box
    steps: int
    slots: int
    fragments: int
    small: int
    policy: PolicySection = field(default_factory=PolicySection)


def _box(shape: tuple[int, ...], dtype: str) -> Box:
    low, high = (0, 255) if dtype == "uint8" else (-np.inf, np.inf)
    return Box(np.full(shape, low, dtype), np.full(shape, high, dtype))


NETWORKS: Final = (
    Network(name="MLP 64-64", observation=_box((8,), "float32"), steps=128, slots=32, fragments=8, small=8),
    Network(
        name="Nature, 84×84×4",
        observation=_box((84, 84, 4), "uint8"),
        steps=32,
        slots=16,
        fragments=8,
        small=1,
    ),
    Network(
        name="LSTM 64",
        observation=_box((8,), "float32"),
        steps=128,
        slots=32,
        fragments=8,
        small=8,
        policy=PolicySection(recurrent="lstm"),
    ),
)


def table(options: Options) -> Table:
    """Return a row for each network and precision."""
    if options.device == "cuda" and not torch.cuda.is_available():
        note = "skipped: torch sees no CUDA device here; `--device cpu` runs a small form of it"
        return Table(title=_TITLE, columns=_COLUMNS, rows=[], note=note)
    device = torch.device(options.device)
    rows = [
        _row(network, device, bfloat16=bfloat16, repeat=options.repeat)
        for network in NETWORKS
        for bfloat16 in ((False, True) if network.policy.recurrent == "none" else (False,))
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, in a small form"
    return Table(title=f"{_TITLE}, on {name}", columns=_COLUMNS, rows=rows)


def _row(network: Network, device: torch.device, *, bfloat16: bool, repeat: int) -> tuple[Cell, ...]:
    fragments = made_up(network, small=device.type == "cpu")
    updates = 100 if device.type == "cuda" else 2
    bare = [bare_rate(network, fragments, device, updates, bfloat16=bfloat16) for _ in range(repeat)]
    fed = [fed_updates(network, fragments, device, updates, bfloat16=bfloat16) for _ in range(repeat)]
    rate = statistics.median(one.rate for one in fed)
    busy = [one.busy for one in fed if one.busy is not None]
    return (
        network.name,
        sum(header.charge for header, _ in fragments),
        "bfloat16" if bfloat16 else "float32",
        rate,
        rate / statistics.median(bare),
        statistics.median(busy) if busy else None,
        statistics.median(one.waited for one in fed),
        statistics.median(one.copied for one in fed),
    )


# ---- fed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """Measurements of fed updates.

    rate: updates per second. busy, waited, copied: shares of the time; busy: None where it cannot be read.
    """

    rate: float
    busy: float | None
    waited: float
    copied: float


def fed_updates(
    network: Network, fragments: Fragments, device: torch.device, updates: int, *, bfloat16: bool
) -> Fed:
    """Run PPO as a learner does, from fragments that are loaded and checked."""
    policy = _policy(network, device)
    algorithm = PPO(policy, PPOSection(), seed=0, hardware=Hardware(bfloat16=bfloat16))
    upload = upload_to(device)
    copy_s = _copy_seconds(upload, fragments)
    waited_s = 0.0
    with _feeding(upload, fragments) as batches:
        for _ in range(WARM):
            _update(algorithm, batches.get())
        with _watched(device) as busy:
            began_s = time.perf_counter()
            for _ in range(updates):
                asked_s = time.perf_counter()
                staged = batches.get()
                waited_s += time.perf_counter() - asked_s
                _update(algorithm, staged)
            _finish(device)
            seconds = time.perf_counter() - began_s
    return Fed(
        rate=updates / seconds,
        busy=statistics.mean(busy) / 100 if busy else None,
        waited=waited_s / seconds,
        copied=copy_s * updates / seconds,
    )


def _update(algorithm: PPO, staged: Staged) -> None:
    staged.arrive()
    if not algorithm.update(staged.batch, progress=0.0).applied:
        raise RuntimeError("the update was not applied: the made-up batch diverged")


@contextmanager
def _feeding(upload: Upload, fragments: Fragments) -> Iterator["queue.Queue[Staged]"]:
    """Yield a queue of batches from a thread of their own, a few ahead."""
    batches: queue.Queue[Staged] = queue.Queue(PREFETCH)
    over = threading.Event()

    def feed() -> None:
        while not over.is_set():
            staged = upload.stage(partial(assemble, fragments, upload.device))
            while not over.is_set():
                try:
                    batches.put(staged, timeout=_SAMPLE_S)
                except queue.Full:
                    continue
                break

    thread = threading.Thread(target=feed, name="feed")
    thread.start()
    try:
        yield batches
    finally:
        over.set()
        thread.join()


def _copy_seconds(upload: Upload, fragments: Fragments) -> float:
    """Return the seconds of one batch from pinned memory to the device, with nothing beside it.

    0 on a CPU.
    """
    if upload.device.type != "cuda":
        return 0.0
    there = upload.stage(partial(assemble, fragments, upload.device))
    there.arrive()
    pinned = [tensor.cpu().pin_memory() for tensor in tensors(there.batch)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for tensor in pinned:
        tensor.to(upload.device, non_blocking=True)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


@contextmanager
def _watched(device: torch.device) -> Iterator[list[float]]:
    """Sample the utilisation of the card in percent; empty without nvidia-smi."""
    samples: list[float] = []
    over = threading.Event()
    query = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0")

    def watch() -> None:
        while not over.wait(_SAMPLE_S):
            samples.append(float(subprocess.run(query, capture_output=True, text=True, check=True).stdout))

    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield samples
        return
    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


# ---- bare


def bare_rate(
    network: Network, fragments: Fragments, device: torch.device, updates: int, *, bfloat16: bool
) -> float:
    """Return the updates per second of the bare loop."""
    loop = BareLoop(network, fragments, device, bfloat16=bfloat16)
    for _ in range(WARM):
        loop.update()
    _finish(device)
    began_s = time.perf_counter()
    for _ in range(updates):
        loop.update()
    _finish(device)
    return updates / (time.perf_counter() - began_s)


class BareLoop:
    """Runs all epochs over rows that lie on the device; their advantages and targets are made up.

    An epoch permutes rows, or columns where there is a recurrent core, which runs from zeros through all of
    their steps.
    """

    def __init__(
        self, network: Network, fragments: Fragments, device: torch.device, *, bfloat16: bool
    ) -> None:
        self.policy = _policy(
            network, device
        ).train()  # cuDNN goes backward through a core in this mode alone
        self._section = PPOSection()
        self._bfloat16 = bfloat16
        self._device = device
        batch = assemble(fragments, device)
        shown = {path: rows[:-1] for path, rows in batch.observation.items()}
        self._inputs = self.policy.reader.read(shown, torch.float32)
        steps, columns = batch.reward.shape
        every = torch.arange(steps * columns, device=device)
        is_recurrent = self.policy.memory.is_recurrent
        self.rows = every.unflatten(0, (steps, columns)) if is_recurrent else every.unsqueeze(0)
        """Of each that an epoch permutes, [steps, count]."""
        self._action = batch.action["action"].flatten()
        generator = torch.Generator().manual_seed(0)
        made_up = torch.randn((2, len(self._action)), generator=generator).to(device)
        self._columns = torch.stack([batch.log_prob.flatten(), *made_up])
        self._adam = torch.optim.Adam(self.policy.parameters(), lr=self._section.learning_rate, fused=True)

    def update(self) -> None:
        """Make one update."""
        for _ in range(self._section.epochs):
            order = torch.randperm(self.rows.shape[1], device=self._device)
            for part in order.chunk(self._section.minibatches):
                index = self.rows[:, part].flatten()
                self._step(index, self._action[index], self._columns[:, index])

    def outputs(self, index: Tensor) -> Outputs:
        """Return the outputs of a minibatch: of those rows, int64 [m], step by step."""
        inputs, memory = self._inputs.select(index), self.policy.memory
        if memory.actor_core is None:
            return self.policy.outputs(inputs)
        actor, critic = self.policy.bodies(inputs)
        actor = self._through(memory.actor_core, actor)
        critic = actor if memory.critic_core is None else self._through(memory.critic_core, critic)
        return Outputs(self.policy.actor_head(actor), self.policy.critic_head(critic).squeeze(-1))

    def _through(self, core: Core, rows: Tensor) -> Tensor:
        outputs: Tensor = core.rnn(rows.unflatten(0, (len(self.rows), -1)))[0]
        return outputs.flatten(0, 1)

    def _step(self, index: Tensor, action: Tensor, columns: Tensor) -> None:
        old_log_prob, advantage, target = columns
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            outputs = self.outputs(index)
        log_prob = outputs.parameters.float().log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        ratio, clip = (log_prob - old_log_prob).exp(), self._section.clip_range
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        error = 0.5 * (outputs.value.float() - target).square().mean()
        self._adam.zero_grad()
        (self._section.value_coefficient * error - surrogate).backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), self._section.max_gradient_norm)
        self._adam.step()


# ---- both


def _policy(network: Network, device: torch.device) -> Policy:
    return build_policy(network.observation, _ACTIONS, network.policy, 0).to(device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made_up(network: Network, *, small: bool) -> Sequence[tuple[FragmentHeader, dict[str, Array]]]:
    """Return fragments of random experience, as the feed has them once they are checked; no episode ends."""
    random = np.random.default_rng(0)
    steps, slots = (network.small, 4) if small else (network.steps, network.slots)
    state = build_policy(network.observation, _ACTIONS, network.policy, 0).state_space
    schema = fragment_schema(network.observation, _ACTIONS, state_rules(state))
    return [
        _fragment(network.observation, schema, random, steps, slots)
        for _ in range(1 if small else network.fragments)
    ]


def _fragment(
    observation: Box, schema: FragmentSchema, random: np.random.Generator, steps: int, slots: int
) -> tuple[FragmentHeader, dict[str, Array]]:
    header = FragmentHeader(
        run="bench",
        session=1,
        sequence=1,
        schema_id="",
        steps=steps,
        slots=tuple(Slot(slot, 1, 0) for slot in range(slots)),
        weights=(WeightSpan(0, 0, steps, 1, 0),),
        tensors=(),
    )
    leading = {1: (steps, slots), 2: (steps + 1, slots), 3: (slots,), 4: (0,)}
    arrays: dict[str, Array] = {
        rule.name: np.zeros((*leading[rule.axes.value], *rule.shape), DTYPES[rule.dtype])
        for rule in schema.tensors
    }
    shape = arrays["observation"].shape
    arrays["observation"] = (
        random.integers(0, 256, shape, np.uint8)
        if observation.dtype == "uint8"
        else random.standard_normal(shape, np.float32)
    )
    arrays["action"] = random.integers(0, _ACTIONS.n, (steps, slots), np.int64)
    arrays["reward"] = random.standard_normal((steps, slots), np.float32)
    arrays["log_prob"] = np.full((steps, slots), -np.log(_ACTIONS.n), np.float32)
    arrays["valid"] = np.ones((steps, slots), bool)
    return header, arrays
