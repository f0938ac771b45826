"""The interface of an algorithm: one object, so that no other code depends on which algorithm it is.

The feed calls `makes_batch` to know whether the oldest fragments of the log are enough, the loop passes the
assembled batch to `update`, publishes `published_modules` and stores `state`. An algorithm knows nothing of
Redis, gRPC, files or threads; one thread calls it.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from penstock.config.settings import OnPolicySection
from penstock.learner.algorithms.gradient import FlatAdam, GoBack
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.batch import Batch
from penstock.protocol.schema import TensorRule


class Settles(StrEnum):
    """When experience stops counting as outstanding, so that actors may generate more."""

    ON_PUBLISH = "publish"
    """With the publication of what was learned from it."""
    ON_INSERT = "insert"
    """As soon as it is in the algorithm's memory."""


@dataclass(frozen=True, slots=True)
class LogShare:
    """A share of the log: payload bytes and entries."""

    size: int = 0
    entries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Reports what one batch did.

    applied: False when a parameter, loss or gradient was not finite, a number was not plausible or an
    exception was raised (parameters, optimiser and normaliser are as before, the caller books the batch
    under the reason), or when the batch had no valid step (the caller settles it).
    reason: "" | "nan" | "implausible" | "error" | "empty".
    steps: valid steps trained.   gradient_steps: minibatches.
    metrics: finite floats by name; each algorithm's file lists its own.
    publish: whether the weights have moved far enough to be published.
    culprits: by number of the log entry, the reason for which the update was made without a fragment.
    left_out: valid steps of these.   collects: whether gradient steps wait until there is more experience.
    error: what was raised, where the reason is "error".
    """

    applied: bool
    reason: str = ""
    steps: int = 0
    gradient_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    publish: bool = True
    culprits: Mapping[int, str] = field(default_factory=dict)
    left_out: int = 0
    collects: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """All of an algorithm that a checkpoint holds: copies, safe to write from another thread.

    tensors: by path, each of the shape and dtype it is trained in, on the CPU (weights, optimiser moments,
    normaliser, generator states).
    numbers: JSON values.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)


