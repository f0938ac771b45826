"""The learner's update alone, beside a bare loop over plain torch that measures, checks and records nothing.

`update`: rows per CPU second, on one thread; all train a policy of the default shape on rows of CartPole's
shapes with the default algorithm's settings. A row counts once per epoch. Bookkeeping: payloads are checked
and assembled, the update is measured, accounted and recorded, the weights are encoded.

`gpu`: updates per second, fed as in a run, beside the same update on data in place. Fed: a thread assembles
fragments into pinned memory and copies them on a stream of its own, two batches ahead. `--device cpu` does
the same in a small form, to check that this script works.
"""

import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.stand import PREFIX, Cell, Options, Table, known_median
from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms.gradient import Hardware
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import Batch, Fragments, Upload, assemble, check_meaning
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.ledger import Ledger, Origin
from penstock.learner.recorder import Recorder, Staleness
from penstock.policy import weights
from penstock.policy.policy import Policy
from penstock.policy.policy import build as build_policy
from penstock.protocol.fragment import Fragment, FragmentHeader, Slot, WeightSpan, build, check
from penstock.protocol.schema import Axes, FragmentSchema, fragment_schema
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.tensor import DTYPES, Array

STEPS, SLOTS, FRAGMENTS = 64, 16, 4
ROWS: Final = STEPS * SLOTS * FRAGMENTS
WARM: Final = 3
ROUND_S: Final = 0.5
AIM: Final = 0.85
_RUN: Final = "bench"
_CPU: Final = torch.device("cpu")


def box(*shape: int, dtype: str = "float32") -> Box:
    low, high = (0, 255) if dtype == "uint8" else (-np.inf, np.inf)
    return Box(np.full(shape, low, dtype), np.full(shape, high, dtype))


OBSERVATION, ACTION = box(4), Discrete(2)
SCHEMA: Final = fragment_schema(OBSERVATION, ACTION)


def table(options: Options) -> Table:
    """Return rows per CPU second of each, in turn; a ratio is taken within its round."""
    section = PPOSection()
    fragments = [made_up(number) for number in range(1, FRAGMENTS + 1)]
    torch.set_num_threads(1)  # as in a learner with default settings
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        ways = {
            "bare torch loop (fused Adam)": Loop(made_up_rows(ROWS), section).update,
            "update and bookkeeping": _everything(section, fragments, Path(folder)),
        }
        repeat, each = max(options.repeat, 5), ways.values()
        rounds = [[_rows_per_second(once, section.epochs) for once in each] for _ in range(repeat)]
    return Table(
        title=f"learner's update of {ROWS:,} rows, MLP 64-64, {section.epochs} epochs of "
        f"{section.minibatches} minibatches, one thread",
        columns=("what", "rows per CPU second", "of the bare loop"),
        rows=[
            (way, median(one[at] for one in rounds), median(one[at] / one[0] for one in rounds))
            for at, way in enumerate(ways)
        ],
        note=f"aim: {AIM} of the bare loop, bookkeeping included",
    )


def _rows_per_second(once: Callable[[], None], epochs: int) -> float:
    """Return the rate of as many updates as fit into ROUND_S of the CPU, after WARM others."""
    for _ in range(WARM):
        once()
    updates, began_s = 0, time.process_time()
    while (seconds := time.process_time() - began_s) < ROUND_S:
        once()
        updates += 1
    return updates * epochs * ROWS / seconds


# ---- the bare loop


Rows = tuple[Tensor, Tensor, Tensor]
"""Observations [n, 4], actions int64 [n], and [3, n]: log-probability, advantage, value target."""


