"""Process body of an actor: one rollout worker or evaluation actor, its link to the broker and its health."""

import os
import socket
import sys
from functools import partial
from typing import Final

from actor.evaluation.evaluator import Evaluator
from actor.link.broker_client import Link
from actor.rollout.loop import Crew
from actor.rollout.worker import Worker
from penstock.config.credentials import credentials
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, load
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle
from penstock.wire.ids import check_id, to_id
from penstock.wire.messages import Role
from penstock.wire.specification import RunSpecification

SWITCH_INTERVAL_S: Final = 0.0005
"""The sender must not wait the default 5 ms for the interpreter while environments step."""


def main(lifecycle: Lifecycle, *, broker: str, actor_id: str | None, role: Role, settings: Settings) -> int:
    """Act until the run stops or the lifecycle drains; returns the exit code.

    `actor_id`: constant over restarts of the same actor; None: made from host and process.
    Raises ConfigurationError for what this process was told wrongly, Fatal when it cannot go on.
    """
    health = Health(lifecycle.role)
    _, port = serve_http(health, settings.metrics.host, settings.metrics.port)
    announce(lifecycle.role, metrics_port=port)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    link = connect(broker, settings)
    try:
        name = check_id("actor_id", actor_id or to_id(f"{socket.gethostname()}-{os.getpid()}"))
        if role is Role.EVALUATION:
            return Evaluator(lifecycle, link, name, health, settings).run()
        crew_of = partial(make_crew, settings=settings, health=health)
        journal = settings.actor.ack_journal
        return Worker(lifecycle, link, name, health, crew_of, ack_journal=journal).run()
    except (Fatal, ConfigurationError) as error:
        health.fail(str(error))
        raise
    finally:
        link.close()


def make_crew(specification: RunSpecification, settings: Settings, health: Health) -> Crew:
    """What the run's workload acts with."""
    crew: Crew = load(find(specification.workload).crew)(specification, settings, health)
    return crew


def connect(broker: str, settings: Settings) -> Link:
    """The link to a broker; raises ConfigurationError for an address or files that cannot be used."""
    try:
        return Link(broker, credentials(settings.security))
    except ValueError as error:
        raise ConfigurationError(f"--broker: {error}") from error
