"""Fragments side by side as one batch of tensors [T, B]; ragged ones are padded with `valid` False."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.wire.fragment import FragmentHeader, WeightSpan
from penstock.wire.schema import Axes, FragmentSchema
from penstock.wire.tensor import DTYPES, Array

Fragments = Sequence[tuple[FragmentHeader, Mapping[str, Array]]]

_FINAL = "final/"


@dataclass(frozen=True, slots=True)
class Source:
    """A fragment of a batch.

    It has the number of its log entry, bytes of its payload, and the steps and columns in it.
    """

    number: int
    size: int
    steps: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T: longest unroll in it. B: slots of all its fragments, in order. K: ended episodes.

    observation: by path, [T+1, B, *shape], raw; action masks too, as `mask/action`, bool.
    action: by path, [T, B, *shape], as drawn.
    reward, log_prob: float32 [T, B], 0 where not valid.   terminated, truncated, valid: bool [T, B].
    final_observation: by path, [K, *shape]: the true last observation of the episode that ended in
        column final_slot[k] (int64, of this batch) with step final_step[k] (int64).
    state: the policy's before row 0, by path, [B, ...].
    begins: bool [T+1, B], the row is the first of an episode; both empty where the policy remembers nothing.
    update: int64 [B], update count of the oldest weights of the column.
    slots: (session, slot id) of each column, to follow an environment across batches.
    sources: the fragments, in the order of their columns.
    """

    observation: dict[str, Tensor]
    action: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    log_prob: Tensor
    final_observation: dict[str, Tensor]
    final_slot: Tensor
    final_step: Tensor
    update: Tensor
    slots: tuple[tuple[int, int], ...]
    sources: tuple[Source, ...] = ()
    state: dict[str, Tensor] = field(default_factory=dict)
    begins: Tensor | None = None


def assemble(
    fragments: Fragments, device: torch.device, entries: Sequence[tuple[int, int]] | None = None
) -> Batch:
    """One batch of checked fragments (`penstock.wire.fragment.check`), on `device`.

    entries: number and payload bytes of each one's log entry; None: they have none. For a GPU they are put
    together in pinned memory and copied on the current stream without waiting (`learner.upload`). Raises
    ValueError for no fragments. Call `check_meaning` on each fragment first.
    """
    if not fragments:
        raise ValueError("a batch of no fragments; wait until the algorithm takes at least one")
    entries = [(0, 0)] * len(fragments) if entries is None else entries
    columns = _Columns(fragments, device)
    valid = columns.padded("valid")
    masks, state = columns.under("mask"), columns.under("state")
    return Batch(
        observation={name: columns.padded(name, 1) for name in (*columns.under("observation"), *masks)},
        action={name: columns.padded(name) for name in columns.under("action")},
        reward=columns.padded("reward").where(valid, 0.0),
        terminated=columns.padded("terminated") & valid,
        truncated=columns.padded("truncated") & valid,
        valid=valid,
        log_prob=columns.padded("log_prob").where(valid, 0.0),
        final_observation={name: columns.rows(f"{_FINAL}{name}") for name in columns.under("observation")},
        final_slot=columns.final_slots(),
        final_step=columns.rows("final/step").long(),
        update=columns.updates(),
        slots=tuple((header.session, slot.slot_id) for header, _ in fragments for slot in header.slots),
        sources=tuple(
            Source(number, size, header.steps, len(header.slots))
            for (number, size), (header, _) in zip(entries, fragments, strict=True)
        ),
        state={name: columns.rows(name) for name in state},
        begins=columns.padded("begins", 1) if state else None,
    )


def nothing(schema: FragmentSchema) -> tuple[FragmentHeader, dict[str, Array]]:
    """A fragment without slots: a rank that gets no other assembles a batch without columns from it."""
    header = FragmentHeader(
        run="",
        session=0,
        sequence=0,
        schema_id=schema.schema_id,
        steps=1,
        slots=(),
        weights=(WeightSpan(0, 0, 1, 0, 0),),
        tensors=(),
    )
    leading = {Axes.STEP: (1, 0), Axes.STEP_PLUS_ONE: (2, 0), Axes.SLOT: (0,), Axes.END: (0,)}
    arrays = {
        rule.name: np.zeros((*leading[rule.axes], *rule.shape), DTYPES[rule.dtype]) for rule in schema.tensors
    }
    return header, arrays


