"""Generators of fragments: the base of all, and the one that steps environments here and cuts what happens.

Steps are collected in arrays that are allocated once, and cut into fragments of T' ≤ T rows. Row T' of the
observations, their masks and the state before it are row 0 of the next fragment, so nothing is lost between
two. Each end adds the true last observation, so a fragment of large observations and many ends `is_full`
before row T: when one more step, in which every slot ends, might not fit into a message.
"""

import re
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.actor import specification as run
from penstock.actor.acting.masks import learner_reward
from penstock.actor.acting.stepper import Ended, Stepped
from penstock.actor.link.session import Session
from penstock.actor.rollout.loop import BEING_MADE, ENVIRONMENT, note_lag, watch
from penstock.actor.specification import LocalPolicy, Run
from penstock.config.settings import ConfigurationError, Settings
from penstock.policy.acting.acting_policy import begun
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.protocol.fragment import Fragment, FragmentHeader, Slot, WeightSpan, build
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.schema import Axes, FragmentSchema, observed
from penstock.protocol.spaces import Space, leaves
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import DTYPES, Array
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health, on_made

# ---- The one place where the header of a new fragment is built.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderFields:
    """The fields of a fragment's header that its content does not determine.

    session, sequence: 0 where the fragment gets both when it is sent.
    weights: the publication that all of its steps were generated with.
    round: the round of a lock-step run, else 0.
    """

    run: str
    session: int
    sequence: int
    weights: Publication
    round: int
    policy: str = "default"

    def header(
        self, schema: FragmentSchema, steps: int, slots: tuple[Slot, ...], attributes: bytes = b""
    ) -> FragmentHeader:
        """Return the header of a fragment that is created now, its table of tensors still empty.

        schema: the run's. steps: T, rows of the fragment. slots: N, the origin of each column.
        attributes: what the workload notes, at most `limits.MAX_ATTRIBUTES_BYTES`.
        """
        return FragmentHeader(
            run=self.run,
            session=self.session,
            sequence=self.sequence,
            schema_id=schema.schema_id,
            steps=steps,
            slots=slots,
            weights=(WeightSpan(0, 0, steps, self.weights.version, self.weights.update),),
            tensors=(),
            policy=self.policy,
            created_us=time.time_ns() // 1000,
            round=self.round,
            attributes=attributes,
        )


# ---- Which episode each slot is in, and the episodes that an unroll finished.


@dataclass(frozen=True, slots=True)
class Ends:
    """K ends in order of time: slot int [K] and step (row of the unroll) int [K]."""

    slot: NDArray[np.int32]
    step: NDArray[np.int32]


class Episodes:
    """Running return and length of N slots across unrolls."""

    def __init__(self, slots: int) -> None:
        self._episode_id = [0] * slots
        self._return = np.zeros(slots, np.float64)
        self._length = np.zeros(slots, np.int64)

    def slots(self) -> tuple[Slot, ...]:
        """Return episode and index of the next step of every slot."""
        lengths = self._length.tolist()
        return tuple(Slot(n, self._episode_id[n], lengths[n]) for n in range(len(lengths)))

    def advance(
        self,
        reward_TN: NDArray[np.float32],  # noqa: N803 - axes in the name
        valid_TN: NDArray[np.bool_],  # noqa: N803
        terminated_TN: NDArray[np.bool_],  # noqa: N803
        ends: Ends,
        version: int,
        lost: Ends | None = None,
    ) -> list[Episode]:
        """Count an unroll of T steps of N slots and return the episodes that it finished.

        reward_TN: float32 [T, N], 0 where valid_TN is False. valid_TN, terminated_TN: bool [T, N]. version:
        of the weights it acted with. lost: where episodes were dropped, which are not returned.
        """
        total = np.cumsum(reward_TN, axis=0, dtype=np.float64)
        steps = np.cumsum(valid_TN, axis=0, dtype=np.int64)
        over = [(step, slot, True) for slot, step in zip(ends.slot.tolist(), ends.step.tolist(), strict=True)]
        if lost is not None:
            dropped = zip(lost.slot.tolist(), lost.step.tolist(), strict=True)
            over = sorted([*over, *((step, slot, False) for slot, step in dropped)])
        finished = []
        for step, slot, is_whole in over:
            is_terminated = bool(terminated_TN[step, slot])
            episode = self._end(slot, total[step, slot], steps[step, slot], is_terminated, version)
            if is_whole:
                finished.append(episode)
        self._return += total[-1]
        self._length += steps[-1]
        return finished

    def _end(self, slot: int, total: float, steps: int, terminated: bool, version: int) -> Episode:
        episode = Episode(
            slot_id=slot,
            episode_id=self._episode_id[slot],
            episode_return=float(self._return[slot] + total),
            length=int(self._length[slot] + steps),
            terminated=terminated,
            version=version,
        )
        self._episode_id[slot] += 1
        # The sums of this unroll up to here belong to the episode that ended.
        self._return[slot] = -total
        self._length[slot] = -steps
        return episode


