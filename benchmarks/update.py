"""The learner's update alone: rows per CPU second of the shipped PPO, beside a bare loop over plain torch.

All train a policy of the default shape on 4,096 rows of CartPole's shapes with the default algorithm's
settings, in turn, on one thread. A row counts once per epoch. Nothing here waits, so seconds are those of
this process on the CPU, in which other work on the machine weighs less than on the clock. The bare loop
(`benchmarks.bare_loop`) is given advantages and targets; it measures, checks and records nothing. Ours is
measured twice:

    update                   of a batch: values, π_prox and advantages first, the epochs, measuring; it can
                             be undone
    update and bookkeeping   of payloads: checked, assembled, updated, accounted, recorded, the weights
                             encoded
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks import bare_loop
from benchmarks.table import Cell, Options, Table
from learner.algorithms.on_policy.ppo import PPO
from learner.batch import Batch, assemble
from learner.feed.fragment_check import check_meaning
from learner.feed.log_batch import LogBatch
from learner.ledger import Ledger, Origin
from learner.reporting.recorder import Recorder, Staleness
from penstock.config.settings import PolicySection, PPOSection
from penstock.policy import weights
from penstock.policy.build import build as build_policy
from penstock.policy.policy import Policy
from penstock.wire.fragment import Fragment, FragmentHeader, Slot, WeightSpan, build, check
from penstock.wire.schema import fragment_schema
from penstock.wire.spaces import Box, Discrete
from penstock.wire.tensor import Array

STEPS: Final = 64
SLOTS: Final = 16
FRAGMENTS: Final = 4
ROWS: Final = STEPS * SLOTS * FRAGMENTS
LEAST_RUNS: Final = 5
WARM: Final = 3
ROUND_S: Final = 0.5
AIM: Final = 0.85
_RUN: Final = "bench"
_EPISODE_STEPS: Final = 40
_OBSERVATION: Final = Box(np.full(4, -np.inf, np.float32), np.full(4, np.inf, np.float32))
_ACTION: Final = Discrete(2)
_SCHEMA: Final = fragment_schema(_OBSERVATION, _ACTION)
_CPU: Final = torch.device("cpu")


def table(options: Options) -> Table:
    """Return rows per CPU second of each, in turn.

    A ratio is taken within its round, and the median shown.
    """
    section = PPOSection()
    fragments = [made_up(number) for number in range(1, FRAGMENTS + 1)]
    with one_thread(), tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        bare, optimiser = _faster_bare(section)
        ways = {
            f"bare torch loop ({optimiser} Adam)": bare,
            "update": _update(section, fragments),
            "update and bookkeeping": _everything(section, fragments, Path(folder)),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(max(options.repeat, LEAST_RUNS)):
            for way, once in ways.items():
                rates[way].append(rows_per_second(once, section.epochs))
    yardstick = next(iter(rates.values()))
    rows: list[tuple[Cell, ...]] = [
        (way, statistics.median(of), statistics.median(x / y for x, y in zip(of, yardstick, strict=True)))
        for way, of in rates.items()
    ]
    return Table(
        title=f"learner's update of {ROWS:,} rows, MLP 64-64, {section.epochs} epochs of "
        f"{section.minibatches} minibatches, one thread",
        columns=("what", "rows per CPU second", "of the bare loop"),
        rows=rows,
        note=f"aim: {AIM} of the bare loop, bookkeeping included",
    )


def rows_per_second(once: Callable[[], None], epochs: int) -> float:
    """Return the rate of as many updates as fit into ROUND_S of the CPU, after WARM others."""
    for _ in range(WARM):
        once()
    updates, began_s = 0, time.process_time()
    while (seconds := time.process_time() - began_s) < ROUND_S:
        once()
        updates += 1
    return updates * epochs * ROWS / seconds


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, as in a learner with default settings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _faster_bare(section: PPOSection) -> tuple[Callable[[], None], str]:
    """Return the bare loop with that one of torch's Adams that is faster here, and its name."""
    rows = bare_loop.made_up(ROWS)
    loops = {kind: bare_loop.Loop(rows, section, kind) for kind in bare_loop.KINDS}
    rates = {kind: rows_per_second(loop.update, section.epochs) for kind, loop in loops.items()}
    kind = max(rates, key=rates.__getitem__)
    return loops[kind].update, kind