def made_up_rows(count: int) -> Rows:
    """Return random rows with standardised advantages."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn((3, count), generator=generator)
    columns[0] = -torch.log(torch.tensor(2.0))
    columns[1] = (columns[1] - columns[1].mean()) / columns[1].std()
    observation = torch.randn((count, 4), generator=generator)
    return observation, torch.randint(0, 2, (count,), generator=generator), columns


class Loop:
    """PPO's epochs in plain torch and nothing else."""

    def __init__(self, rows: Rows, section: PPOSection) -> None:
        self._rows, self._section = rows, section
        self.actor, self.critic = _tower(2), _tower(1)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        rate, epsilon = section.learning_rate, section.adam_epsilon
        self._adam = torch.optim.Adam(self.parameters, lr=rate, eps=epsilon, fused=True)

    def update(self) -> None:
        (observation, action, columns), pieces = self._rows, self._section.minibatches
        for _ in range(self._section.epochs):
            order = torch.randperm(len(action))
            halves = observation[order].chunk(pieces), action[order].chunk(pieces)
            for seen, acted, part in zip(*halves, columns[:, order].chunk(pieces, 1), strict=True):
                rows = (self.actor(seen), self.critic(seen).squeeze(1), acted, part)
                _bare_step(self._adam, self.parameters, self._section, rows)


def _tower(outputs: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)))


def _bare_step(
    adam: torch.optim.Adam, own: Sequence[Tensor], section: PPOSection, rows: tuple[Tensor, ...]
) -> None:
    """Make a gradient step of a minibatch. rows: logits, values, actions, and three columns as in `Rows`."""
    logits, value, action, (old_log_prob, advantage, target) = rows
    log_prob = logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)
    ratio, clip = (log_prob - old_log_prob).exp(), section.clip_range
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    error = 0.5 * (value - target).square().mean()
    adam.zero_grad()
    (section.value_coefficient * error - surrogate).backward()
    nn.utils.clip_grad_norm_(own, section.max_gradient_norm)
    adam.step()


# ---- ours


def _applied(algorithm: PPO, batch: Batch) -> Any:
    update = algorithm.update(batch, progress=0.0)
    if not update.applied:
        raise RuntimeError("the update was not applied: the made-up batch diverged")
    return update


def _everything(section: PPOSection, fragments: list[Fragment], folder: Path) -> Callable[[], None]:
    """Return the way from payloads to weights that could be published: all that the learner's threads do."""
    policy = build_policy(OBSERVATION, ACTION, PolicySection(), 0)
    algorithm = PPO(policy, section, seed=0)
    ledger, recorder = Ledger(), Recorder(folder, Staleness(), 0)

    def once() -> None:
        batch = assemble(loaded := opened(fragments), _CPU)
        log_batch = _deliver(loaded, batch, ledger.position, algorithm.updates)
        update = _applied(algorithm, batch)
        trained, origins = log_batch.trained, log_batch.origins
        ledger.book(log_batch.last, trained=trained, dropped={}, steps=update.steps, origins=origins)
        weights.encode(weights.snapshot(policy))
        recorder.updated(log_batch, update.metrics, update=algorithm.updates, wait_s=0.0, compute_s=0.0)

    return once


def opened(fragments: list[Fragment]) -> list[tuple[FragmentHeader, dict[str, Array]]]:
    """Return the fragments as the feed opens them."""
    loaded = []
    for fragment in fragments:
        check(fragment, SCHEMA, _RUN)
        arrays = fragment.arrays()
        check_meaning(fragment.header, arrays)
        loaded.append((fragment.header, arrays))
    return loaded


def _deliver(loaded: Fragments, batch: Batch, position: int, updates: int) -> LogBatch:
    numbers = tuple(range(position + 1, position + 1 + len(loaded)))
    return LogBatch(
        last=numbers[-1], trained=numbers, dropped={},
        steps=sum(int(arrays["valid"].sum()) for _, arrays in loaded), updates=(updates,) * len(loaded),
        versions=(1,) * len(loaded), batch=batch, round=None, size=0, created_us=0, assemble_s=0.0,
        origins={number: Origin(1, number) for number in numbers},
    )  # fmt: skip