class _Columns:
    """The same tensor of every fragment, put together."""

    def __init__(self, fragments: Fragments, device: torch.device) -> None:
        self._fragments = fragments
        self._device = device
        self._steps = [header.steps for header, _ in fragments]
        self._widths = [len(header.slots) for header, _ in fragments]
        self._starts = np.cumsum([0, *self._widths])

    def under(self, prefix: str) -> list[str]:
        return [name for name in self._fragments[0][1] if name == prefix or name.startswith(f"{prefix}/")]

    def padded(self, name: str, more: int = 0) -> Tensor:
        """[max T + more, B, ...]; rows that a fragment lacks are zero."""
        arrays = [arrays[name] for _, arrays in self._fragments]
        shape = (max(self._steps) + more, int(self._starts[-1]), *arrays[0].shape[2:])
        room, joined = self._room(shape, arrays[0].dtype)
        if len(set(self._steps)) == 1:
            np.concatenate(arrays, 1, out=joined)
            return self._sent(room)
        joined[...] = 0
        for array, start in zip(arrays, self._starts, strict=False):
            joined[: len(array), start : start + array.shape[1]] = array
        return self._sent(room)

    def rows(self, name: str) -> Tensor:
        """Row by row, [Σ K, ...]."""
        arrays = [arrays[name] for _, arrays in self._fragments]
        room, joined = self._room((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        np.concatenate(arrays, out=joined)
        return self._sent(room)

    def final_slots(self) -> Tensor:
        """`final/slot` counted over the columns of the batch."""
        shifted = [
            arrays["final/slot"].astype(np.int64) + start
            for (_, arrays), start in zip(self._fragments, self._starts, strict=False)
        ]
        return send(torch.from_numpy(np.concatenate(shifted)), self._device)

    def updates(self) -> Tensor:
        """The oldest update of each fragment, once per column."""
        oldest = [header.oldest_update for header, _ in self._fragments]
        return send(torch.from_numpy(np.repeat(np.asarray(oldest, np.int64), self._widths)), self._device)

    def _room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Tensor, Array]:
        """An empty tensor to be filled and sent, and its memory as an array."""
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        room = torch.empty(shape, dtype=kind, pin_memory=self._device.type == "cuda")
        return room, room.numpy()

    def _sent(self, room: Tensor) -> Tensor:
        return room.to(self._device, non_blocking=True)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`, without waiting for the copy; what follows on the current stream sees it."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def check_meaning(header: FragmentHeader, arrays: Mapping[str, Array]) -> None:
    """Raise ValueError that says why when a well-formed fragment cannot be trained on.

    That is: a truncated step without its final observation, a final row that points outside or at a step
    that did not end, a `reward`, `log_prob` or floating observation or action that is not finite where valid,
    a state that is not finite, a mask that allows nothing or forbids the index that was taken where a step is
    valid. The caller books `invalid`.
    """
    valid = arrays["valid"].astype(bool)
    _check_finals(header, arrays, valid)
    _check_masks(arrays, valid)
    for name, array in arrays.items():
        if not np.issubdtype(array.dtype, np.floating):
            continue
        whole = name.startswith(("observation", _FINAL, "state/")) or bool(valid.all())
        if not np.isfinite(array if whole else array[valid]).all():
            raise ValueError(f"{name}: holds NaN or infinity; the environment or the policy diverged")


def _check_masks(arrays: Mapping[str, Array], valid: NDArray[np.bool_]) -> None:
    for name, array in arrays.items():
        if not name.startswith("mask/"):
            continue
        mask: NDArray[np.bool_] = array[:-1].astype(bool)
        barred = valid & ~np.any(mask, -1)
        if barred.any():
            raise ValueError(f"{name}: allows nothing at {_first(barred)}; a step needs an allowed action")
        action = arrays[name.removeprefix("mask/")]
        if action.ndim == valid.ndim:
            index = np.clip(action.astype(np.intp), 0, mask.shape[-1] - 1)[..., np.newaxis]
            barred = valid & ~np.take_along_axis(mask, index, -1)[..., 0]
            if barred.any():
                raise ValueError(f"{name}: forbids the action that was taken at {_first(barred)}")


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
    if (given & ~(terminated | truncated)).any():
        raise ValueError("final/observation: given for a step that ended no episode")
    if (truncated & ~terminated & ~given).any():
        raise ValueError("final/observation: missing for a truncated step; its value cannot be bootstrapped")
