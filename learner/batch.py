"""Fragments side by side as one batch of tensors [T, B]; ragged ones are padded with `valid` False.

By section: the batch, its copy to the device, and the check of what a fragment is trained on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.protocol.fragment import FragmentHeader, WeightSpan
from penstock.protocol.schema import UNKNOWN, FragmentSchema, Range, Ranges
from penstock.protocol.tensor import DTYPES, Array
from penstock.runtime import metrics

Loaded = tuple[FragmentHeader, Mapping[str, Array]]
"""A checked fragment: its header, and its tensors by name."""
Fragments = Sequence[Loaded]

_FINAL = "final/"


def _is_there() -> None:
    """Wait for nothing: the batch is where it is used."""


@dataclass(frozen=True, slots=True)
class Source:
    """A fragment of a batch: number of its log entry, bytes of its payload, its steps and columns."""

    number: int
    size: int
    steps: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T: longest unroll in it. B: slots of all its fragments, in order. K: ended episodes.

    observation: by path, [T+1, B, *shape], raw, with action masks as `mask/action`, bool.
    action: by path, [T, B, *shape], as drawn.
    reward, log_prob: float32 [T, B], 0 where not valid.   terminated, truncated, valid: bool [T, B].
    final_observation: by path, [K, *shape]: the true last observation of the episode that ended in
        column final_slot[k] (int64, of this batch) with step final_step[k] (int64).
    final_mask: action masks there, by path, bool [K, n]; {} where the run has no masks.
    state: the policy's before row 0, by path, [B, ...]; {} for a policy without state.
    begins: bool [T+1, B], the row is the first of an episode; None for a policy without state.
    update: int64 [B], update count of the oldest weights of the column.
    slots: (session, slot id) of each column, to follow an environment across batches.
    sources: the fragments, in the order of their columns.
    is_flushed: an operator's flush took it, so it may be small; minibatches keep their number of steps.
    arrive: waits for copies to the device; call it before use, in the thread that uses the batch.
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
    final_mask: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    begins: Tensor | None = None
    is_flushed: bool = False
    arrive: Callable[[], None] = _is_there

    def part(
        self, columns: Tensor | slice, final_slot: Tensor, steps: int, of: Sequence[int] = ()
    ) -> "Batch":
        """Return columns up to a step: copies where an index selects them, else views.

        final_slot: int64 [K], index in the part of the column of each ended episode; -1: it has none.
        of: fragments of the part, by their place in `sources`.
        """
        kept = (final_slot >= 0).nonzero().squeeze(1)

        def by_column(tensors: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
            return {name: tensor[:rows, columns] for name, tensor in tensors.items()}

        def by_end(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor[kept] for name, tensor in tensors.items()}

        places = range(len(self.slots))[columns] if isinstance(columns, slice) else columns.tolist()
        return Batch(
            observation=by_column(self.observation, steps + 1),
            action=by_column(self.action, steps),
            reward=self.reward[:steps, columns],
            terminated=self.terminated[:steps, columns],
            truncated=self.truncated[:steps, columns],
            valid=self.valid[:steps, columns],
            log_prob=self.log_prob[:steps, columns],
            final_observation=by_end(self.final_observation),
            final_mask=by_end(self.final_mask),
            final_slot=final_slot[kept],
            final_step=self.final_step[kept],
            update=self.update[columns],
            slots=tuple(self.slots[place] for place in places),
            sources=tuple(self.sources[place] for place in of),
            state={name: tensor[columns] for name, tensor in self.state.items()},
            begins=None if self.begins is None else self.begins[: steps + 1, columns],
        )

    def fragments(self) -> Iterator[tuple[Source, "Batch"]]:
        """Yield each fragment by itself, without padding, as views."""
        start = 0
        for source in self.sources:
            columns = slice(start, start + source.columns)
            slot = self.final_slot - start
            yield source, self.part(columns, slot.where(slot < source.columns, -1), source.steps)
            start = columns.stop

    def of_fragments(self, places: Sequence[int]) -> "Batch":
        """Return the batch of some or none of its fragments, copied. places: of `sources`, rising."""
        starts = np.cumsum([0, *(source.columns for source in self.sources)])
        none = np.arange(0)
        columns = np.concatenate([none, *(np.arange(starts[at], starts[at + 1]) for at in places)])
        index = torch.from_numpy(columns).to(self.valid.device)
        # The index of each column in the part; -1: it has none.
        moved = torch.full((len(self.slots),), -1, device=self.valid.device)
        moved[index] = torch.arange(len(index), device=self.valid.device)
        return self.part(index, moved[self.final_slot], len(self.valid), places)


def assemble(
    fragments: Fragments, device: torch.device, entries: Sequence[tuple[int, int]] | None = None
) -> Batch:
    """Return one batch of checked fragments (`penstock.protocol.fragment.check`), on `device`.

    entries: number and payload bytes of each one's log entry; None: they have none. For a GPU tensors are
    assembled in pinned memory and copied on the current stream without waiting (`Upload`). Raises ValueError
    for no fragments. Call `check_meaning` on each fragment first.
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
        final_mask={
            name: columns.rows(f"{_FINAL}{name}") for name in masks if columns.has(f"{_FINAL}{name}")
        },
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
    """Return a fragment without slots, for a rank that gets no entry: its batch has no columns."""
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
    arrays = {
        rule.name: np.zeros((*rule.axes.leading(1, 0, 0), *rule.shape), DTYPES[rule.dtype])
        for rule in schema.tensors
    }
    return header, arrays