def made_up(
    number: int,
    observation: Box = OBSERVATION,
    actions: Discrete = ACTION,
    *,
    shape: tuple[int, int] = (STEPS, SLOTS),
    schema: FragmentSchema = SCHEMA,
    ends: float = 1 / 40,
) -> Fragment:
    """Return a fragment of random experience. ends: chance of a step that it terminates the episode."""
    random, (steps, slots) = np.random.default_rng(number), shape
    leading = {Axes.STEP: shape, Axes.STEP_PLUS_ONE: (steps + 1, slots), Axes.SLOT: (slots,), Axes.END: (0,)}
    arrays: dict[str, Array] = {
        rule.name: np.zeros((*leading[rule.axes], *rule.shape), DTYPES[rule.dtype]) for rule in schema.tensors
    }
    seen = arrays["observation"].shape
    pixels = (
        random.integers(0, 256, seen, np.uint8)
        if observation.dtype == "uint8"
        else random.standard_normal(seen, np.float32)
    )
    arrays |= {
        "observation": pixels,
        "action": random.integers(0, actions.n, shape, np.int64),
        "reward": random.standard_normal(shape, np.float32),
        "terminated": random.random(shape) < ends,
        "valid": np.ones(shape, bool),
        "log_prob": np.full(shape, -np.log(actions.n), np.float32),
    }
    header = FragmentHeader(
        run=_RUN, session=1, sequence=number, schema_id=schema.schema_id, steps=steps,
        slots=tuple(Slot(slot, 1, 0) for slot in range(slots)),
        weights=tuple(WeightSpan(slot, 0, steps, 1, 0) for slot in range(slots)), tensors=(),
    )  # fmt: skip
    return build(header, arrays)


# ---- on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network to train, on 8 × `steps` × `slots` rows; a CPU trains on `small` × 4."""

    name: str
    observation: Box
    steps: int
    slots: int
    small: int

    def build(self, device: torch.device = _CPU) -> Policy:
        return build_policy(self.observation, ACTIONS, PolicySection(), 0).to(device)


ACTIONS: Final = Discrete(6)
NETWORKS: Final = (
    Network(name="MLP 64-64", observation=box(8), steps=128, slots=32, small=8),
    Network(name="Nature, 84×84×4", observation=box(84, 84, 4, dtype="uint8"), steps=32, slots=16, small=1),
)
_COLUMNS: Final = ("network", "rows", "precision", "updates/s", "of bare", "GPU busy", "waits for data")