# ---- The check of observations against their space, before they are sent.

_BOUNDED_OBSERVATION: Final = "observation"


class ObservationBounds:
    """The ranges of every part of an observation, by path."""

    def __init__(self, observation_space: Space) -> None:
        found = {path: observed(leaf) for path, leaf in leaves(observation_space, _BOUNDED_OBSERVATION)}
        self._ranges = {path: one for path, one in found.items() if one is not None}

    def replace_terminal(
        self, before: Mapping[str, Any], after: Mapping[str, Any], slots: NDArray[np.intp]
    ) -> None:
        """Replace a last observation outside its space by the observation before it.

        before, after: of two steps in a row, by path [N, ...]; `after` is changed. slots: int [K], those that
        terminated and are shown their last observation once more before they are reset. A policy reads it
        then, whatever is drawn from it.
        """
        for path, known in self._ranges.items():
            rows = after[path][slots]
            if not known.holds(rows):
                broken = slots[~known.inside(rows).reshape(len(rows), -1).all(1)]
                after[path][broken] = before[path][broken]

    def check(self, tensors: Mapping[str, Array]) -> None:
        """Raise Fatal that names part, value, place and space of what the environment should not have shown.

        tensors: of a fragment, by name, in the shape and dtype of the run's schema. The last observation of a
        terminated episode has no value and may be anything.
        """
        truncated = ~tensors["terminated"].astype(bool)[tensors["final/step"], tensors["final/slot"]]
        try:
            for path, known in self._ranges.items():
                known.check(path, tensors[path])
                known.check(f"final/{path}", tensors[f"final/{path}"][truncated])
        except ValueError as error:
            raise Fatal(
                f"the environment left its observation_space: {error} (step of the fragment, slot, element); "
                "correct the environment, or the bounds that its space states"
            ) from error


_OBSERVATION, _ACTION, _FINAL, _MASK, _STATE = "observation", "action", "final", "mask", "state"
_HEADS = frozenset({_OBSERVATION, _ACTION, _FINAL, _MASK, _STATE})
_FIXED = frozenset(
    {"reward", "terminated", "truncated", "valid", "log_prob", "begins", "final/slot", "final/step"}
)
_NOTHING: Mapping[str, Array] = {}


