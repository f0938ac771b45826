"""The replay memory: a ring of transitions that enter and leave by whole log entries, oldest first.

Observations are stored once, apart from it (`FrameRing`): that of a step also follows the step before, and is
part of several stacks of frames.

The log is the storage: a checkpoint holds the numbers and priorities of the entries, never a payload. After
`load` the entries are awaited; `reload` puts each back in its place, from the fragment that was read again,
so that the next sample is the same as without the restart. The memory is on the learner's device; random
numbers are drawn on the CPU, so that one seed gives one order everywhere. It is used by one thread.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from penstock.learner.algorithms.gradient import GoBack
from penstock.learner.batch import Batch
from penstock.policy.recurrent import FrameStack

# ---- From fragments to n-step transitions; pure functions of one fragment's columns of a batch.
#
# A transition of step t is (o_t, a_t, Σ_{k<m} γ^k r_{t+k}, γ^m or 0, o_{t+m}) with the largest m ≤ n for
# which all m steps are of the same episode and in the same fragment (Sutton 1988; Hessel et al. 2018,
# section "multi-step learning"):
#
#     the episode *terminated* with step t+m−1               →  the discount is 0, nothing follows
#     it was *truncated* there                               →  o_{t+m}: the true final observation, γ^m
#     the fragment ends, or the next step is not experience  →  o_{t+m}: the observation after the step, γ^m
#
# So the last n−1 steps of a fragment look less far ahead than the others. Their m-step targets are correct,
# too, and a transition stays within one entry of the log, which enters and leaves replay whole. Axes: T
# steps, N columns, K ended episodes, M transitions: the valid steps, by time and then by column.


@dataclass(frozen=True, slots=True)
class Transitions:
    """M transitions as input of a policy.

    observation, following: by path, [M, *shape], raw, with action masks, and with the state before them where
        the policy stacks frames.
    action: by path, [M, *shape].
    reward: float32 [M], discounted sum over the steps looked ahead.
    discount: float32 [M], the factor of the value of `following`.
    """

    observation: dict[str, Tensor]
    action: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    following: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True, slots=True)
class Steps:
    """M transitions over F frames: those of one fragment, by time and then by column, or those of the ring.

    frames: observations and action masks by path, raw, [F, *shape], each once; {} in the ring (`FrameRing`).
    before, after: int64 [M, k], the frames of the stack of `observation` and of `following`, oldest first.
    action, reward, discount: see `Transitions`.
    """

    frames: dict[str, Tensor]
    before: Tensor
    after: Tensor
    action: dict[str, Tensor]
    reward: Tensor
    discount: Tensor

    def __len__(self) -> int:
        return len(self.reward)

    def columns(self) -> list[Tensor]:
        """Return everything that has M rows."""
        return [self.reward, self.discount, self.before, self.after, *self.action.values()]


def transitions(fragment: Batch, stack: FrameStack, *, discount: float, steps: int) -> Steps:
    reward, factor, following = _look_ahead(fragment, discount, steps)
    rows = fragment.valid.flatten().nonzero().squeeze(1)
    stacks = _stacks(fragment, stack)
    past = stack.past(fragment.state) if stack.depth > 1 else {}
    return Steps(
        frames={
            path: torch.cat([part.flatten(0, 1), _finals(fragment, path), *_before(path, part, past, stack)])
            for path, part in fragment.observation.items()
        },
        before=stacks[rows],
        after=stacks[following[rows]],
        action={path: part.flatten(0, 1)[rows] for path, part in fragment.action.items()},
        reward=reward[rows],
        discount=factor[rows],
    )


def _stacks(fragment: Batch, stack: FrameStack) -> Tensor:
    """Return the frames of the stack of each observation, int64 [(T+1)·N + K, k], the final ones last.

    Frames are numbered as in `Steps`: observations, final observations, then those of the state before row 0.
    """
    length, columns = fragment.valid.shape
    finals, observed = len(fragment.final_slot), (length + 1) * columns
    device = fragment.valid.device
    if stack.depth == 1:
        return torch.arange(observed + finals, device=device)[:, None]
    assert fragment.begins is not None, "fragments of a policy with state hold where episodes begin"
    rows, lasts = stack.sources(fragment.begins, fragment.final_step, fragment.final_slot)
    own = torch.arange(columns, device=device)[:, None]
    known = torch.cat(
        [
            torch.arange((stack.depth - 1) * columns, device=device) + observed + finals,
            torch.arange(observed, device=device),
        ]
    ).view(-1, columns)
    newest = torch.arange(observed, observed + finals, device=device)[:, None]
    ended = torch.cat([known[lasts, fragment.final_slot[:, None]], newest], 1)
    return torch.cat([known[rows, own].flatten(0, 1), ended])


def _before(path: str, part: Tensor, past: dict[str, Tensor], stack: FrameStack) -> list[Tensor]:
    """Return the frames of the state, [(k − 1)·N, *shape]; for a mask, which has none, zeros."""
    if stack.depth == 1:
        return []
    none = part.new_zeros((stack.depth - 1, *part.shape[1:]))
    return [past.get(path, none).to(part.dtype).flatten(0, 1)]


def _finals(fragment: Batch, path: str) -> Tensor:
    """Return the final observations of a path, [K, *shape].

    Where no mask is known, that before the last step is used: the value of a truncated step must not be that
    of an action that is never allowed.
    """
    for found in (fragment.final_observation, fragment.final_mask):
        if path in found:
            return found[path]
    return fragment.observation[path][fragment.final_step, fragment.final_slot]


def _look_ahead(fragment: Batch, discount: float, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return discounted reward and discount of each step, float32 [T·N], and the observation that follows.

    The last: int64 [T·N], row among [(T+1)·N observations, K final ones].
    """
    length = len(fragment.valid)
    ended = fragment.terminated | fragment.truncated
    goes_on = torch.zeros_like(fragment.valid)
    goes_on[:-1] = fragment.valid[:-1] & fragment.valid[1:] & ~ended[:-1]
    after = _after(fragment)
    kept = discount * (~fragment.terminated).to(fragment.reward.dtype)
    reward, factor, following = fragment.reward.clone(), kept.clone(), after.clone()
    # `reaches` is where a path of k more steps begins; `shifted` brings row t+k to row t.
    reaches = goes_on.clone()
    for k in range(1, min(steps, length)):
        rest = length - k
        here = reaches[:rest]
        reward[:rest] += here * (discount**k) * fragment.reward[k:]
        factor[:rest] = torch.where(here, (discount**k) * kept[k:], factor[:rest])
        following[:rest] = torch.where(here, after[k:], following[:rest])
        reaches[:rest] = here & goes_on[k:]
        reaches[rest:] = False
    return reward.flatten(), factor.flatten(), following.flatten()