class Algorithm(ABC):
    """An algorithm.

    A subclass defines what is abstract; the rest fits an algorithm that uses a batch once and forgets it.
    """

    staleness: float = math.inf
    """Updates that experience may lag behind when it is begun (S); ∞ where experience is remembered."""
    lock_step: bool = False
    """True when rounds replace the budget (staleness 0); `makes_batch` is then not called."""
    stale_after: int | None = None
    """Fragments older than this many updates at their turn are dropped as `stale`; None: never."""
    flush_below: int | None = None
    """Steps of a batch, of which a flush takes what there is; None where that has no meaning."""
    is_stopping: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the learner is to end soon: an update of many gradient steps ends between two of them then."""
    keeps_restored: bool = False
    """True where experience that was begun before a restore is still learned from, as with replay."""
    rejection: str = "rejected"
    """The reason in the summary of a run that ends by `has_rejected`, one word."""
    settles: Settles = Settles.ON_PUBLISH
    """When the settled position moves past experience that was used."""
    _updates: int = 0

    @property
    def updates(self) -> int:
        """Applied updates in this model's own lineage: the `update` of the next publication."""
        return self._updates

    # ---- batches

    def requires(self) -> tuple[TensorRule, ...]:
        """Return the tensors that fragments must carry beyond the standard ones."""
        return ()

    @abstractmethod
    def budget(self, fragment_charge: int) -> int:
        """Return the most outstanding steps, for full fragments of `fragment_charge` steps.

        Raises ValueError with both numbers when it is below one fragment.
        """

    @abstractmethod
    def makes_batch(self, fragments: int, charge: int) -> bool:
        """Return whether so many fragments make a batch.

        charge: the sum of their charges (T·N each), in steps. The feed calls this after each fragment, so a
        batch is the smallest number of fragments for which it is true.
        """

    # ---- learning

    @abstractmethod
    def update(self, batch: Batch, *, progress: float) -> Update:
        """Consume one batch. progress: environment steps done ÷ steps planned, clipped to 0..1."""

    @abstractmethod
    def published_modules(self) -> dict[str, nn.Module]:
        """Return what is published, by policy name.

        Copy (`penstock.policy.weights.snapshot`) before the next update.
        """

    def scalars(self, progress: float) -> dict[str, float]:
        """Return the numbers sent to actors with every version. progress: as of `update`."""
        return {}

    # ---- its own validation

    @property
    def has_rejected(self) -> bool:
        """Return whether the algorithm's own validation rejects the policy, which ends learning.

        The version of the best evaluation is then published again.
        """
        return False

    def findings(self) -> dict[str, Any]:
        """Return facts about the policy for the summary of a run, by key, as JSON values.

        Lines under `remarks` are also shown to readers of the summary.
        """
        return {}

    # ---- checkpoints

    @abstractmethod
    def state(self) -> AlgorithmState:
        """Return all that a checkpoint must hold."""

    @abstractmethod
    def load(self, state: AlgorithmState) -> None:
        """Restore all that `state` returned; raises ValueError that names a missing or misshapen part."""

    def restore(self, state: AlgorithmState) -> None:
        """Restore model, optimiser and normalisers of a checkpoint of this run, all or nothing.

        The count of updates, schedules, limiters, replay and generators stay as they are. Raises ValueError
        that names a missing or misshapen part, NotImplementedError where the algorithm cannot go back.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot go back to the weights of a checkpoint")

    # ---- the log as storage, for an algorithm that needs entries behind the settled position

    def retain_from(self) -> int | None:
        """Return the number of the oldest log entry still needed; None: no settled entry is."""
        return None

    def retains(self, fragment_bytes: int) -> LogShare:
        """Return the most that it will need of the settled log. fragment_bytes: of a full fragment.

        Raises ValueError, with the figures, where its memory cannot hold one.
        """
        return LogShare()

    def reload(self, batch: Batch) -> None:
        """Take entries back after `load`, from `retain_from` on, oldest first; skip those not needed.

        Called only where `retain_from` names an entry. Raises ValueError for an entry that has changed, and
        NotImplementedError in an algorithm that retains entries and does not define this.
        """
        raise NotImplementedError(f"{type(self).__name__} retains log entries and cannot take them back")

    def end_reload(self) -> int:
        """End the reload: the log holds no more. Returns how many needed entries were absent."""
        return 0


@runtime_checkable
class Imitator(Protocol):
    """What an `Algorithm` has in addition that learns from recorded actions alone, in any order."""

    passes: int
    """Passes over a recording."""
    validation: float
    """Share of the fragments that are held out of training, 0..1."""

    def validate_on(self, batch: Batch) -> None:
        """Set the batch to validate on; called once, before the first update."""


Section = TypeVar("Section", bound=OnPolicySection)


class LearnsOnce(Algorithm, Generic[Section]):
    """The base of algorithms that learn from each batch once and forget it: batch size, budget, staleness.

    Staleness is bounded twice. The `budget` of outstanding steps is (S+1) batches, S being
    `algorithm.staleness`: the broker gives credit within it (`has_room` in `broker/log/scripts/_turns.lua`),
    so that a fragment which an actor begins now is trained at most S updates later. The feed drops fragments
    that are older than `stale_after` updates nevertheless (`learner/feed/log_feed.py`).
    """

    def __init__(self, section: Section) -> None:
        self.section = section
        self.staleness = section.staleness
        self.lock_step = section.lock_step
        self.flush_below = None if section.lock_step else section.batch_steps
        self.stale_after = section.stale_after or 4 * (section.staleness + 1)

    def minibatches(self, batch: Batch, steps: int) -> int:
        """Cut a batch of so many steps into minibatches; a flush has fewer, each of about the usual size."""
        count: int = getattr(self.section, "minibatches", 1)
        if not batch.is_flushed:
            return count
        return min(count, max(1, math.ceil(steps * count / self.section.batch_steps)))

    def budget(self, fragment_charge: int) -> int:
        """(S+1) batches; raises ValueError, with both numbers, where that is below one fragment."""
        budget = (self.section.staleness + 1) * self.section.batch_steps
        if budget < fragment_charge:
            raise ValueError(
                f"algorithm.batch_steps: the budget of {budget} steps is below one fragment of "
                f"{fragment_charge}; raise batch_steps or lower actor.unroll_length or environment.count"
            )
        return budget

    def makes_batch(self, fragments: int, charge: int) -> bool:
        return charge >= self.section.batch_steps


# ---- An update that fails is attributed to the fragments that cause it, and made without them.
#
#     attempt on the whole batch → applied: done
#                                → not: try halves without leaving a trace, halves of the bad ones, …
#                                       → culprits by fragment → attempt on the rest
#
# A failure is an exception, a number that is not finite, or one that no honest actor sends. Fragments that
# fail only together have no culprit: the update fails as a whole. An exception that every fragment causes is
# raised.

EMPTY: Final = "empty"
NAN: Final = "nan"
IMPLAUSIBLE: Final = "implausible"
ERROR: Final = "error"

ATTRIBUTABLE: Final = (RuntimeError, ValueError, LookupError, ArithmeticError)
"""Errors that the numbers of a fragment can cause."""
OF_THE_DEVICE: Final = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that no fragment causes: too little memory, or a device that has lost its state."""