class FragmentBuilder:
    """Arrays [T, N] for the tensors of the schema; observations have one row more."""

    def __init__(
        self,
        schema: FragmentSchema,
        unroll_length: int,
        slots: int,
        compress: bool = False,
        reward: Callable[[Mapping[str, Array]], Array] | None = None,
        *,
        final_masks: bool = False,
        bounds: ObservationBounds | None = None,
    ) -> None:
        """reward: computes the learner's reward of a fragment's tensors; None: the environment's is sent.

        final_masks: whether the run takes the masks of last observations.
        bounds: by which observations are checked; None: they are not checked here.
        """
        self._schema, self._slots = schema, slots
        self.unroll_length = unroll_length
        self.length = 0
        self._arrays = {
            rule.name: np.zeros(
                (unroll_length + (rule.axes is Axes.STEP_PLUS_ONE), slots, *rule.shape), DTYPES[rule.dtype]
            )
            for rule in _step_rules(schema)
        }
        self._observations = {rule.name: self._arrays[rule.name] for rule in schema.under(_OBSERVATION)}
        masks = {rule.name: self._arrays[rule.name] for rule in schema.under(_MASK)}
        self._shown = self._observations | masks
        self._final_masks = masks if final_masks else {}
        self._actions = {rule.name: self._arrays[rule.name] for rule in schema.under(_ACTION)}
        self._state = [rule.name for rule in schema.under(_STATE)]
        self._rows: list[dict[str, Any]] = [
            {path: array[row] for path, array in self._shown.items()} for row in range(unroll_length + 1)
        ]
        self._reward: Any = self._arrays["reward"]
        self._terminated: Any = self._arrays["terminated"]
        self._truncated: Any = self._arrays["truncated"]
        self._valid: Any = self._arrays["valid"]
        self._log_prob: Any = self._arrays["log_prob"]
        self._begins: Any = self._arrays.get("begins")
        self._ended: list[tuple[int, Ended]] = []
        self._lost: list[tuple[int, NDArray[np.intp]]] = []
        self._ends = 0
        self._most_ends = [schema.most_ends(row + 1, slots) - slots for row in range(unroll_length)]
        self._compress = frozenset(self._observations) if compress else frozenset[str]()
        self._learner_reward = reward
        self._bounds = bounds
        self._episodes = Episodes(slots)

    def start(self, observation: Mapping[str, Any]) -> None:
        """Begin at freshly reset environments, with their masks and initial state in `observation`."""
        self.length = self._ends = 0
        self._ended.clear()
        self._lost.clear()
        self._episodes = Episodes(self._slots)
        self._put(0, observation)
        self._rows[0].update({name: observation[name] for name in self._state})
        self._note_begins(0, np.ones(self._slots, np.bool_))

    def observation(self) -> dict[str, Array]:
        """Return the policy's input, masks and state too: views by path, [N, ...], until the next `cut`."""
        return self._rows[self.length]

    @property
    def is_full(self) -> bool:
        row = self.length
        return row > 0 and (row == self.unroll_length or self._ends > self._most_ends[row])

    def record(
        self,
        action: Mapping[str, Array],
        log_prob: Array,
        stepped: Stepped,
        state: Mapping[str, Array] = _NOTHING,
    ) -> None:
        """Add the step that `action` [N, ...] by path led to.

        log_prob: of the actions as they were drawn, [N]. stepped: what the environments returned. state: the
        policy's after this step; it is not changed.
        """
        row = self.length
        for path, array in action.items():
            self._actions[path][row] = array
        self._log_prob[row] = log_prob
        self._reward[row] = stepped.reward
        self._terminated[row] = stepped.terminated
        self._truncated[row] = stepped.truncated
        self._valid[row] = True if stepped.valid is None else stepped.valid
        if stepped.ended is not None:
            self._ended.append((row, stepped.ended))
            self._ends += len(stepped.ended.slots)
        if stepped.lost is not None:
            self._lost.append((row, stepped.lost.nonzero()[0]))
        self._put(row + 1, stepped.observation)
        if stepped.ended is not None and self._bounds is not None:
            shown_again = stepped.terminated[stepped.ended.slots]
            if stepped.begins is not None:
                shown_again = shown_again & ~stepped.begins[stepped.ended.slots]
            slots = stepped.ended.slots[shown_again]
            self._bounds.replace_terminal(self._rows[row], self._rows[row + 1], slots)
        if self._begins is not None:
            self._rows[row + 1].update(begun(state, stepped.begins))
            self._note_begins(row + 1, stepped.begins)
        self.length = row + 1

    def cut(self, fields: HeaderFields) -> tuple[Fragment, list[Episode]]:
        """Return the rows as a fragment, and the episodes that ended; raises Fatal beyond the bounds."""
        steps, slots = self.length, self._episodes.slots()
        ends = _in_order([(row, ended.slots) for row, ended in self._ended])
        header = fields.header(self._schema, steps, slots)
        tensors = self._tensors(ends)
        if self._bounds is not None:
            self._bounds.check(tensors)
        if self._learner_reward is not None:
            tensors["reward"] = self._learner_reward(tensors)
        fragment = build(header, tensors, self._compress)
        lost = _in_order(self._lost) if self._lost else None
        rows = self._reward[:steps], self._valid[:steps], self._terminated[:steps]
        episodes = self._episodes.advance(*rows, ends, fields.weights.version, lost)
        self._roll_over()
        return fragment, episodes

    def _put(self, row: int, observation: Mapping[str, Any]) -> None:
        for path, array in self._shown.items():
            array[row] = observation[path]

    def _note_begins(self, row: int, begins: NDArray[np.bool_] | None) -> None:
        if self._begins is not None:
            self._begins[row] = False if begins is None else begins

    def _tensors(self, ends: Ends) -> dict[str, Array]:
        steps = self.length
        tensors: dict[str, Array] = {
            name: array[: steps + len(array) - self.unroll_length] for name, array in self._arrays.items()
        }
        tensors |= {name: self._rows[0][name] for name in self._state}
        tensors |= {"final/slot": ends.slot, "final/step": ends.step}
        for path, array in self._observations.items():
            rows = [ended.observation[path] for _, ended in self._ended]
            final = np.concatenate(rows) if rows else np.empty((0, *array.shape[2:]))
            tensors[f"{_FINAL}/{path}"] = final.astype(array.dtype, copy=False)
        for path, array in self._final_masks.items():
            unknown = [np.zeros((len(ended.slots), *array.shape[2:]), np.bool_) for _, ended in self._ended]
            masks = [
                ended.observation.get(path, nothing)
                for (_, ended), nothing in zip(self._ended, unknown, strict=True)
            ]
            tensors[f"{_FINAL}/{path}"] = np.concatenate([np.zeros((0, *array.shape[2:]), np.bool_), *masks])
        return tensors

    def _roll_over(self) -> None:
        for array in self._shown.values():
            array[0] = array[self.length]
        self._rows[0].update({name: self._rows[self.length][name] for name in self._state})
        if self._begins is not None:
            self._begins[0] = self._begins[self.length]
        self._ended.clear()
        self._lost.clear()
        self.length = self._ends = 0


