"""Ways to poison a fragment, each with what must become of it, and an actor whose sessions end with one each.

broker     refused before it is stored
check      booked `invalid` before it meets a tensor
replaced   a terminal observation of no space: trained, with another observation in its place
update     left out of the update that it makes fail
bounded    it looks like honest experience: trained, and the update stays finite

    python -m tests.support.abuse.poisoner --broker ADDRESS --actor-id NAME --poisons FILE [--every K]
        [--made-up] [--set section.key=value ...]

All but the spoiled tensors is what a shipped rollout worker does: sessions, credit, outbox, journal, drain,
and the run's own environments and policy, or with --made-up those of `tests.support.fleet.crowd_actor`. A
session that was found out is closed and counted, so it is left after its spoiled fragment, the K-th, and the
next way comes in a session under a name of its own. A line with the way is written before the fragment may be
sent.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

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
from tests.support.fleet.crowd_actor import Load, SyntheticGenerator

Arrays = dict[str, Any]
Outcome = Literal["broker", "check", "replaced", "update", "bounded"]


@dataclass(frozen=True)
class Way:
    """One way. spoil: changes copies of a fragment's tensors. outcome: what must become of it."""

    name: str
    spoil: Callable[[Arrays], None]
    outcome: Outcome


def put(name: str, value: Any) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        arrays[name][1, 0] = value

    return spoil


def fill(name: str, value: Any) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        arrays[name][...] = value

    return spoil


def unseen(name: str, value: Any) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        arrays["valid"][1, 0] = arrays["terminated"][1, 0] = arrays["truncated"][1, 0] = False
        keep = (arrays["final/slot"] != 0) | (arrays["final/step"] != 1)
        for rows in (path for path in arrays if path.startswith("final/")):
            arrays[rows] = arrays[rows][keep]
        arrays[name][1, 0] = value

    return spoil


def end(arrays: Arrays, how: str, observation: Any) -> None:
    """Let only the last step of the first slot end an episode, with this observation."""
    arrays["terminated"][...] = arrays["truncated"][...] = False
    arrays[how][-1, 0] = True
    arrays["final/slot"] = np.zeros(1, np.int32)
    arrays["final/step"] = np.full(1, len(arrays["valid"]) - 1, np.int32)
    row = arrays["observation"][-1:, 0].copy()
    row[...] = observation
    arrays["final/observation"] = row


def ends(how: str, observation: Any) -> Callable[[Arrays], None]:
    return lambda arrays: end(arrays, how, observation)


def _twice(arrays: Arrays) -> None:
    end(arrays, "truncated", 0)
    for name in ("final/slot", "final/step", "final/observation"):
        arrays[name] = np.concatenate([arrays[name]] * 2)


def _pointing(name: str, value: int) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        end(arrays, "truncated", 0)
        arrays[name][0] = value

    return spoil


def _unended(arrays: Arrays) -> None:
    end(arrays, "truncated", 0)
    arrays["truncated"][...] = False


def _without_final(arrays: Arrays) -> None:
    end(arrays, "truncated", 0)
    for name in ("final/slot", "final/step", "final/observation"):
        arrays[name] = arrays[name][:0]


def _reversed(arrays: Arrays) -> None:
    arrays["reward"][...] = -arrays["reward"]


def _forbidden(arrays: Arrays) -> None:
    arrays["mask/action"][1, 0] = True
    arrays["mask/action"][1, 0, arrays["action"][1, 0]] = False


def _shuffled(arrays: Arrays) -> None:
    arrays["observation"][...] = arrays["observation"][::-1].copy()


