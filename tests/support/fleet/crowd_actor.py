"""Rollout workers without environment and policy, to load a broker with many of them: no torch, no Gymnasium.

    python -m tests.support.fleet.crowd_actor --broker ADDRESS --actor-id NAME [--count K] [--rate F]
        [--hangs F]

Only the generator of fragments is made up: sessions, credit, outbox, retries, drain, metrics and health are
those of a shipped rollout worker, one channel per actor. Its fragments fit the schema of the run that the
broker serves: every step is valid with reward 1, an episode ends now and then, and session and number stand
in the payload, so that no two fragments are the same. It reports weights as applied and does not answer the
probe.
"""

import argparse
import json
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client import Counter

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session
from penstock.actor.rollout.generator import Ends, Episodes
from penstock.actor.rollout.loop import ENVIRONMENT, Worker
from penstock.config.credentials import credentials
from penstock.config.settings import (
    ActorSection,
    EnvironmentSection,
    Settings,
    from_environment,
    load,
    parse_assignment,
)
from penstock.protocol.fragment import Fragment, FragmentHeader, WeightSpan, build
from penstock.protocol.limits import check_id
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.schema import Axes
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import DTYPES
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle, leave, run_service

EPISODE_FRAGMENTS: Final = 8
LOG_PROB: Final = -0.7
_LOOK_S: Final = 0.2
"""Seconds after which a waiting actor at the latest notices that the run stopped."""
_MARKED: Final = "observation"
_MARK_SCALE: Final = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The amount that one actor sends.

    rate: fragments per second; none: as fast as there is credit. slots: columns of a fragment; none: the
    run's environment count. hangs: chance that a fragment never ends, until the process drains.
    """

    rate: float | None = None
    slots: int | None = None
    hangs: float = 0.0


class SyntheticGenerator:
    """Fragments out of nothing (see `penstock.actor.rollout.loop.FragmentGenerator`)."""

    def __init__(
        self, specification: RunSpecification, amount: Load, lifecycle: Lifecycle, settings: Settings
    ) -> None:
        self.specification = specification
        told = ActorSection.model_validate_json(specification.actor_json)
        own = settings.actor
        self.outbox_fragments = (own if "outbox_fragments" in own.model_fields_set else told).outbox_fragments
        environment = EnvironmentSection.model_validate_json(specification.environment_json)
        self._slots = amount.slots or environment.count
        self._amount, self._lifecycle = amount, lifecycle
        self._running, self._ending = (_Template(specification, self._slots, ends=e) for e in (False, True))
        self._episodes = Episodes(self._slots)
        self._publication = Publication()
        self._due_s = 0.0

    def begin(self, actor_id: str, session: Session) -> None:
        self._episodes = Episodes(self._slots)
        if self._publication.version:
            session.report_applied(self._publication, ())

    def follow(self, session: Session) -> None:
        weights = session.weights
        if weights is not None and weights.publication.version > self._publication.version:
            self._publication = weights.publication
            session.report_applied(self._publication, ())

    def unroll(self, is_over: Callable[[], bool]) -> None:
        """Wait until the next fragment is due; one that comes late is not made up for by haste."""
        if random.random() < self._amount.hangs:
            failpoint("unroll.hanging")
            self._lifecycle.draining.wait()
        if self._amount.rate is None:
            return
        period_s = 1 / self._amount.rate
        if not self._due_s:
            # Actors that are let go together must not send together.
            self._due_s = time.monotonic() + random.random() * period_s
        while (missing_s := self._due_s - time.monotonic()) > 0 and not is_over():
            self._lifecycle.draining.wait(min(missing_s, _LOOK_S))
        self._due_s = max(self._due_s + period_s, time.monotonic())

    @property
    def collected(self) -> int:
        """Nothing: a fragment is there at once."""
        return 0

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        template = self._running if sequence % EPISODE_FRAGMENTS else self._ending
        news = self._publication
        header = replace(
            template.header,
            session=session,
            sequence=sequence,
            slots=self._episodes.slots(),
            weights=(template.header.weights[0]._replace(version=news.version, update=news.update),),
            created_us=time.time_ns() // 1000,
            round=round_,
        )
        episodes = self._episodes.advance(*template.outcome, news.version)
        return Fragment(header, template.marked(session, sequence)), episodes

    def close(self) -> None:
        """There is nothing to let go of."""


class _Template:
    """A fragment of which only header and mark change.

    `ends`: every slot's episode ends with the last row.
    """

    def __init__(self, specification: RunSpecification, slots: int, *, ends: bool) -> None:
        schema, steps = specification.schema, specification.unroll_length
        count = slots if ends else 0
        leading = {
            Axes.STEP: (steps, slots),
            Axes.STEP_PLUS_ONE: (steps + 1, slots),
            Axes.SLOT: (slots,),
            Axes.END: (count,),
        }
        noise = np.random.default_rng(0)
        arrays: dict[str, Any] = {
            rule.name: noise.integers(0, 2, (*leading[rule.axes], *rule.shape)).astype(DTYPES[rule.dtype])
            for rule in schema.tensors
        }
        arrays["reward"][:], arrays["log_prob"][:], arrays["valid"][:] = 1.0, LOG_PROB, True
        arrays["terminated"][:] = arrays["truncated"][:] = False
        arrays["terminated"][-1] = ends
        arrays["final/slot"] = np.arange(count, dtype=np.int32)
        arrays["final/step"] = np.full(count, steps - 1, np.int32)
        header = FragmentHeader(
            run=specification.run,
            session=0,
            sequence=0,
            schema_id=schema.schema_id,
            steps=steps,
            slots=(),
            weights=(WeightSpan(0, 0, steps, 0, 0),),
            tensors=(),
        )
        fragment = build(header, arrays)
        self.header = fragment.header
        self.outcome = (
            arrays["reward"],
            arrays["valid"],
            arrays["terminated"],
            Ends(arrays["final/slot"], arrays["final/step"]),
        )
        marked = next(entry for entry in self.header.tensors if entry.name.partition("/")[0] == _MARKED)
        self._dtype = DTYPES[marked.dtype]
        payload = memoryview(fragment.payload)
        self._before = payload[: marked.offset]
        self._after = payload[marked.offset + 2 * self._dtype.itemsize :]

    def marked(self, session: int, sequence: int) -> bytes:
        """Return the payload, with session and sequence as the first two numbers of an observation."""
        numbers = np.array([session, sequence]) % _MARK_SCALE
        is_real = self._dtype.kind == "f"
        mark = (numbers / _MARK_SCALE if is_real else numbers % 2).astype(self._dtype)
        return b"".join((self._before, mark.tobytes(), self._after))


class SimulatedActor:
    """One actor in a thread of this process."""

    def __init__(
        self, broker: str, actor_id: str, amount: Load, settings: Settings, health: Health | None = None
    ) -> None:
        """Raise ValueError for a malformed address or name."""
        self.ended: Callable[[SimulatedActor], None] = lambda _: None
        self.lifecycle = Lifecycle("actor")
        self.error: BaseException | None = None
        self._broker_client = BrokerClient(broker, credentials(settings.security))
        health = health or Health("actor")
        health.watch(ENVIRONMENT, settings.actor.stall_timeout_s)
        health.suspend(ENVIRONMENT)
        generator_of = lambda run: SyntheticGenerator(run, amount, self.lifecycle, settings)  # noqa: E731 - one use
        name, journal = check_id("actor_id", actor_id), settings.actor.ack_journal
        self._worker = Worker(
            self.lifecycle, self._broker_client, name, health, generator_of, ack_journal=journal
        )
        self._thread = threading.Thread(target=self._run, name=actor_id, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, reason: str) -> None:
        self.lifecycle.drain(reason)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; False when the time was up first. Raises the error that ended it early."""
        self._thread.join(timeout_s)
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._worker.run()
        except BaseException as error:  # noqa: BLE001 - handed to who joins
            self.error = error
        finally:
            self._broker_client.close()
            self.ended(self)


