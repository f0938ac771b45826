"""The steps of one episode that the learner has not got yet, cut into segments.

A step is whole once what followed it is known: its next observation comes with the next action, its end with
the end of the episode. A segment holds whole steps of one weight version and the observation after the last;
its rewards stay open until it becomes a fragment.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.actor.acting.header_fields import HeaderFields
from penstock.protocol.fragment import Fragment, Slot, build
from penstock.protocol.messages import Publication
from penstock.protocol.schema import FragmentSchema
from penstock.protocol.tensor import Array

_MOST: Final = float(np.finfo(np.float32).max)

Row = Mapping[str, Array]
"""One observation or action by tensor name, arrays [1, *shape]."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """T steps, T + 1 observations once it is cut. Rewards may still be added.

    observations: with action masks, where the run has them. state: the policy's before the first step.
    final: the true last observation, where the episode ended with the last step.
    """

    slot: Slot
    version: int
    update: int
    bytes: int = 0
    """What its observations and actions take."""
    observations: list[Row] = field(default_factory=list)
    actions: list[Row] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    state: Row = field(default_factory=dict)
    final: Row | None = None

    @property
    def steps(self) -> int:
        """Steps taken, the last perhaps not whole."""
        return len(self.actions)

    def holds(self, step: int) -> bool:
        """Return whether the step of the episode is one of these."""
        return self.slot.first_step <= step < self.slot.first_step + self.steps

    def add_reward(self, step: int, amount: float) -> None:
        """To what the step has."""
        self.rewards[step - self.slot.first_step] += amount

    def drop_last(self) -> None:
        """Forget a last step whose outcome is unknown.

        What was seen before it stays, as the end.
        """
        del self.actions[-1], self.log_probs[-1], self.rewards[-1], self.valid[-1]

    def to_fragment(
        self,
        schema: FragmentSchema,
        run: str,
        policy: str,
        *,
        compress: bool,
        reward: Callable[[Mapping[str, Array]], Array] | None = None,
    ) -> Fragment:
        """Return the T steps as a fragment of one slot; session and number come when it is sent.

        schema: of the run. reward: see `FragmentBuilder`; it gets the tensors by name, in the shapes of
        the schema.
        """
        fields = HeaderFields(
            run=run,
            session=0,
            sequence=0,
            weights=Publication(self.version, self.update),
            round=0,
            policy=policy,
        )
        names = frozenset(self.observations[0]) if compress else frozenset[str]()
        tensors = self._tensors()
        if reward is not None:
            tensors["reward"] = reward(tensors)
        return build(fields.header(schema, self.steps, (self.slot,)), tensors, names)

    def _tensors(self) -> dict[str, Array]:
        steps = self.steps
        rows, last = self.observations[:-1], self.observations[-1]
        tensors: dict[str, Any] = {}
        for name, first in self.observations[0].items():
            # What was seen last has no mask: nothing was done there.
            end = last[name] if name in last else np.ones_like(first)
            tensors[name] = _stacked([*(row[name] for row in rows), end])
        tensors |= {name: _stacked([row[name] for row in self.actions]) for name in self.actions[0]}
        # Each reward is finite as a float32, their sum need not be; a fragment with infinity ends the
        # session.
        tensors["reward"] = np.clip(self.rewards, -_MOST, _MOST).astype(np.float32)[:, np.newaxis]
        tensors["log_prob"] = np.asarray(self.log_probs, np.float32)[:, np.newaxis]
        tensors["valid"] = np.asarray(self.valid, bool)[:, np.newaxis]
        ends = np.zeros((steps, 1), bool)
        tensors["terminated"], tensors["truncated"] = ends.copy(), ends
        tensors["terminated"][-1], tensors["truncated"][-1] = self.terminated, self.truncated
        # Of a step that is no experience nothing is valued.
        final = self.final if self.valid[-1] else None
        count = int(final is not None)
        tensors["final/slot"] = np.zeros(count, np.int32)
        tensors["final/step"] = np.full(count, steps - 1, np.int32)
        for name, row in self.observations[0].items():
            if not name.startswith("mask/"):
                tensors[f"final/{name}"] = row[:0] if final is None else final[name]
        if self.state:
            tensors |= self.state
            tensors["begins"] = np.zeros((steps + 1, 1), bool)
            tensors["begins"][0] = self.slot.first_step == 0
        return tensors


def _stacked(rows: list[Array]) -> Array:
    """Of arrays [1, *shape] one of [n, 1, *shape], as `np.stack` makes it in more time."""
    return np.concatenate(rows)[:, np.newaxis]


class SegmentBuilder:
    """The open segment of an episode; `step` and `end` return the one that they complete."""

    def __init__(self, lane: int, number: int, unroll_length: int, max_age_s: float) -> None:
        self._lane, self._number = lane, number
        self._unroll_length, self._max_age_s = unroll_length, max_age_s
        self._begun = 0
        self._began_s = -math.inf
        self.open: Segment | None = None
        self.length = 0
        """Steps of the episode."""

    def is_due(self, now_s: float) -> bool:
        """Return whether the next action begins a new segment, and so may come from newer weights."""
        return (
            self.length == 0
            or self.length - self._begun >= self._unroll_length
            or now_s - self._began_s >= self._max_age_s
        )

    def skip(self, now_s: float) -> None:
        """A step that is not learned from."""
        if self.is_due(now_s):
            self._begun, self._began_s = self.length, now_s
        self.length += 1

    def step(
        self,
        observation: Row,
        action: Row,
        log_prob: float | None,
        weights: tuple[int, int],
        now_s: float,
        state: Row,
    ) -> Segment | None:
        """An action was taken. log_prob None: it was not drawn from the policy. weights: version and update.

        state: the policy's before it.
        """
        done = None
        if self.open is not None and (self.is_due(now_s) or self.open.version != weights[0]):
            done, self.open = self.open, None
            done.observations.append(observation)
        if self.open is None:
            slot = Slot(self._lane, self._number, self.length)
            self.open = Segment(slot=slot, version=weights[0], update=weights[1], state=state)
            self._begun, self._began_s = self.length, now_s
        segment = self.open
        segment.observations.append(observation)
        segment.actions.append(action)
        segment.log_probs.append(0.0 if log_prob is None else log_prob)
        segment.valid.append(log_prob is not None)
        segment.rewards.append(0.0)
        self.length += 1
        return done

    def cut(self) -> Segment | None:
        """Return the whole steps; the last one, whose outcome is not known, begins the next segment.

        None where there are none, or where the policy's state before the last step is not known.
        """
        done = self.open
        if done is None or done.steps < 2 or done.state:
            return None
        slot = Slot(self._lane, self._number, self.length - 1)
        self.open = last = Segment(slot=slot, version=done.version, update=done.update)
        last.bytes = done.bytes // done.steps
        done.bytes -= last.bytes
        last.observations, last.actions = [done.observations[-1]], [done.actions[-1]]
        last.log_probs, last.rewards = [done.log_probs[-1]], [done.rewards[-1]]
        last.valid = [done.valid[-1]]
        done.drop_last()
        self._begun = self.length - 1
        return done

    def end(self, *, terminated: bool, final: Row | None) -> Segment | None:
        """The episode ended in its own way (`terminated`) or from outside."""
        done, self.open = self.open, None
        if done is not None:
            done.terminated, done.truncated, done.final = terminated, not terminated, final
            done.observations.append(final if final is not None else done.observations[-1])
        return done

    def give_up(self) -> Segment | None:
        """Return the steps before the last one, if any: the outcome of the last step will not be reported."""
        done, self.open = self.open, None
        if done is None:
            return None
        done.drop_last()
        return done if done.steps else None
