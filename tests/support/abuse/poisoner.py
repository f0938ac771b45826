"""An actor whose sessions end with a poisoned fragment each; it writes down which, and in which way.

    python -m tests.support.abuse.poisoner --broker ADDRESS --actor-id NAME --poisons FILE [--every K]
        [--made-up] [--set section.key=value ...]

All but the spoiled tensors is what a shipped rollout worker does: sessions, credit, outbox, journal, drain,
and the run's own environments and policy, or with --made-up those of `tests.support.fleet.crowd_actor`. A
session that was found out is held for good, so it is left after its spoiled fragment, the K-th, and the next
way comes in a session of its own. A line is written before the fragment may be sent.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session
from penstock.actor.process import make_generator
from penstock.actor.rollout.loop import ENVIRONMENT, FragmentGenerator, Worker
from penstock.config.credentials import credentials
from penstock.config.settings import Settings, from_environment, load, parse_assignment
from penstock.protocol.fragment import Fragment, build
from penstock.protocol.limits import check_id
from penstock.protocol.messages import Episode
from penstock.protocol.spaces import Discrete, Space
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.health import ENDPOINT_VARIABLE, Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle, leave, run_service
from tests.support.abuse.poison import (
    OF_BOXES,
    OF_CHOICES,
    OF_DENSITIES,
    OF_DRAWS,
    OF_EVERY_RUN,
    OF_RATIOS,
    Way,
)
from tests.support.fleet.crowd_actor import Load, SyntheticGenerator

LEAST_STEPS: Final = 3
"""Of a fragment that can be spoiled: the second of its steps is neither the first nor the last."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A spoiled fragment, as its sender wrote it down."""

    session: int
    sequence: int
    way: str
    outcome: str


def read_poisons(path: Path) -> list[Poison]:
    """What a poisoner wrote; a last line that a kill tore is left out, its fragment was never sent."""
    text = path.read_text() if path.exists() else ""
    return [Poison(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def ways_against(action: Space, *, weighs: bool) -> list[Way]:
    """Those that fit a run whose observations are a Box; `action` is a Discrete or a Box.

    weighs: whether its algorithm weighs by π/μ.
    """
    is_choice = isinstance(action, Discrete)
    of_actions = OF_CHOICES if is_choice else OF_DRAWS
    of_ratios = OF_RATIOS if is_choice else (*OF_RATIOS, *OF_DENSITIES)
    return [*OF_EVERY_RUN, *OF_BOXES, *of_actions, *(of_ratios if weighs else ())]


class Spoiler:
    """A `FragmentGenerator` that spoils one fragment of a session, and asks for its end."""

    def __init__(
        self, honest: FragmentGenerator, way: Way, every: int, poisons: Path, session_over: Callable[[], None]
    ) -> None:
        self._honest, self._way, self._every = honest, way, every
        self._poisons, self._session_over = poisons, session_over
        self._spoiled = False
        self.specification, self.outbox_fragments = honest.specification, honest.outbox_fragments

    def begin(self, actor_id: str, session: Session) -> None:
        self._honest.begin(actor_id, session)

    def follow(self, session: Session) -> None:
        self._honest.follow(session)

    def unroll(self, is_over: Callable[[], bool]) -> None:
        self._honest.unroll(is_over)

    @property
    def collected(self) -> int:
        return self._honest.collected

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        fragment, episodes = self._honest.cut(session, sequence, round_)
        if self._spoiled or sequence < self._every or fragment.header.steps < LEAST_STEPS:
            return fragment, episodes
        arrays: dict[str, Any] = {name: array.copy() for name, array in fragment.arrays().items()}
        self._way.spoil(arrays)
        self._note(session, sequence)
        self._spoiled = True
        self._session_over()
        return build(fragment.header, arrays), episodes

    def close(self) -> None:
        """The honest one acts again in the next session."""

    def _note(self, session: int, sequence: int) -> None:
        line = {
            "session": session,
            "sequence": sequence,
            "way": self._way.name,
            "outcome": self._way.outcome,
        }
        with self._poisons.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Poisoner:
    """Sessions one after the other, each with a way of its own, until the process drains or the run ends."""

    def __init__(self, lifecycle: Lifecycle, options: argparse.Namespace) -> None:
        self._lifecycle, self._options = lifecycle, options
        self._settings = load([from_environment(), *map(parse_assignment, options.assignments)])
        self._name = check_id("actor_id", options.actor_id)
        self._health = Health(lifecycle.role)
        self._honest: FragmentGenerator | None = None
        self._ways: Iterator[Way] = iter(())
        self._worker_life = Lifecycle(lifecycle.role)

    def run(self) -> int:
        """Act; returns the exit code."""
        _, port = serve_http(self._health, self._settings.metrics.host, self._settings.metrics.port)
        announce(self._lifecycle.role, metrics_port=port)
        self._lifecycle.on_drain(self._end_session)
        client = BrokerClient(self._options.broker, credentials(self._settings.security))
        try:
            while self._serve(client) and not self._lifecycle.draining.is_set():
                pass
        finally:
            if self._honest is not None:
                self._honest.close()
            client.close()
        return EXIT_OK

    def _serve(self, client: BrokerClient) -> bool:
        """One session; returns whether it ended because its poison is sent."""
        self._worker_life = life = Lifecycle(self._lifecycle.role)
        if self._lifecycle.draining.is_set():
            return False
        journal = self._settings.actor.ack_journal
        Worker(life, client, self._name, self._health, self._spoiler, ack_journal=journal).run()
        return life.draining.is_set()

    def _spoiler(self, specification: RunSpecification) -> FragmentGenerator:
        if self._honest is None:
            self._honest = self._make(specification)
            ways = ways_against(specification.action_space, weighs=self._options.weighs)
            first = len(read_poisons(self._options.poisons)) % len(ways)
            self._ways = itertools.cycle([*ways[first:], *ways[:first]])
        return Spoiler(
            self._honest, next(self._ways), self._options.every, self._options.poisons, self._end_session
        )

    def _make(self, specification: RunSpecification) -> FragmentGenerator:
        settings: Settings = self._settings
        if self._options.made_up:
            self._health.watch(ENVIRONMENT, settings.actor.stall_timeout_s)
            self._health.suspend(ENVIRONMENT)
            return SyntheticGenerator(specification, Load(), self._lifecycle, settings)
        return make_generator(specification, settings, self._health)

    def _end_session(self) -> None:
        self._worker_life.drain("the session's poison is sent, or the process drains")


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.abuse.poisoner")
    parser.add_argument("--broker", required=True)
    parser.add_argument("--actor-id", required=True)
    parser.add_argument("--poisons", type=Path, required=True)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--made-up", action="store_true")
    parser.add_argument("--weighs", action="store_true")
    parser.add_argument("--endpoints", type=Path)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    said = _parse()
    if said.endpoints is not None:
        os.environ[ENDPOINT_VARIABLE] = str(said.endpoints.absolute())
    leave(run_service(lambda lifecycle: Poisoner(lifecycle, said).run(), "actor"))
