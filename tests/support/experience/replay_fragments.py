"""Fragments of counted rewards and observations, for tests of replay."""

import numpy as np
import torch

from penstock.learner.batch import Batch, assemble
from penstock.protocol.fragment import FragmentHeader, Slot, WeightSpan
from penstock.protocol.tensor import Array

Ends = dict[tuple[int, int], str]
"""(step, slot) → "terminated" or "truncated"."""


def fragment(
    steps: int,
    slots: int,
    *,
    ends: Ends | None = None,
    invalid: tuple[tuple[int, int], ...] = (),
    first: int = 0,
) -> tuple[FragmentHeader, dict[str, Array]]:
    """The observation x of row t and slot i is first + 100·i + t.

    Its reward is 1 + x, and a true final observation is −(1 + x).
    """
    ends = ends or {}
    rows = first + np.arange(steps + 1)[:, None] + 100.0 * np.arange(slots)[None, :]
    flags = {how: np.zeros((steps, slots), bool) for how in ("terminated", "truncated")}
    for (step, slot), how in ends.items():
        flags[how][step, slot] = True
    valid = np.ones((steps, slots), bool)
    for step, slot in invalid:
        valid[step, slot] = False
    order = sorted(ends)
    finals = np.array([-(rows[step, slot] + 1) for step, slot in order], np.float32).reshape(-1, 1)
    arrays: dict[str, Array] = {
        "observation": rows[..., None].astype(np.float32),
        "action": (np.arange(steps * slots).reshape(steps, slots) % 2).astype(np.int64),
        "reward": (1.0 + rows[:-1]).astype(np.float32),
        "log_prob": np.zeros((steps, slots), np.float32),
        **flags,
        "valid": valid,
        "final/slot": np.array([slot for _, slot in order], np.int32),
        "final/step": np.array([step for step, _ in order], np.int32),
        "final/observation": finals,
    }
    header = FragmentHeader(
        run="run-a",
        session=1,
        sequence=1,
        schema_id="",
        steps=steps,
        slots=tuple(Slot(index, 0, 0) for index in range(slots)),
        weights=(WeightSpan(0, 0, steps, 1, 0),),
        tensors=(),
    )
    return header, arrays


def batch(*parts: tuple[FragmentHeader, dict[str, Array]], first_number: int = 1, size: int = 10) -> Batch:
    """The fragments as consecutive log entries of `size` bytes."""
    numbers = [(first_number + index, size) for index in range(len(parts))]
    return assemble(parts, torch.device("cpu"), numbers)