def _after(fragment: Batch) -> Tensor:
    length, columns = fragment.valid.shape
    rows = torch.arange(length * columns, device=fragment.valid.device) + columns
    after = rows.view(length, columns)
    finals = torch.arange(len(fragment.final_slot), device=after.device) + (length + 1) * columns
    after[fragment.final_step, fragment.final_slot] = finals
    return after


_GROWTH: Final = 1.25


class FrameRing:
    """Observations, each once, by number and path, [room, *shape]; it grows where `room` is too small."""

    def __init__(self, room: int, device: torch.device) -> None:
        self._room, self._device = room, device
        self._frames: dict[str, Tensor] = {}
        self.first = self.end = 0
        """Numbers of the oldest frame and of the one after the newest."""

    @property
    def nbytes(self) -> int:
        return sum(frames.nbytes for frames in self._frames.values())

    def append(self, new: Mapping[str, Tensor]) -> int:
        """Append frames by path, [F, *shape] each; returns the number of the first."""
        start = self.end
        count = len(next(iter(new.values())))
        if self.end + count - self.first > self._room:
            self._grow(self.end + count - self.first)
        for path, frames in new.items():
            if path not in self._frames:
                self._frames[path] = self._empty(frames, self._room)
            self._frames[path][self._places(start, start + count)] = frames.to(self._device)
        self.end += count
        return start

    def keep(self, first: int, end: int) -> None:
        self.first, self.end = first, end

    def at(self, path: str, number: Tensor) -> Tensor:
        """Return the frames of a path, [..., *shape]. number: int64 [...]."""
        return self._frames[path][number % self._room]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._frames)

    def _grow(self, least: int) -> None:
        room = max(least, int(self._room * _GROWTH))
        held = torch.arange(self.first, self.end, device=self._device)
        grown = {}
        for path, frames in self._frames.items():
            grown[path] = self._empty(frames, room)
            grown[path][held % room] = frames[held % self._room]
        self._frames, self._room = grown, room

    def _places(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self._device) % self._room

    def _empty(self, like: Tensor, room: int) -> Tensor:
        """Return tensors that are not initialised: pages are provided as they are written."""
        return torch.empty((room, *like.shape[1:]), dtype=like.dtype, device=self._device)