def gpu_table(options: Options) -> Table:
    """Return a row for each network and precision.

    GPU busy: share of the time in which the card ran a kernel by nvidia-smi. waits for data: share of the
    time that the updating thread waited for a batch.
    """
    title = "PPO's update, 4 epochs of 4 minibatches"
    if options.device == "cuda" and not torch.cuda.is_available():
        note = "skipped: torch sees no CUDA device here; `--device cpu` runs a small form of it"
        return Table(title=title, columns=_COLUMNS, rows=[], note=note)
    device = torch.device(options.device)
    rows = [
        _gpu_row(network, device, bfloat16, options.repeat)
        for network in NETWORKS
        for bfloat16 in (False, True)
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, in a small form"
    return Table(title=f"{title}, on {name}", columns=_COLUMNS, rows=rows)


def _gpu_row(network: Network, device: torch.device, bfloat16: bool, repeat: int) -> tuple[Cell, ...]:
    fragments, updates = experience(network, small=device.type == "cpu"), 100 if device.type == "cuda" else 2
    bare = [_bare_rate(network, fragments, device, updates, bfloat16) for _ in range(repeat)]
    fed = [_fed_rate(network, fragments, device, updates, bfloat16) for _ in range(repeat)]
    rate = median(one[0] for one in fed)
    return (
        *(network.name, sum(header.charge for header, _ in fragments)),
        *("bfloat16" if bfloat16 else "float32", rate, rate / median(bare)),
        *(known_median(one[1] for one in fed), median(one[2] for one in fed)),
    )


def _fed_rate(
    network: Network, fragments: Fragments, device: torch.device, updates: int, bfloat16: bool
) -> tuple[float, float | None, float]:
    """Run PPO as a learner does; return updates per second and the shares of time: GPU busy, waited."""
    algorithm = PPO(network.build(device), PPOSection(), seed=0, hardware=Hardware(bfloat16=bfloat16))
    waited_s = 0.0

    def update(batch: Batch) -> None:
        batch.arrive()
        _applied(algorithm, batch)

    with _feeding(Upload(device), fragments) as batches:
        for _ in range(WARM):
            update(batches.get())
        with _watched(device) as busy:
            began_s = time.perf_counter()
            for _ in range(updates):
                asked_s = time.perf_counter()
                staged = batches.get()
                waited_s += time.perf_counter() - asked_s
                update(staged)
            _finish(device)
            seconds = time.perf_counter() - began_s
    return updates / seconds, fmean(busy) / 100 if busy else None, waited_s / seconds


@contextmanager
def _running(loop: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a loop in a thread until the end; it looks at the event."""
    over = threading.Event()
    thread = threading.Thread(target=loop, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _feeding(upload: Upload, fragments: Fragments) -> Iterator["queue.Queue[Batch]"]:
    """Yield a queue of batches from a thread of their own, two ahead."""
    batches: queue.Queue[Batch] = queue.Queue(2)

    def feed(over: threading.Event) -> None:
        while not over.is_set():
            batch = upload.stage(partial(assemble, fragments, upload.device))
            while not over.is_set():
                try:
                    batches.put(batch, timeout=0.2)
                except queue.Full:
                    continue
                break

    with _running(feed):
        yield batches


@contextmanager
def _watched(device: torch.device) -> Iterator[list[float]]:
    """Sample the utilisation of the card in percent; empty without nvidia-smi."""
    samples: list[float] = []
    query = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0")

    def watch(over: threading.Event) -> None:
        while not over.wait(0.2):
            samples.append(float(subprocess.run(query, capture_output=True, text=True, check=True).stdout))

    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield samples
        return
    with _running(watch):
        yield samples


def _bare_rate(
    network: Network, fragments: Fragments, device: torch.device, updates: int, bfloat16: bool
) -> float:
    loop = BareLoop(network, fragments, device, bfloat16=bfloat16)
    for _ in range(WARM):
        loop.update()
    _finish(device)
    began_s = time.perf_counter()
    for _ in range(updates):
        loop.update()
    _finish(device)
    return updates / (time.perf_counter() - began_s)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class BareLoop:
    """Runs all epochs over rows that lie on the device; their advantages and targets are made up."""

    def __init__(
        self, network: Network, fragments: Fragments, device: torch.device, *, bfloat16: bool
    ) -> None:
        self.policy = network.build(device)
        self._section, self._bfloat16, self._device = PPOSection(), bfloat16, device
        batch = assemble(fragments, device)
        shown = {path: rows[:-1] for path, rows in batch.observation.items()}
        self._inputs = self.policy.reader.read(shown, torch.float32)
        self._action = batch.action["action"].flatten()
        generator = torch.Generator().manual_seed(0)
        made_up = torch.randn((2, len(self._action)), generator=generator).to(device)
        self._columns = torch.stack([batch.log_prob.flatten(), *made_up])
        self._parameters = list(self.policy.parameters())
        self._adam = torch.optim.Adam(self._parameters, lr=self._section.learning_rate, fused=True)

    def update(self) -> None:
        for _ in range(self._section.epochs):
            order = torch.randperm(len(self._action), device=self._device)
            for index in order.chunk(self._section.minibatches):
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
                    outputs = self.policy.outputs(self._inputs.select(index))
                shown = (outputs.parameters.float(), outputs.value.float())
                rows = (*shown, self._action[index], self._columns[:, index])
                _bare_step(self._adam, self._parameters, self._section, rows)


def experience(network: Network, *, small: bool) -> Fragments:
    """Return fragments in which no episode ends, as the feed has them once they are checked."""
    steps, slots, count = (network.small, 4, 1) if small else (network.steps, network.slots, 8)
    schema = fragment_schema(network.observation, ACTIONS)
    made = [
        made_up(number, network.observation, ACTIONS, shape=(steps, slots), schema=schema, ends=0)
        for number in range(1, count + 1)
    ]
    return [(fragment.header, fragment.arrays()) for fragment in made]
