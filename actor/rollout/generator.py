"""What a rollout worker generates with: the base of generators, and that of environments stepped here."""

import re
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.actor import specification as run
from penstock.actor.acting.masks import learner_reward
from penstock.actor.link.session import Session
from penstock.actor.rollout.fragment_builder import FragmentBuilder, HeaderFields, ObservationBounds
from penstock.actor.rollout.loop import BEING_MADE, ENVIRONMENT, note_lag, watch
from penstock.actor.specification import LocalPolicy, Run
from penstock.config.settings import Settings
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Episode
from penstock.protocol.specification import RunSpecification
from penstock.runtime.health import Health

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
    """Base of what makes fragments with a policy that it holds (see `loop.FragmentGenerator`).

    A subclass makes its `local` policy, and says how a session begins, what is unrolled and how it is cut.
    """

    local: LocalPolicy

    def __init__(self, of: Run, health: Health) -> None:
        watch(health, of.actor.stall_timeout_s)
        self.health, self.slots = health, of.environment.count
        self.specification = of.specification
        self.outbox_fragments = of.actor.outbox_fragments
        self._actors = of.actor.count

    def begin(self, actor_id: str, session: Session) -> None:
        """Start anew with the seeds of this actor in this session; says which weights are held already."""
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
        """Steps that `cut` would hand over now; 0 where a batch is worth nothing before its end."""
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
