"""What lies in the log under the entries that the feed has chosen: fetched, checked, made into a batch.

With several ranks each does it for its own entries (`penstock.learner.ranks.roles`).
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import LogEntry
from penstock.config.settings import Settings
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.batch import Loaded, Staged, Upload, assemble, nothing
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import DIGEST_BYTES
from penstock.protocol import fragment as wire
from penstock.protocol.fragment import FragmentHeader
from penstock.protocol.schema import UNKNOWN, Range, Ranges
from penstock.protocol.tensor import Array
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from penstock.learner.model import Model

_READ: Final = 64

log = logging.getLogger(__name__)

# ---- Whether a fragment can be trained on: what its numbers mean together, and each tensor's range.

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


class State(IntEnum):
    """Of a payload."""

    GOOD = 1
    MISSING = 2
    INVALID = 3


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a payload.

    steps: valid ones of a good one. reward: sum over these. digest: first DIGEST_BYTES of its SHA-256, where
    that is taken. fragment: it and its header, where it was found in this process and is kept for the
    recording.
    """

    state: State
    steps: int = 0
    reward: float = 0.0
    digest: bytes = b""
    fragment: wire.Fragment | None = None


class Payloads(Protocol):
    """Used by the feed's thread."""

    def check(self, entries: Sequence[LogEntry]) -> list[Found]: ...

    def batch(self, entries: Sequence[LogEntry]) -> Staged:
        """Good entries as this rank's batch, in this order; everything else that was kept is forgotten."""
        ...


class OwnPayloads:
    """`Payloads` of one process, on their way to the model's device."""

    def __init__(self, learner_log: LearnerLog, settings: Settings, model: "Model") -> None:
        self._log, self._run_name = learner_log, settings.run
        self._schema, self._ranges = model.specification.schema, model.ranges
        self._upload = Upload(model.device)
        self._take_digests = settings.actor.ack_journal is not None
        self._keep_fragments = settings.learner.record is not None
        self._loaded: dict[int, Loaded] = {}

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        payloads = self._fetch(entries) if entries else []
        return [
            Found(State.MISSING) if payload is None else self._open(entry, payload)
            for entry, payload in zip(entries, payloads, strict=True)
        ]

    def batch(self, entries: Sequence[LogEntry]) -> Staged:
        """Assemble the entries as `Payloads` says; a batch without columns for no entries.

        It fetches what was not checked here. Raises Fatal where the payload of an entry that was good is not
        good now.
        """
        lacking = [entry for entry in entries if entry.number not in self._loaded]
        for entry, found in zip(lacking, self.check(lacking), strict=True):
            if found.state is not State.GOOD:
                raise Fatal(f"log entry {entry.number} was good and is {found.state.name.lower()} now")
        loaded = [self._loaded[entry.number] for entry in entries] or [nothing(self._schema)]
        places = [(entry.number, entry.size) for entry in entries] or None
        self._loaded.clear()
        return self._upload.stage(partial(assemble, loaded, self._upload.device, places))

    def _fetch(self, entries: Sequence[LogEntry]) -> Sequence[bytes | None]:
        return self._log.fetch([entry.number for entry in entries], [entry.size for entry in entries])

    def _open(self, entry: LogEntry, payload: bytes) -> Found:
        header = entry.header
        assert header is not None, "an entry without a header is never chosen"
        try:
            loaded = self._checked(header, payload)
        except ValueError as error:
            words = {"number": entry.number, "why": str(error)}
            log.error("fragment dropped as invalid", extra=words)  # noqa: TRY400 - the text says it all
            return Found(State.INVALID)
        self._loaded[entry.number] = loaded
        arrays = loaded[1]
        return Found(
            State.GOOD,
            steps=int(arrays["valid"].sum()),
            reward=reward_of(arrays),
            digest=hashlib.sha256(payload).digest()[:DIGEST_BYTES] if self._take_digests else b"",
            fragment=wire.Fragment(header, payload) if self._keep_fragments else None,
        )

    def _checked(self, header: FragmentHeader, payload: bytes) -> Loaded:
        fragment = wire.Fragment(header, payload)
        wire.check(fragment, self._schema, self._run_name)
        return header, check_meaning(header, fragment.arrays(), self._ranges)

    # ---- entries that an algorithm retained, read again when a learner resumes

    def reload(self, lease: LeaseKeeper, algorithm: Algorithm, position: int) -> None:
        """Give an algorithm back what it retains of the log, from `retain_from` up to `position`.

        Raises ValueError where an entry is not what it was when it entered.
        """
        first = algorithm.retain_from()
        if first is None:
            return
        after = first - 1
        while after < position:
            failpoint("recall.reading", after)
            found = lease.patiently(lambda: self._log.read(after, _READ, 0))  # noqa: B023 - called before the next turn
            entries = [entry for entry in found if entry.number <= position]
            if not entries:
                break
            after = entries[-1].number
            self._give(algorithm, entries)
        lost = algorithm.end_reload()
        words = {"first": first, "position": position, "lost": lost}
        if lost:
            log.error("replay comes back smaller: the log does not hold all of it any more", extra=words)
        else:
            log.info("replay was read again", extra=words)

    def _give(self, algorithm: Algorithm, entries: Sequence[LogEntry]) -> None:
        loaded, places = [], []
        for entry, payload in zip(entries, self._fetch(entries), strict=True):
            if entry.header is None or payload is None:
                continue
            try:
                loaded.append(self._checked(entry.header, payload))
            except ValueError:
                continue  # Booked `invalid` when it was read the first time: it is not in replay.
            places.append((entry.number, entry.size))
        if loaded:
            algorithm.reload(assemble(loaded, self._upload.device, places))


def reward_of(arrays: Mapping[str, Array]) -> float:
    """Return the sum of a fragment's rewards, float32 [T, N], over its valid steps."""
    return float(arrays["reward"].sum(where=arrays["valid"].astype(bool), dtype=float))