log = logging.getLogger(__name__)


class Attempt(Protocol):
    """Makes the update of a batch; changes nothing where it fails or is a rehearsal."""

    def __call__(self, batch: Batch, *, is_rehearsal: bool) -> Update: ...


def verdict(judged: Sequence[float], max_log_ratio: float = math.inf) -> str:
    """Return the reason for which an update is not kept, or "".

    judged: numbers that must be finite; the last is the largest |log π/μ|, where it is bounded.
    """
    if max_log_ratio < judged[-1] < math.inf:
        return IMPLAUSIBLE
    return "" if all(map(math.isfinite, judged)) else NAN


def contained(attempt: Attempt, batch: Batch, group: RankGroup | None = None) -> Update:
    """Return the update of a batch, or that of its fragments which do not make it fail.

    group: the ranks that make it together, each with its own fragments; None: one rank. All of them find the
    same culprits, because an attempt is judged by numbers that they have computed together.

    Raises what `attempt` raises where no single fragment is the cause. With several ranks it is raised at
    once, since the others wait inside of the same attempt.
    """
    group = group or RankGroup()
    tried = partial(_tried, attempt) if group.size == 1 else attempt
    whole = tried(batch, is_rehearsal=False)
    if whole.applied or whole.reason == EMPTY or not batch.sources:
        return _or_raised(whole)
    own = [place for place, source in enumerate(batch.sources) if source.columns]
    numbers, first = group.listed([batch.sources[place].number for place in own])
    everyone = range(len(numbers))

    def part(chosen: Collection[int]) -> Batch:
        return batch.of_fragments([place for at, place in enumerate(own, first) if at in chosen])

    def trial(chosen: Collection[int]) -> str:
        update = tried(part(chosen), is_rehearsal=True)
        return "" if update.applied or update.reason == EMPTY else update.reason

    found = culprits(trial, everyone)
    if not found or (len(found) == len(everyone) > 1):
        return _or_raised(whole)
    if len(found) == len(everyone):
        if whole.error is not None:
            log.error("a fragment made its update fail", exc_info=whole.error)
        return whole
    rest = attempt(part([one for one in everyone if one not in found]), is_rehearsal=False)
    if not rest.applied:
        return _or_raised(whole)
    left_out = int(group.sum_(part(found).valid.sum()))
    by_number = {numbers[one]: reason for one, reason in found.items()}
    return replace(rest, culprits=by_number, left_out=left_out)


def culprits(trial: Callable[[Sequence[int]], str], suspects: Sequence[int]) -> dict[int, str] | None:
    """Return the suspects that fail alone, with the reason; None: some fail together only.

    trial: returns the reason for which some of them fail together, or "". Suspects that fail are halved until
    one is left, so that k culprits among n cost about 2 k log n trials.
    """
    if len(suspects) == 1:
        why = trial(suspects)
        return {suspects[0]: why} if why else None
    middle = len(suspects) // 2
    bad = [half for half in (suspects[:middle], suspects[middle:]) if trial(half)]
    found: dict[int, str] = {}
    for half in bad:
        among = culprits(trial, half)
        if among is None:
            return None
        found |= among
    return found or None


def _tried(attempt: Attempt, batch: Batch, *, is_rehearsal: bool) -> Update:
    try:
        return attempt(batch, is_rehearsal=is_rehearsal)
    except ATTRIBUTABLE as error:
        return failed(error)


def failed(error: Exception) -> Update:
    """Return the update that raised an error; raises it again where the device is the cause."""
    if isinstance(error, OF_THE_DEVICE):
        raise error
    return Update(applied=False, reason=ERROR, error=error)


def _or_raised(update: Update) -> Update:
    if update.error is not None:
        raise update.error
    return update


# ---- What a checkpoint holds of an algorithm: tensors by path, "part/name".


@dataclass(slots=True)
class Trial:
    """The gradient steps of a batch. is_kept: whether they are kept at the end of the block."""

    is_kept: bool = False