class SumTree:
    """Holds `capacity` leaves of priority ≥ 0, float64; 0 at first."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._depth = max(capacity - 1, 1).bit_length()
        self._first = 1 << self._depth
        self._nodes = torch.zeros(2 * self._first, dtype=torch.float64, device=device)

    @property
    def total(self) -> Tensor:
        return self._nodes[1]

    def get(self, index: Tensor) -> Tensor:
        """Return the priorities [n] of leaves int64 [n]."""
        return self._nodes[self._first + index]

    def set(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities [n] of leaves int64 [n]; an index that occurs twice must have one priority."""
        node = self._first + index
        self._nodes[node] = priority.to(self._nodes)
        for _ in range(self._depth):
            node = node >> 1
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]

    def find(self, mass: Tensor) -> Tensor:
        """Return the leaf int64 [n] in which each `mass`, float64 [n] of 0..total, falls.

        A leaf of priority 0 is never returned while any is above 0, even when `mass` is rounded.
        """
        rest = mass.clone()
        node = torch.ones_like(mass, dtype=torch.int64)
        for _ in range(self._depth):
            left = self._nodes[2 * node]
            goes_right = (rest >= left) & (self._nodes[2 * node + 1] > 0)
            rest = torch.where(goes_right, rest - left, rest)
            node = 2 * node + goes_right
        return node - self._first