def main(lifecycle: Lifecycle, options: argparse.Namespace) -> int:
    """Act with `--count` actors until all have ended or the process drains; returns the exit code."""
    settings = load([from_environment(), *map(parse_assignment, options.assignments)])
    amount = Load(rate=options.rate, slots=options.slots, hangs=options.hangs)
    health = Health(lifecycle.role)
    _, port = serve_http(health, settings.metrics.host, settings.metrics.port)
    announce(lifecycle.role, metrics_port=port)
    names = [options.actor_id]
    if options.count > 1:
        names = [f"{options.actor_id}-{index:04d}" for index in range(options.count)]
    actors = [SimulatedActor(options.broker, name, amount, settings, health) for name in names]
    ended: queue.Queue[SimulatedActor] = queue.Queue()
    for actor in actors:
        actor.ended = ended.put
        lifecycle.on_drain(partial(_drain, actor, lifecycle))
        actor.start()
    try:
        for _ in actors:
            ended.get().join()
    except Exception as error:
        health.fail(str(error))
        raise
    if options.report is not None:
        options.report.write_text(json.dumps(report()) + "\n")
    return EXIT_OK


def report() -> dict[str, Any]:
    """Return what the actors of this process did: fragments built and acknowledged, and acks by latency.

    ack_seconds: [upper bound in seconds, fragments up to it], cumulative; the last bound is infinite.
    """
    return {
        "built": _value(metrics.FRAGMENTS_BUILT),
        "acked": _value(metrics.FRAGMENTS_ACKED),
        "resent": _value(metrics.FRAGMENTS_RESENT),
        "ack_seconds": [
            (float(sample.labels["le"]), int(sample.value))
            for family in metrics.ACK_LATENCY_SECONDS.collect()
            for sample in family.samples
            if sample.name.endswith("_bucket")
        ],
    }


def _drain(actor: SimulatedActor, lifecycle: Lifecycle) -> None:
    actor.drain(lifecycle.reason)


def _value(counter: Counter) -> int:
    return int(sum(s.value for f in counter.collect() for s in f.samples if s.name.endswith("_total")))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fleet.crowd_actor", description=__doc__)
    parser.add_argument("--broker", required=True, metavar="ADDRESS", help="HOST:PORT or unix:/path")
    parser.add_argument("--actor-id", required=True, metavar="NAME", help="name; several get a number behind")
    parser.add_argument("--count", type=int, default=1, help="actors in this process")
    parser.add_argument("--rate", type=float, help="fragments per second of each; default: as fast as it may")
    parser.add_argument("--slots", type=int, help="columns of a fragment; default: the run's")
    parser.add_argument("--hangs", type=float, default=0.0, help="chance that a fragment never ends")
    parser.add_argument("--report", type=Path, help="write counts and latencies as JSON at the end")
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    said = _parse()
    leave(run_service(lambda lifecycle: main(lifecycle, said), "actor"))