def _update(section: PPOSection, fragments: list[Fragment]) -> Callable[[], None]:
    """Return `PPO.update` of an assembled batch."""
    _, algorithm = _learned(section)
    batch = assemble(_open(fragments), _CPU)

    def once() -> None:
        if not algorithm.update(batch, progress=0.0).applied:
            raise RuntimeError("the update was not applied: the made-up batch diverged")

    return once


def _everything(section: PPOSection, fragments: list[Fragment], folder: Path) -> Callable[[], None]:
    """Return the way from payloads to weights that could be published.

    It contains all that the learner's threads do.
    """
    policy, algorithm = _learned(section)
    ledger, recorder = Ledger(), Recorder(folder, Staleness(), 0)

    def once() -> None:
        loaded = _open(fragments)
        log_batch = _deliver(loaded, assemble(loaded, _CPU), ledger.position, algorithm.updates)
        assert log_batch.batch is not None
        update = algorithm.update(log_batch.batch, progress=0.0)
        ledger.book(
            log_batch.last,
            trained=log_batch.trained,
            dropped={},
            steps=update.steps,
            origins=log_batch.origins,
        )
        weights.encode(weights.snapshot(policy))
        recorder.updated(log_batch, update.metrics, update=algorithm.updates, wait_s=0.0, compute_s=0.0)

    return once


def _learned(section: PPOSection) -> tuple[Policy, PPO]:
    policy = build_policy(_OBSERVATION, _ACTION, PolicySection(), 0)
    return policy, PPO(policy, section, seed=0)


def _open(fragments: list[Fragment]) -> list[tuple[FragmentHeader, dict[str, Array]]]:
    """Return the fragments as the feed opens them."""
    loaded = []
    for fragment in fragments:
        check(fragment, _SCHEMA, _RUN)
        arrays = fragment.arrays()
        check_meaning(fragment.header, arrays)
        loaded.append((fragment.header, arrays))
    return loaded


def _deliver(
    loaded: list[tuple[FragmentHeader, dict[str, Array]]], batch: Batch, position: int, updates: int
) -> LogBatch:
    numbers = tuple(range(position + 1, position + 1 + len(loaded)))
    return LogBatch(
        last=numbers[-1],
        trained=numbers,
        dropped={},
        steps=sum(int(arrays["valid"].sum()) for _, arrays in loaded),
        updates=(updates,) * len(loaded),
        versions=(1,) * len(loaded),
        batch=batch,
        round=None,
        size=0,
        created_us=0,
        assemble_s=0.0,
        origins={number: Origin(1, number) for number in numbers},
    )


def made_up(number: int) -> Fragment:
    """Return a whole fragment of random observations and actions; episodes terminate, none is truncated."""
    random = np.random.default_rng(number)
    shape = (STEPS, SLOTS)
    header = FragmentHeader(
        run=_RUN,
        session=1,
        sequence=number,
        schema_id=_SCHEMA.schema_id,
        steps=STEPS,
        slots=tuple(Slot(slot, 1, 0) for slot in range(SLOTS)),
        weights=tuple(WeightSpan(slot, 0, STEPS, 1, 0) for slot in range(SLOTS)),
        tensors=(),
    )
    tensors: dict[str, Array] = {
        "observation": random.standard_normal((STEPS + 1, SLOTS, 4), np.float32),
        "action": random.integers(0, 2, shape, np.int64),
        "reward": np.ones(shape, np.float32),
        "terminated": random.random(shape) < 1 / _EPISODE_STEPS,
        "truncated": np.zeros(shape, bool),
        "valid": np.ones(shape, bool),
        "log_prob": np.full(shape, np.log(0.5), np.float32),
        "final/observation": np.zeros((0, 4), np.float32),
        "final/slot": np.zeros(0, np.int32),
        "final/step": np.zeros(0, np.int32),
    }
    return build(header, tensors)