_MOVED_AT_ONCE: Final = 65_536
_FLOOR: Final = 1e-6
"""ε of priorities."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A log entry in replay. number: of the entry. rows: its transitions. size: bytes of its payload."""

    number: int
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch to learn from. index: int64 [n], rows of the ring. weight: float32 [n], largest 1."""

    transitions: Transitions
    index: Tensor
    weight: Tensor


@dataclass(eq=False)
class Replay:
    """Holds at most `capacity` transitions, of at most `capacity_bytes` of payloads in the log.

    priority_exponent: α of proportional priorities (Schaul et al. 2016, section 3.3): P(i) = p_i^α / Σ p^α,
    p_i = |δ_i| + ε; None: all are drawn alike.
    """

    capacity: int
    capacity_bytes: int
    _: KW_ONLY
    seed: InitVar[int]
    device: torch.device
    stack: FrameStack
    priority_exponent: float | None = None

    def __post_init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._frames: FrameRing | None = None
        self._spans: dict[int, tuple[int, int]] = {}
        """Frames of each entry, oldest first: the number of the first and of the one after the last."""
        self._rows: Steps | None = None
        self._entries: deque[Entry] = deque()
        self._awaited: deque[tuple[Entry, Tensor | None]] = deque()
        self._lost = 0
        self._first = 0
        self._bytes = 0
        self.size = 0
        """Transitions that it holds."""
        self._tree = None if self.priority_exponent is None else SumTree(self.capacity, self.device)
        self._largest = torch.ones((), dtype=torch.float64, device=self.device)
        self._former: list[tuple[Tensor, Tensor, Tensor]] = []
        """Overwritten by `set_errors` since `begin`: places, their priorities, the largest one."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    @property
    def frame_bytes(self) -> int:
        return 0 if self._frames is None else self._frames.nbytes

    def retain_from(self) -> int | None:
        """Return the number of the oldest log entry that is held or awaited; None: there is none."""
        # Entries are reloaded oldest first, so awaited ones are newer than held ones.
        oldest = next(iter(self._entries), None) or next((entry for entry, _ in self._awaited), None)
        return None if oldest is None else oldest.number

    # ---- in and out

    def insert(self, number: int, size: int, new: Steps) -> None:
        """Insert an entry of `size` bytes with the largest priority so far, in place of the oldest ones.

        Raises ValueError for an entry that does not fit.
        """
        if len(new) == 0:
            return
        if len(new) > self.capacity or size > self.capacity_bytes:
            raise ValueError(
                f"log entry {number} has {len(new)} transitions in {size} bytes, replay holds "
                f"{self.capacity} in {self.capacity_bytes}; raise algorithm.capacity or "
                "algorithm.capacity_bytes"
            )
        while self.size + len(new) > self.capacity or self._bytes + size > self.capacity_bytes:
            self._evict()
        index = self._append(Entry(number, len(new), size), new)
        if self._tree is not None:
            self._tree.set(index, self._largest.expand(len(new)))

    def remove(self, number: int) -> bool:
        """Remove an entry that must not be sampled again; newer ones move up. Returns whether it was held.

        It costs a copy of all newer transitions.
        """
        numbers = [entry.number for entry in self._entries]
        if number not in numbers:
            return False
        at = numbers.index(number)
        start = sum(entry.rows for entry in itertools.islice(self._entries, at))
        entry = self._entries[at]
        del self._entries[at]
        for first in range(start, self.size - entry.rows, _MOVED_AT_ONCE):
            self._move(first, entry.rows, min(_MOVED_AT_ONCE, self.size - entry.rows - first))
        self._forget(entry, self.size)
        return True

    def _move(self, first: int, by: int, count: int) -> None:
        assert self._rows is not None, "there is an entry"
        into, out = self._ring(first, count), self._ring(first + by, count)
        for column in self._rows.columns():
            column[into] = column[out]
        if self._tree is not None:
            self._tree.set(into, self._tree.get(out))

    def withdraw(self, number: int) -> None:
        """Remove an entry if it is the newest."""
        if self._entries and self._entries[-1].number == number:
            self._forget(self._entries.pop(), self.size)

    def _append(self, entry: Entry, new: Steps) -> Tensor:
        if self._rows is None or self._frames is None:
            self._rows = _room(new, self.capacity, self.device)
            self._frames = FrameRing(self.capacity, self.device)
        start = self._frames.append(new.frames)
        self._spans[entry.number] = (start, self._frames.end)
        index = self._ring(self.size, entry.rows)
        written = replace(new, before=new.before + start, after=new.after + start)
        for kept, rows in zip(self._rows.columns(), written.columns(), strict=True):
            kept[index] = rows.to(self.device)
        self._entries.append(entry)
        self.size += entry.rows
        self._bytes += entry.size
        return index

    def _evict(self) -> None:
        entry = self._entries.popleft()
        self._forget(entry, entry.rows)
        self._first = (self._first + entry.rows) % self.capacity

    def _forget(self, entry: Entry, end: int) -> None:
        """Forget an entry whose rows lie before row `end` of the ring.

        The frames of an entry in the middle stay until those of the entries before it are gone.
        """
        assert self._frames is not None, "there is an entry"
        if self._tree is not None:
            index = self._ring(end - entry.rows, entry.rows)
            self._tree.set(index, torch.zeros(entry.rows, dtype=torch.float64, device=self.device))
        self.size -= entry.rows
        self._bytes -= entry.size
        del self._spans[entry.number]
        held = list(self._spans.values())
        self._frames.keep(held[0][0], held[-1][1]) if held else self._frames.keep(0, 0)

    def _ring(self, start: int, count: int) -> Tensor:
        """Return the places of `count` rows that begin `start` rows after the oldest."""
        places = torch.arange(self._first + start, self._first + start + count, device=self.device)
        return places % self.capacity

    # ---- sampling

    def sample(self, count: int, *, importance_exponent: float) -> Sample:
        """Return `count` transitions, drawn with replacement. importance_exponent: β of their weights, 0..1.

        Uniform: every transition alike, weights 1. Prioritised: one draw from each of `count` equal parts of
        the total (appendix B.2.1), weights (N·P(i))^−β divided by the batch's largest (section 3.4). Raises
        ValueError when the memory is empty.
        """
        if self.size == 0:
            raise ValueError("replay: nothing to sample from; the rate limiter lets steps in first")
        if self._tree is None:
            drawn = torch.randint(self.size, (count,), generator=self._random)
            index = (drawn.to(self.device) + self._first) % self.capacity
            return Sample(self.rows(index), index, torch.ones(count, device=self.device))
        parts = torch.arange(count, dtype=torch.float64)
        within = torch.rand(count, generator=self._random, dtype=torch.float64)
        total = self._tree.total
        index = self._tree.find(((parts + within) / count).to(self.device) * total)
        weight = (self.size * self._tree.get(index) / total) ** -importance_exponent
        return Sample(self.rows(index), index, (weight / weight.max()).float())

    def rows(self, index: Tensor) -> Transitions:
        """Return the transitions at places int64 [n] of the ring."""
        assert self._rows is not None, "nothing was inserted"
        kept = self._rows
        return Transitions(
            observation=self._observed(kept.before[index]),
            action={path: rows[index] for path, rows in kept.action.items()},
            reward=kept.reward[index],
            discount=kept.discount[index],
            following=self._observed(kept.after[index]),
        )

    def _observed(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return what a policy reads of stacks of frames. numbers: int64 [n, k]."""
        assert self._frames is not None, "nothing was inserted"
        return self.stack.row({path: self._frames.at(path, numbers) for path in self._frames.paths})

    def entries_of(self, index: Tensor) -> Tensor:
        """Return the log entry of each place int64 [n] of the ring, int64 [n] on the CPU."""
        ends = torch.tensor(list(itertools.accumulate(entry.rows for entry in self._entries)))
        behind = (index.cpu() - self._first) % self.capacity
        numbers = torch.tensor([entry.number for entry in self._entries])
        return numbers[torch.searchsorted(ends, behind, right=True)]

    def part(self, sample: Sample, wanted: Tensor) -> Sample:
        """Return some rows of a sample. wanted: bool [n]."""
        index = sample.index[wanted.to(sample.index.device)]
        return Sample(self.rows(index), index, sample.weight[wanted.to(sample.weight.device)])

    def begin(self) -> None:
        """Forget overwritten priorities: a backup is made after this."""
        self._former.clear()

    def backup(self) -> GoBack:
        """Remember priorities and random numbers, until the next `begin`."""
        changes, drawn = len(self._former), self._random.get_state()

        def go_back() -> None:
            while len(self._former) > changes:
                index, priority, self._largest = self._former.pop()
                assert self._tree is not None, "only priorities are noted"
                self._tree.set(index, priority)
            self._random.set_state(drawn)

        return go_back

    def set_errors(self, index: Tensor, error: Tensor) -> None:
        if self._tree is None or self.priority_exponent is None:
            return
        # An error that is not finite ends the update, but must not stay in the tree.
        self._former.append((index, self._tree.get(index), self._largest))
        size = error.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
        priority = (size + _FLOOR) ** self.priority_exponent
        self._largest = torch.maximum(self._largest, priority.max())
        self._tree.set(index, priority)

    # ---- checkpoints

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and numbers that `load` takes; entries that are still awaited are part of it.

        Tensors: `entries` int64 [E, 3] (number, transitions, bytes), `generator` uint8 and, with priorities,
        `priorities` float64 [transitions] and `largest`, a scalar.
        """
        held = [*self._entries, *(entry for entry, _ in self._awaited)]
        columns = [[entry.number, entry.rows, entry.size] for entry in held]
        tensors = {
            "entries": torch.tensor(columns, dtype=torch.int64).reshape(-1, 3),
            "generator": self._random.get_state(),
        }
        if self._tree is not None:
            waiting = [priority for _, priority in self._awaited if priority is not None]
            here = self._tree.get(self._ring(0, self.size)).cpu()
            tensors["priorities"] = torch.cat([here, *waiting])
            tensors["largest"] = self._largest.cpu().clone()
        return tensors, {"first": self._first, "capacity": self.capacity}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Await the entries of a state, tensors and numbers as `state` returns them.

        Raises ValueError that names what is missing or does not fit.
        """
        wanted = ["entries", "generator", *(["priorities", "largest"] if self._tree is not None else [])]
        missing = [name for name in wanted if name not in tensors]
        if missing:
            raise ValueError(
                f"replay/{missing[0]}: missing; was the run begun with other settings of replay?"
            )
        if int(numbers["capacity"]) != self.capacity:
            raise ValueError(
                f"replay: saved with algorithm.capacity={numbers['capacity']}, not {self.capacity}"
            )
        entries = [Entry(*row) for row in tensors["entries"].tolist()]
        priorities: list[Tensor | None] = [None] * len(entries)
        if self._tree is not None:
            priorities = list(tensors["priorities"].split([entry.rows for entry in entries]))
            self._largest = tensors["largest"].to(self.device).clone()
        self._awaited = deque(zip(entries, priorities, strict=True))
        self._random.set_state(tensors["generator"])
        self._first = int(numbers["first"]) % self.capacity

    def awaits(self, number: int) -> bool:
        """Return whether an entry is awaited next; entries before it are given up."""
        while self._awaited and self._awaited[0][0].number < number:
            self._awaited.popleft()
            self._lost += 1
        return bool(self._awaited) and self._awaited[0][0].number == number

    def reload(self, number: int, new: Steps) -> None:
        """Put the entry back that is awaited next; raises ValueError if it has changed."""
        if not self.awaits(number):
            raise ValueError(f"log entry {number}: not awaited by replay")
        entry, priorities = self._awaited.popleft()
        if len(new) != entry.rows:
            raise ValueError(
                f"log entry {number}: {len(new)} transitions, {entry.rows} when it entered replay"
            )
        index = self._append(entry, new)
        if self._tree is not None and priorities is not None:
            self._tree.set(index, priorities.to(self.device))

    def end_reload(self) -> int:
        """Stop waiting; returns how many of the awaited entries were absent."""
        lost, self._lost = self._lost + len(self._awaited), 0
        self._awaited.clear()
        return lost


def _room(like: Steps, capacity: int, device: torch.device) -> Steps:
    """Return columns for `capacity` transitions, not initialised: pages are provided as they are written."""

    def empty(rows: Tensor) -> Tensor:
        return torch.empty((capacity, *rows.shape[1:]), dtype=rows.dtype, device=device)

    return Steps(
        frames={},
        before=empty(like.before),
        after=empty(like.after),
        action={path: empty(rows) for path, rows in like.action.items()},
        reward=empty(like.reward),
        discount=empty(like.discount),
    )
