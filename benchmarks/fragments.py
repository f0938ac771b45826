"""Made-up fragments: their shape, the specification that goes with them, and one to send again and again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from broker.log.learner_records import Pacing
from penstock.wire.fragment import Fragment, FragmentHeader, Slot, WeightSpan, build
from penstock.wire.limits import MIB
from penstock.wire.schema import Axes, FragmentSchema, fragment_schema
from penstock.wire.spaces import Box, Discrete
from penstock.wire.specification import Probe, RunSpecification
from penstock.wire.tensor import Array

RUN: Final = "bench"
_SESSION_TIMEOUT_MS: Final = 30_000


@dataclass(frozen=True)
class Shape:
    """Fragments of `steps` × `slots` of an observation and one of two actions, in which no episode ends."""

    box: Box
    steps: int
    slots: int

    @cached_property
    def schema(self) -> FragmentSchema:
        """Return the tensors of a fragment."""
        return fragment_schema(self.box, Discrete(2))

    @property
    def fragment_bytes(self) -> int:
        """Return the bytes of a fragment's payload."""
        return self.schema.fragment_bytes(self.steps, self.slots, 0)

    def specification(self) -> RunSpecification:
        """Return the specification that a learner would send to the actors."""
        return RunSpecification(
            run=RUN,
            seed=0,
            environment_json="{}",
            policy_json="{}",
            actor_json="{}",
            evaluation_json="{}",
            workload="control",
            observation_space=self.box,
            action_space=Discrete(2),
            schema=self.schema,
            probe=Probe({}, {}),
            unroll_length=self.steps,
            lock_step=False,
            session_timeout_ms=_SESSION_TIMEOUT_MS,
        )

    def pacing(self, in_flight: int) -> Pacing:
        """Return credit for so many fragments of one actor."""
        return Pacing(
            budget=in_flight * self.steps * self.slots,
            fragment_charge=self.steps * self.slots,
            actor_count=1,
            lock_step=False,
            session_timeout_ms=_SESSION_TIMEOUT_MS,
            max_log_bytes=2048 * MIB,
            max_log_entries=1_000_000,
        )

    def header(self, session: int) -> FragmentHeader:
        """Return the header of the session's first fragment, without the table of its tensors."""
        return FragmentHeader(
            run=RUN,
            session=session,
            sequence=1,
            schema_id=self.schema.schema_id,
            steps=self.steps,
            slots=tuple(Slot(index, 0, 0) for index in range(self.slots)),
            weights=(WeightSpan(0, 0, self.steps, 1, 0),),
            tensors=(),
        )

    def arrays(self, **given: Array) -> Mapping[str, Array]:
        """Return every tensor; zeros and ones at random where not `given`."""
        leading = {
            Axes.STEP: (self.steps, self.slots),
            Axes.STEP_PLUS_ONE: (self.steps + 1, self.slots),
            Axes.SLOT: (self.slots,),
            Axes.END: (0,),
        }
        random = np.random.default_rng(0)
        return {
            rule.name: random.integers(0, 2, (*leading[rule.axes], *rule.shape)).astype(rule.dtype)
            for rule in self.schema.tensors
        } | given

    def template(self, session: int) -> Fragment:
        """Return a fragment of a session, from which `numbered` makes others."""
        return build(self.header(session), self.arrays())


def numbered(template: Fragment, sequence: int, created_us: int) -> Fragment:
    """Return the same fragment under another number."""
    return Fragment(replace(template.header, sequence=sequence, created_us=created_us), template.payload)


def box(width: int) -> Box:
    """Return a space of so many numbers between −1 and 1."""
    return Box(np.full(width, -1, np.float32), np.full(width, 1, np.float32))


def shape_of(size: int, *, steps: int, slots: int) -> Shape:
    """Return the shape with the widest observation with which a fragment has at most `size` bytes."""
    width = size // (4 * (steps + 1) * slots)
    while Shape(box(width), steps, slots).fragment_bytes > size:
        width -= 1
    return Shape(box(width), steps, slots)
