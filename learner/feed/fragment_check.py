"""Whether a fragment can be trained on: what its numbers mean together, and each tensor's range.

It is asked before anything of the fragment becomes a tensor. The broker has checked that the fragment follows
the run's schema (`penstock.protocol.conformance`).
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.header import FragmentHeader
from penstock.protocol.ranges import UNKNOWN, Range, Ranges
from penstock.protocol.tensor import Array
from penstock.runtime import metrics

_FINAL: Final = "final/"
_OF_VALID_STEPS: Final = ("reward", "log_prob")
"""Where a step is not valid these are 0 in a batch, whatever was sent."""
_ROUNDING: Final = 1e-3
"""How far above 0 the log-probability of an event may lie, in float32 and over all parts of an action."""


def check_meaning(
    header: FragmentHeader, arrays: Mapping[str, Array], ranges: Ranges = UNKNOWN
) -> Mapping[str, Array]:
    """Return what a well-formed fragment is trained on; raise ValueError that says why it cannot be.

    arrays: by name, in the shape and dtype of the run's schema.

    It cannot with a truncated step without its final observation, a final row that points outside or at a
    step that did not end, a `reward` or `log_prob` that is not finite where valid, the log-probability of a
    choice above 0, a mask that allows nothing or forbids what was taken where a step is valid, or any other
    number outside its range. The caller books `invalid`.

    The observation that a terminated step ended with has no value: where it lies outside its range it is
    replaced by the one before it and counted, since environments may end in states of no space.
    """
    valid = arrays["valid"].astype(bool)
    _check_finals(header, arrays, valid)
    arrays = _without_terminal(arrays, valid, ranges)
    _check_masks(arrays, valid, ranges)
    if ranges.chooses:
        _check_probabilities(arrays["log_prob"], valid)
    arrays = _with_final_masks(arrays, ranges)
    for name, array in arrays.items():
        known = ranges.of.get(name)
        if known is not None:
            known.check(name, array)
        elif np.issubdtype(array.dtype, np.floating):
            whole = name not in _OF_VALID_STEPS or bool(valid.all())
            if not np.isfinite(array if whole else array[valid]).all():
                raise ValueError(f"{name}: holds NaN or infinity; the environment or the policy diverged")
    return arrays


def _without_terminal(
    arrays: Mapping[str, Array], valid: NDArray[np.bool_], ranges: Ranges
) -> Mapping[str, Array]:
    """The tensors with observations of no space replaced, where nothing is learned from them."""
    terminated = arrays["terminated"].astype(bool) & valid
    if not terminated.any():
        return arrays
    slot, step = arrays["final/slot"].astype(np.int64), arrays["final/step"].astype(np.int64)
    # The row behind the last step; nothing acted on it, and its value counts for nothing either.
    last = terminated[-1].nonzero()[0]
    found = dict(arrays)
    for name, known in ranges.of.items():
        if name.startswith(_FINAL) and not known.holds(arrays[name]):
            before = arrays[name.removeprefix(_FINAL)][step, slot]
            found[name] = _replaced(arrays[name], before, terminated[step, slot], known)
        elif name.startswith("observation") and not known.holds(arrays[name][-1, last]):
            found[name] = arrays[name].copy()
            found[name][-1] = _replaced(arrays[name][-1], arrays[name][-2], terminated[-1], known)
    return found


def _replaced(rows: Array, before: Array, which: NDArray[np.bool_], known: Range) -> Array:
    """Rows [n, ...] with those of before where `which` [n] and the range is broken."""
    broken = which & ~known.inside(rows).reshape(len(rows), -1).all(1)
    metrics.TERMINAL_OBSERVATIONS_REPLACED.inc(int(broken.sum()))
    result = rows.copy()
    result[broken] = before[broken]
    return result


def _check_probabilities(log_prob: Any, valid: NDArray[np.bool_]) -> None:
    impossible = valid & (log_prob > _ROUNDING)
    if impossible.any():
        raise ValueError(
            f"log_prob: holds {log_prob[impossible][0]:g} at {_first(impossible)}; the probability of a "
            "choice is 1 at the most"
        )


def _check_masks(arrays: Mapping[str, Array], valid: NDArray[np.bool_], ranges: Ranges) -> None:
    ended = arrays["terminated"].astype(bool) | arrays["truncated"].astype(bool)
    for name, array in arrays.items():
        if not name.startswith("mask/"):
            continue
        action: Any = arrays[name.removeprefix("mask/")]
        sizes = ranges.parts.get(name, (array.shape[-1],))
        starts = np.cumsum([0, *sizes[:-1]])
        mask: NDArray[np.bool_] = array.astype(bool)
        allows: Any = np.logical_or.reduceat(mask, starts, -1).all(-1)
        barred = valid & ~allows[:-1]
        if barred.any():
            raise ValueError(f"{name}: allows nothing at {_first(barred)}; a step needs an allowed action")
        barred = valid & ~ended & ~allows[1:]
        if barred.any():
            raise ValueError(
                f"{name}: allows nothing after {_first(barred)}; a step that follows needs an allowed action"
            )
        if action.size != valid.size * len(sizes):
            continue  # Of spaces that are not known, so it is not known which of the choices is whose.
        taken = action.reshape(*valid.shape, len(sizes)).astype(np.intp)
        index = starts + np.clip(taken, 0, np.asarray(sizes) - 1)
        barred = valid & ~np.take_along_axis(mask[:-1], index, -1).all(-1)
        if barred.any():
            raise ValueError(f"{name}: forbids the action that was taken at {_first(barred)}")


def _with_final_masks(arrays: Mapping[str, Array], ranges: Ranges) -> Mapping[str, Array]:
    """With what each last observation allows; where that is not known, what was allowed before it stands in.

    It is not known where a client of a policy server acted, and of a row in which a choice allows nothing.
    """
    masks = [name for name in arrays if name.startswith("mask/")]
    if not masks:
        return arrays
    found = dict(arrays)
    for name in masks:
        before = arrays[name][arrays["final/step"], arrays["final/slot"]].astype(bool)
        given = arrays.get(f"{_FINAL}{name}", np.zeros_like(before)).astype(bool)
        sizes = ranges.parts.get(name, (given.shape[-1],))
        allows: Any = np.logical_or.reduceat(given, np.cumsum([0, *sizes[:-1]]), -1)
        found[f"{_FINAL}{name}"] = np.where(allows.all(-1, keepdims=True), given, before)
    return found


def _first(where: Array) -> str:
    step, slot = np.argwhere(where)[0]
    return f"step {step} of slot {slot}"


def _check_finals(header: FragmentHeader, arrays: Mapping[str, Array], valid: Array) -> None:
    slot, step = arrays["final/slot"].astype(np.int64), arrays["final/step"].astype(np.int64)
    outside = (slot < 0) | (slot >= len(header.slots)) | (step < 0) | (step >= header.steps)
    if outside.any():
        raise ValueError(
            f"final/slot, final/step: a row points outside [{header.steps}, {len(header.slots)}]"
        )
    terminated = arrays["terminated"].astype(bool) & valid
    truncated = arrays["truncated"].astype(bool) & valid
    given = np.zeros(valid.shape, bool)
    given[step, slot] = True
    if given.sum() != len(slot):
        raise ValueError("final/slot, final/step: two rows are of the same step")
    if (given & ~(terminated | truncated)).any():
        raise ValueError("final/observation: given for a step that ended no episode")
    if (truncated & ~terminated & ~given).any():
        raise ValueError("final/observation: missing for a truncated step; its value cannot be bootstrapped")