OF_EVERY_RUN = (
    Way("reward is NaN", put("reward", np.nan), "broker"),
    Way("reward is infinite", put("reward", np.inf), "broker"),
    Way("reward of a simulation that blew up", put("reward", 1e20), "broker"),
    Way("largest negative reward", put("reward", -3e38), "broker"),
    Way("log-probability is NaN", put("log_prob", np.nan), "broker"),
    Way("log-probability is minus infinity", put("log_prob", -np.inf), "broker"),
    Way("log-probability of -1e30", put("log_prob", -1e30), "broker"),
    Way("log-probability of 1e5", put("log_prob", 1e5), "broker"),
    Way("final row of a slot that is not there", _pointing("final/slot", 7), "check"),
    Way("final row of a negative step", _pointing("final/step", -1), "check"),
    Way("final row of a step that did not end", _pointing("final/step", 0), "check"),
    Way("final row of an episode that goes on", _unended, "check"),
    Way("final row twice", _twice, "check"),
    Way("no final row of a truncated step", _without_final, "check"),
    Way("largest plausible reward", put("reward", 1e6), "bounded"),
    Way("rewards with the wrong sign", _reversed, "bounded"),
    Way("observations of other steps", _shuffled, "bounded"),
    Way("all rewards are 0", fill("reward", 0.0), "bounded"),
)
OF_BOXES = (
    Way("observation is NaN", put("observation", np.nan), "check"),
    Way("observation is infinite", put("observation", -np.inf), "check"),
    Way("observation of 1e30", put("observation", 1e30), "check"),
    Way("largest observation", fill("observation", 3e38), "check"),
    Way("observation is NaN where not valid", unseen("observation", np.nan), "check"),
    Way("truncated with NaN", ends("truncated", np.nan), "check"),
    Way("truncated with 1e20", ends("truncated", 1e20), "check"),
    Way("terminated with NaN", ends("terminated", np.nan), "replaced"),
    Way("terminated with infinity", ends("terminated", np.inf), "replaced"),
    Way("observations at the edge of what is plausible", fill("observation", 900.0), "bounded"),
)
OF_CHOICES = (
    Way("action behind the last", put("action", 2), "check"),
    Way("negative action", put("action", -1), "check"),
    Way("largest action", fill("action", 2**62), "check"),
    Way("action behind the last where not valid", unseen("action", 5), "check"),
    Way("log-probability of a choice above 0", put("log_prob", 1.0), "check"),
    Way("log-probability of a choice of 90", put("log_prob", 90.0), "check"),
    Way("always the first action", fill("action", 0), "bounded"),
)
OF_DRAWS = (
    Way("action is NaN", put("action", np.nan), "check"),
    Way("action is infinite", put("action", np.inf), "check"),
    Way("action of 1e30", put("action", 1e30), "check"),
    Way("action is NaN where not valid", unseen("action", np.nan), "check"),
    Way("unlikely action", put("action", 5.0), "bounded"),
    Way("density of 2.7", put("log_prob", 1.0), "bounded"),
)
OF_RATIOS = (
    Way("log-probability of -200", put("log_prob", -200.0), "update"),
    Way("all log-probabilities of -5000", fill("log_prob", -5e3), "update"),
    Way("log-probability of -20", put("log_prob", -20.0), "bounded"),
)
"""Of algorithms that weigh by π/μ."""
OF_DENSITIES = (Way("log-probability of 90", put("log_prob", 90.0), "update"),)
"""Of such ones, where the action is a real number."""
OF_MASKS = (
    Way("mask that allows nothing", put("mask/action", False), "check"),
    Way("mask that allows nothing behind the last step", lambda a: a["mask/action"][-1].fill(False), "check"),
    Way("mask that forbids the action taken", _forbidden, "check"),
    Way("masks that allow nothing at all", fill("mask/action", False), "check"),
)
OF_STATE = (
    Way("state is NaN", fill("state/actor/h", np.nan), "check"),
    Way("state is infinite", fill("state/actor/h", np.inf), "check"),
    Way("state of 1e20", fill("state/actor/h", 1e20), "check"),
    Way("state of another episode", lambda a: a["state/actor/h"].__imul__(-1), "bounded"),
    Way("episodes begin nowhere", fill("begins", False), "bounded"),
)


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
        line = {"session": session, "sequence": sequence, "way": self._way.name, "outcome": self._way.outcome}
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
        self._sessions = itertools.count(1)
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
        name = f"{self._name}-{next(self._sessions)}"
        Worker(life, client, name, self._health, self._spoiler, ack_journal=journal).run()
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