class Trained(Algorithm):
    """An algorithm of which a checkpoint holds modules, optimisers and generators, each by its name.

    An optimiser has the name of the module that it optimises; the only one of an algorithm has the name "".
    """

    policy: Any
    modules: Mapping[str, nn.Module]
    optimisers: Mapping[str, FlatAdam] = MappingProxyType({})
    generators: Mapping[str, torch.Generator] = MappingProxyType({})
    going_on: tuple[str, ...] = ("generator/",)
    """Prefixes of the tensors that a restore leaves as they are."""
    needed: tuple[str, ...] = ("updates", "gradient_steps")
    """Numbers without which a state is refused."""

    def published_modules(self) -> dict[str, nn.Module]:
        return {"default": self.policy}

    @contextmanager
    def undoing(self) -> Iterator[Trial]:
        """Undo weights, moments and generators at the end of the block, unless its trial is kept."""
        go_back, trial = self._backup(), Trial()
        try:
            yield trial
        finally:
            if not trial.is_kept:
                go_back()

    def _backup(self) -> GoBack:
        learned = [optimiser.backup() for optimiser in self.optimisers.values()]
        drawn = [(random, random.get_state()) for random in self.generators.values()]

        def go_back() -> None:
            for restore in learned:
                restore()
            for random, state in drawn:
                random.set_state(state)

        return go_back

    def state(self) -> AlgorithmState:
        tensors: dict[str, Tensor] = {}
        for name, module in self.modules.items():
            tensors |= copies(name, module)
        for name, optimiser in self.optimisers.items():
            tensors |= {_moments(name) + key: moment for key, moment in optimiser.moments().items()}
        tensors |= {f"generator/{name}": random.get_state() for name, random in self.generators.items()}
        numbers: dict[str, Any] = {"updates": self._updates}
        if self.optimisers:
            steps: dict[str, Any] = {name: optimiser.steps for name, optimiser in self.optimisers.items()}
            numbers["gradient_steps"] = steps.get("", steps)
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def load(self, state: AlgorithmState) -> None:
        missing = [name for name in self.needed if name not in state.numbers]
        drawn = {name: f"generator/{name}" for name in self.generators}
        missing += [path for path in drawn.values() if path not in state.tensors]
        if missing:
            raise ValueError(
                f"algorithm state: {missing[0]} missing; was the run begun with another algorithm?"
            )
        self._load_learned(state)
        for name, random in self.generators.items():
            random.set_state(state.tensors[drawn[name]])
        self._updates = int(state.numbers["updates"])

    def _load_learned(self, state: AlgorithmState) -> None:
        for name, module in self.modules.items():
            load_copies(module, name, state.tensors)
        for name, optimiser in self.optimisers.items():
            steps = state.numbers["gradient_steps"]
            optimiser.load_moments(under(state.tensors, _moments(name)), int(steps[name] if name else steps))

    def restore(self, state: AlgorithmState) -> None:
        self.load(taken_over(self.state(), state, going_on=self.going_on))


def _moments(name: str) -> str:
    return f"optimiser/{name}/" if name else "optimiser/"


def copies(part: str, module: nn.Module) -> dict[str, Tensor]:
    """Return copies on the CPU of what a module's `state_dict` holds. part: first element of their paths."""
    return {
        f"{part}/{key}": value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()
    }


def load_copies(module: nn.Module, part: str, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `copies` returned back into a module, all or nothing.

    Raises ValueError that names what is missing or misshapen.
    """
    own, found = module.state_dict(), under(tensors, f"{part}/")
    for key, tensor in own.items():
        if key not in found or found[key].shape != tensor.shape:
            raise ValueError(f"{part}/{key}: missing or not {tuple(tensor.shape)}; is it the same policy?")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(found[key])


def taken_over(own: AlgorithmState, found: AlgorithmState, *, going_on: Collection[str]) -> AlgorithmState:
    """Return `own` with the tensors and the optimisers' counts of steps that a restore takes from `found`.

    Args:
        own: the current state of the algorithm.
        found: the state in a checkpoint.
        going_on: prefixes of the tensors that stay as they are, such as generators.

    Raises:
        ValueError: a tensor is missing or has another shape, or the counts of steps are missing.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in own.tensors.items():
        if name.startswith(tuple(going_on)):
            tensors[name] = tensor
        elif name not in found.tensors or found.tensors[name].shape != tensor.shape:
            there = tuple(found.tensors[name].shape) if name in found.tensors else "nothing"
            raise ValueError(
                f"{name}: {there}, not {tuple(tensor.shape)}; it belongs to another network or space"
            )
        else:
            tensors[name] = found.tensors[name]
    steps: Any = found.numbers.get("gradient_steps")
    if type(steps) is not type(own.numbers["gradient_steps"]):
        raise ValueError("gradient_steps: missing; the state belongs to another algorithm")
    return AlgorithmState(tensors=tensors, numbers=own.numbers | {"gradient_steps": steps})


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose path begins with `prefix`, by the rest of it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
