"""What a rollout worker of this machine acts with: environments, a policy, and the arrays between them."""

import re
import threading
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.actor.acting.local_policy import BEING_MADE, ENVIRONMENT, HeaderFields, note_lag, watch
from penstock.actor.acting.masks import learner_reward
from penstock.actor.link.session import Session
from penstock.actor.rollout.fragment_builder import FragmentBuilder, ObservationBounds
from penstock.actor.specification import run
from penstock.actor.specification.run import Run
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
    """Return one seed per slot, each below 2^32 (what every Gymnasium environment takes).

    run_seed: of the run. actor_id, salt: of the session. slots: how many seeds.
    """
    return [_draw(run_seed, actor_id, salt, slot) for slot in range(slots)]


def action_seed(run_seed: int, actor_id: str, salt: int) -> int:
    """Return the seed of the actions drawn in a session.

    run_seed: of the run. actor_id, salt: of the session.
    """
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
    """Return the generator of a run.

    settings: of this process. Raises what `run.read` and the environment raise.
    """
    return EnvironmentGenerator(run.read(specification, settings.actor), health)


class EnvironmentGenerator:
    """Steps N environments with a local policy (see `penstock.actor.rollout.loop.FragmentGenerator`)."""

    def __init__(self, of: Run, health: Health) -> None:
        watch(health, of.actor.stall_timeout_s)
        health.expect(ENVIRONMENT, BEING_MADE)
        self._health, count = health, of.environment.count
        self.specification = of.specification
        self.outbox_fragments = of.actor.outbox_fragments
        self._actors = of.actor.count
        self._stepper = of.make_environment(of.environment, count, of.specification.seed)
        self._builder = FragmentBuilder(
            of.specification.schema,
            of.specification.unroll_length,
            count,
            of.actor.compress == "lz4",
            learner_reward(of.environment),
            final_masks=of.specification.final_masks,
            bounds=ObservationBounds(of.specification.observation_space),
        )
        self._building = threading.Lock()
        """Held while a step is recorded or a fragment is cut, which another thread may do."""
        self._local = of.make_policy(of.specification.seed)
        self._local.policy.use_threads(of.actor.threads)

    def begin(self, actor_id: str, session: Session) -> None:
        """Reset the environments with the seeds of this session."""
        seed, salt = self.specification.seed, session.seed_salt
        self._local.policy.seed_actions(action_seed(seed, actor_id, salt))
        self._local.place = place_of(actor_id, self._actors, self._stepper.slots)
        seeds = environment_seeds(seed, actor_id, salt, self._stepper.slots)
        initial = self._local.policy.initial_state(self._stepper.slots)
        self._builder.start(self._stepper.reset(seeds) | initial)
        session.follow_lag(partial(note_lag, self._health))
        if self._local.publication.version:
            self._local.answer_probe(session)

    def follow(self, session: Session) -> None:
        """Apply newer weights and answer the probe with them."""
        self._local.follow(session)

    def unroll(self, is_over: Callable[[], bool]) -> None:
        """The hot loop: until the fragment is full, or no environment is left to act for."""
        builder, stepper, policy = self._builder, self._stepper, self._local.policy
        progress, building = self._health.progress, self._building
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
        """The rows collected."""
        return self._builder.length

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        """The rows collected."""
        fields = HeaderFields(
            run=self.specification.run,
            session=session,
            sequence=sequence,
            weights=self._local.publication,
            round=round_,
        )
        with self._building:
            return self._builder.cut(fields)

    def close(self) -> None:
        """End the environments."""
        self._stepper.close()