class _Columns:
    """Joins the tensor of one name of all fragments."""

    def __init__(self, fragments: Fragments, device: torch.device) -> None:
        self._fragments = fragments
        self._device = device
        self._steps = [header.steps for header, _ in fragments]
        self._widths = [len(header.slots) for header, _ in fragments]
        self._starts = np.cumsum([0, *self._widths])

    def under(self, prefix: str) -> list[str]:
        return [name for name in self._fragments[0][1] if name == prefix or name.startswith(f"{prefix}/")]

    def has(self, name: str) -> bool:
        return all(name in arrays for _, arrays in self._fragments)

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
        """Return a tensor's K rows of each fragment, joined, [Σ K, ...]."""
        arrays = [arrays[name] for _, arrays in self._fragments]
        room, joined = self._room((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        np.concatenate(arrays, out=joined)
        return self._sent(room)

    def final_slots(self) -> Tensor:
        shifted = [
            arrays["final/slot"].astype(np.int64) + start
            for (_, arrays), start in zip(self._fragments, self._starts, strict=False)
        ]
        return send(torch.from_numpy(np.concatenate(shifted)), self._device)

    def updates(self) -> Tensor:
        oldest = [header.oldest_update for header, _ in self._fragments]
        return send(torch.from_numpy(np.repeat(np.asarray(oldest, np.int64), self._widths)), self._device)

    def _room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Tensor, Array]:
        if self._device.type != "cuda":
            array = np.empty(shape, dtype)
            return torch.from_numpy(array), array
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        room = torch.empty(shape, dtype=kind, pin_memory=True)
        return room, room.numpy()

    def _sent(self, room: Tensor) -> Tensor:
        return room.to(self._device, non_blocking=True)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a CPU tensor without waiting for the copy; later work on the current stream sees it."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# ---- How batches reach the device: on a CPU they are there; to a GPU they are copied while it computes.


class Upload:
    """How batches get to a device: on a CPU they are there; to a GPU they are copied while it computes.

    Call `stage` from one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stage(self, assemble: Callable[[], Batch]) -> Batch:
        """Have a batch assembled, for a GPU in pinned memory and with its copies to the device under way."""
        stream = self._stream
        if stream is None:
            return assemble()
        with torch.cuda.stream(stream):
            batch = assemble()
            copied = stream.record_event()

        def arrive() -> None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in tensors(batch):
                tensor.record_stream(current)

        return replace(batch, arrive=arrive)


def tensors(batch: Batch) -> Iterator[Tensor]:
    for one in fields(batch):
        value = getattr(batch, one.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from value.values()


# ---- Whether a fragment can be trained on: what its numbers mean together, and each tensor's range.

_OF_VALID_STEPS: Final = ("reward", "log_prob")
"""Where a step is not valid these are 0 in a batch, whatever was sent."""
_ROUNDING: Final = 1e-3
"""How far above 0 the log-probability of an event may lie, in float32 and over all parts of an action."""


def check_meaning(
    header: FragmentHeader, arrays: Mapping[str, Array], ranges: Ranges = UNKNOWN
) -> Mapping[str, Array]:
    """Return the tensors of a fragment to train on; raise ValueError if its numbers contradict one another.

    arrays: by name, in the shape and dtype of the run's schema.

    It raises for a truncated step without its final observation, a final row that points outside or at a step
    that did not end, a `reward` or `log_prob` that is not finite where valid, the log-probability of a choice
    above 0, a mask that allows nothing or forbids the action where a step is valid, and any other number
    outside its range. The caller books the fragment as `invalid`.

    Nothing is learned from the final observation of a terminated step. Where it lies outside its range it is
    replaced by the one before it and counted, since environments may end in states outside their space.
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
    """Replace final observations of terminated steps that lie outside their range."""
    terminated = arrays["terminated"].astype(bool) & valid
    if not terminated.any():
        return arrays
    slot, step = arrays["final/slot"].astype(np.int64), arrays["final/step"].astype(np.int64)
    # The row after the last step; no action follows it, and its value is not used.
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
    """Return rows [n, ...] with those of `before` where `which` [n] is True and the row is out of range."""
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
            continue  # The spaces are not known, nor to which of them a choice belongs.
        taken = action.reshape(*valid.shape, len(sizes)).astype(np.intp)
        index = starts + np.clip(taken, 0, np.asarray(sizes) - 1)
        barred = valid & ~np.take_along_axis(mask[:-1], index, -1).all(-1)
        if barred.any():
            raise ValueError(f"{name}: forbids the action that was taken at {_first(barred)}")


def _with_final_masks(arrays: Mapping[str, Array], ranges: Ranges) -> Mapping[str, Array]:
    """Add the mask of each final observation; where it is not known, the mask before it.

    It is not known where a client of a policy server acted, nor where the mask of a choice allows nothing.
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


def reward_of(arrays: Mapping[str, Array]) -> float:
    """Return the sum of a fragment's rewards, float32 [T, N], over its valid steps."""
    return float(arrays["reward"].sum(where=arrays["valid"].astype(bool), dtype=float))