def _in_order(found: Sequence[tuple[int, NDArray[np.intp]]]) -> Ends:
    """Return the ends of slots by row, in order of time."""
    if not found:
        return Ends(np.empty(0, np.int32), np.empty(0, np.int32))
    slot = np.concatenate([slots for _, slots in found]).astype(np.int32)
    counts = [len(slots) for _, slots in found]
    return Ends(slot, np.repeat(np.array([row for row, _ in found], np.int32), counts))


def _step_rules(schema: FragmentSchema) -> list[Any]:
    """The rules with one row per step; raises ConfigurationError for a tensor that no step gives."""
    rules = []
    for rule in schema.tensors:
        head = rule.name.partition("/")[0]
        if rule.name not in _FIXED and head not in _HEADS:
            raise ConfigurationError(
                f"schema: tensor {rule.name!r} is not made by a rollout worker; the workload needs its "
                "own rollout"
            )
        if head not in (_FINAL, _STATE):
            rules.append(rule)
    return rules


# ---- Seeds of a session, different for every actor, session and slot, and the place of an actor.

_ACTIONS = 2**32
"""In place of a slot: the stream that actions are drawn from."""


def environment_seeds(run_seed: int, actor_id: str, salt: int, slots: int) -> list[int]:
    """Return one seed per slot of a session, each below 2^32 (what every Gymnasium environment takes)."""
    return [_draw(run_seed, actor_id, salt, slot) for slot in range(slots)]


def action_seed(run_seed: int, actor_id: str, salt: int) -> int:
    return _draw(run_seed, actor_id, salt, _ACTIONS)


def place_of(actor_id: str, actors: int, slots: int) -> ExplorationSlots:
    """Return which environments of the run an actor has, of `actors` with `slots` each.

    By the number that its id ends with (`actor-3`), else by a hash of the id; actors beyond `actors` share
    places.
    """
    number = re.search(r"\d+$", actor_id)
    index = int(number[0]) if number else zlib.crc32(actor_id.encode())
    count = max(1, actors)
    return ExplorationSlots(first=index % count * slots, of=count * slots)


