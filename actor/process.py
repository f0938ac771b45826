"""Process body of an actor: one rollout worker or evaluation actor, its link to the broker and its health."""

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from penstock.actor.evaluator import Evaluator
from penstock.actor.link.broker_client import connect
from penstock.actor.rollout.loop import BEING_MADE, ENVIRONMENT, FragmentGenerator, Worker
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, load
from penstock.protocol.limits import MAX_WATCH_WAIT_MS, WATCH_GRACE_S, check_id, to_id
from penstock.protocol.messages import Role
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle, share_interpreter

BROKER: Final = "broker"
"""Name under which health watches that the broker answers."""


def main(lifecycle: Lifecycle, *, broker: str, actor_id: str | None, role: Role, settings: Settings) -> int:
    """Act until the run stops or the lifecycle drains; returns the exit code.

    `actor_id`: constant over restarts of the same actor; None: made from host and process.
    Raises ConfigurationError for wrong options or settings, Fatal when it cannot go on.
    """
    health = Health(lifecycle.role)
    _, port = serve_http(health, settings.metrics.host, settings.metrics.port)
    announce(lifecycle.role, metrics_port=port)
    share_interpreter()
    on_answer = watch_broker(health, settings.actor.stall_timeout_s)
    broker_client = connect(broker, settings, on_answer)
    try:
        name = check_id("actor_id", actor_id or to_id(f"{socket.gethostname()}-{os.getpid()}"))
        if role is Role.EVALUATION:
            return Evaluator(lifecycle, broker_client, name, health, settings).run()
        generator_of = partial(make_generator, settings=settings, health=health)
        journal = settings.actor.ack_journal
        return Worker(lifecycle, broker_client, name, health, generator_of, ack_journal=journal).run()
    except (Fatal, ConfigurationError) as error:
        health.fail(str(error))
        raise
    finally:
        broker_client.close()


def make_generator(specification: RunSpecification, settings: Settings, health: Health) -> FragmentGenerator:
    """Return the generator of the run's workload.

    Health expects it within this process's `actor.stall_timeout_s`.
    """
    health.watch(ENVIRONMENT, settings.actor.stall_timeout_s)
    health.expect(ENVIRONMENT, BEING_MADE)
    generator: FragmentGenerator = load(find(specification.workload).generator)(
        specification, settings, health
    )
    health.suspend(ENVIRONMENT)
    return generator


def watch_broker(health: Health, stall_timeout_s: float) -> Callable[[], None]:
    """Have health watch that the broker answers; returns the function to call after each answer.

    A call that waits for news is answered when its wait is over, so that much is added to the limit.
    """
    health.watch(BROKER, stall_timeout_s + MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S)
    health.expect(BROKER, "it answers no call; is it there, and does its Redis answer?")
    return partial(health.progress, BROKER)