def _draw(run_seed: int, actor_id: str, salt: int, slot: int) -> int:
    entropy = [run_seed, zlib.crc32(actor_id.encode()), salt, slot]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def make_generator(
    specification: RunSpecification, settings: Settings, health: Health
) -> "EnvironmentGenerator":
    return EnvironmentGenerator(run.read(specification, settings.actor), health)


class Generator(ABC):
    """Base of generators that hold their policy (see `loop.FragmentGenerator`).

    A subclass makes its `local` policy, and implements how a session begins, what is unrolled and how it is
    cut.
    """

    local: LocalPolicy

    def __init__(self, of: Run, health: Health) -> None:
        watch(health, of.actor.stall_timeout_s)
        self.health, self.slots = health, of.environment.count
        self.specification = of.specification
        self.outbox_fragments = of.actor.outbox_fragments
        self._actors = of.actor.count

    def begin(self, actor_id: str, session: Session) -> None:
        """Start anew with the seeds of this actor in this session; reports the weights that are applied."""
        seed, salt = self.specification.seed, session.seed_salt
        self.local.place = place_of(actor_id, self._actors, self.slots)
        self.restart(action_seed(seed, actor_id, salt), environment_seeds(seed, actor_id, salt, self.slots))
        session.follow_lag(partial(note_lag, self.health))
        if self.local.publication.version:
            self.local.answer_probe(session)

    @abstractmethod
    def restart(self, seed: int, seeds: list[int]) -> None:
        """Begin a session. seed: of what is drawn. seeds: one per slot, of what is begun with."""

    def follow(self, session: Session) -> None:
        self.local.follow(session)

    @abstractmethod
    def unroll(self, is_over: Callable[[], bool]) -> None:
        """Make at least one step, until a fragment is full or `is_over`."""

    @property
    def collected(self) -> int:
        """Steps that `cut` would hand over now; 0 where nothing can be cut before the end of a batch."""
        return 0

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        return self.cut_with(
            HeaderFields(
                run=self.specification.run,
                session=session,
                sequence=sequence,
                weights=self.local.publication,
                round=round_,
            )
        )

    @abstractmethod
    def cut_with(self, fields: HeaderFields) -> tuple[Fragment, list[Episode]]:
        """Return what was collected as a fragment with this header."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        ...


class EnvironmentGenerator(Generator):
    """Steps N environments with a local policy."""

    def __init__(self, of: Run, health: Health) -> None:
        super().__init__(of, health)
        health.expect(ENVIRONMENT, BEING_MADE)
        with on_made(partial(health.progress, ENVIRONMENT)):
            self._stepper = of.make_environment(of.environment, self.slots, of.specification.seed)
        self.slots = self._stepper.slots
        self._builder = FragmentBuilder(
            of.specification.schema,
            of.specification.unroll_length,
            of.environment.count,
            of.actor.compress == "lz4",
            learner_reward(of.environment),
            final_masks=of.specification.final_masks,
            bounds=ObservationBounds(of.specification.observation_space),
        )
        self._building = threading.Lock()
        """Held while a step is recorded or a fragment is cut, which another thread may do."""
        self.local = of.make_policy(of.specification.seed)
        self.local.policy.use_threads(of.actor.threads)

    def restart(self, seed: int, seeds: list[int]) -> None:
        policy = self.local.policy
        policy.seed_actions(seed)
        self._builder.start(self._stepper.reset(seeds) | policy.initial_state(self.slots))

    def unroll(self, is_over: Callable[[], bool]) -> None:
        """The hot loop: until the fragment is full, or no environment is left to act for."""
        builder, stepper, policy = self._builder, self._stepper, self.local.policy
        progress, building = self.health.progress, self._building
        while not builder.is_full:
            acted = policy.act(builder.observation())
            stepped = stepper.step(policy.environment_action(acted.action))
            with building:
                builder.record(acted.action, acted.log_prob, stepped, acted.state)
            progress(ENVIRONMENT)
            if is_over():
                return

    @property
    def collected(self) -> int:
        return self._builder.length

    def cut_with(self, fields: HeaderFields) -> tuple[Fragment, list[Episode]]:
        with self._building:
            return self._builder.cut(fields)

    def close(self) -> None:
        self._stepper.close()
