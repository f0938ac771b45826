"""Process body of a policy server.

where from                  latest                               learns
--run FOLDER                newest version kept in the folder    no
--broker ADDRESS            the learner's newest weights         yes
both                        the learner's newest weights         yes; other arms from registry and folder

health is served ─► wait for the run ─► first look at versions ─► serving ─► draining ─► end
Draining: the server is not serving any more, finishes its calls and flushes.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import grpc
import torch

from penstock.actor.link.broker_client import BrokerClient, connect
from penstock.actor.serving.assembly import PolicyServer, Source
from penstock.actor.serving.experience.run_follower import RunFollower
from penstock.actor.serving.loaded_versions import Weights
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, load
from penstock.protocol.limits import SERVER_CALLS_S, check_id, to_id
from penstock.protocol.specification import RunSpecification
from penstock.registry.weight_files import read_specification
from penstock.rpc.auth import Calls
from penstock.rpc.boundary import Boundary
from penstock.rpc.gate import Rates
from penstock.runtime import metrics
from penstock.runtime.compute_threads import run_loop
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.health import Health, collect_seldom, serve_http
from penstock.runtime.lifecycle import BackgroundTasks, Lifecycle, share_interpreter
from penstock.runtime.metrics import EVENT_LOOP, watch_loop
from penstock.runtime.server_frame import ServerFrame, setter

log = logging.getLogger(__name__)

ROLE: Final = "server"
STREAMS_PER_CONNECTION: Final = 1024
"""A client that speaks for many environments has one connection for all of them."""
_SWEEP_S: Final = 0.05


class HostedService(Protocol):
    """One event loop uses it; `begin` comes first, then calls, `apply`, `cut` and `sweep`, then the end."""

    @property
    def names(self) -> Sequence[str]:
        """Full names of its gRPC services."""

    @property
    def calls(self) -> Calls:
        """Parties that may call them, where the core does not say."""

    @property
    def background_tasks(self) -> BackgroundTasks:
        """Tasks that run beside its calls; an error in one of them ends the process."""

    def add_to(self, server: "grpc.aio.Server") -> None:
        """Serve its calls from `server`."""

    async def begin(self) -> None:
        """Look for versions; raises ConfigurationError where nothing could ever be answered with."""

    async def apply(self, weights: Weights) -> tuple[float, ...]:
        """Answer `latest` with these; returns what the run's probe says under them. Raises Fatal."""

    def cut(self) -> None:
        """Put what is open on its way to the learner."""

    def sweep(self) -> None:
        """Give up what is not heard of any more, and send what has ripened; called all the time."""

    async def finish(self) -> None:
        """No call comes any more: put all that will be learned from into the queue."""

    def close(self) -> None:
        """Let go of threads and files."""


def main(lifecycle: Lifecycle, settings: Settings, *, source: Source, listen: str) -> int:
    """Serve until the lifecycle drains, also when the run has ended; returns the exit code.

    Raises ConfigurationError for an address, a folder or settings that cannot be used, Fatal when it cannot
    go on.
    """
    share_interpreter()
    torch.set_num_threads(settings.actor.threads)
    health = Health(ROLE)
    _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
    broker_client = None if source.broker is None else connect(source.broker, settings)
    try:
        specification = _of_folder(source)
        run_follower = (
            None
            if broker_client is None
            else _run_follower(lifecycle, broker_client, source, settings, specification)
        )
        if specification is None and run_follower is not None:
            specification = run_follower.begin()
        if specification is None:
            return EXIT_OK
        return run_loop(
            _serve(lifecycle, settings, source, specification, run_follower, health, metrics_port, listen)
        )
    except (Fatal, ConfigurationError) as error:
        health.fail(str(error))
        raise
    finally:
        if broker_client is not None:
            broker_client.close()


def _run_follower(
    lifecycle: Lifecycle,
    broker_client: BrokerClient,
    source: Source,
    settings: Settings,
    specification: RunSpecification | None,
) -> RunFollower:
    name = check_id("actor_id", source.actor_id or to_id(f"{socket.gethostname()}-{os.getpid()}"))
    run = "" if specification is None else specification.run
    return RunFollower(lifecycle, broker_client, name, run=run, ack_journal=settings.actor.ack_journal)


def _of_folder(source: Source) -> RunSpecification | None:
    """The run's, from its folder; None where only the broker can tell."""
    if source.run_dir is None:
        if source.broker is None:
            raise ConfigurationError("nothing to serve: name --run FOLDER, --broker ADDRESS, or both")
        return None
    try:
        return read_specification(source.run_dir)
    except ValueError as error:
        if source.broker is not None:
            return None  # a run that has just begun
        raise ConfigurationError(f"--run {source.run_dir}: {error}") from error


async def _serve(
    lifecycle: Lifecycle,
    settings: Settings,
    source: Source,
    specification: RunSpecification,
    run_follower: RunFollower | None,
    health: Health,
    metrics_port: int,
    listen: str,
) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    lifecycle.on_drain(setter(stop))
    hosted = _hosted(settings, source, specification, run_follower)
    frame = ServerFrame(
        ROLE,
        hosted.names,
        settings,
        listen,
        boundary=Boundary(on_malformed=metrics.REFUSALS.labels("malformed").inc),
        rates=_rates(settings),
        streams_per_connection=STREAMS_PER_CONNECTION,
        calls=hosted.calls,
    )
    hosted.add_to(frame.server)
    try:
        address = frame.bind()
        await hosted.begin()
        if run_follower is not None:
            run_follower.start(loop, hosted.apply, setter(stop), hosted.cut)
        hosted.background_tasks.send(_sweep(hosted))
        hosted.background_tasks.send(watch_loop(partial(health.progress, EVENT_LOOP)))
        health.watch(EVENT_LOOP, settings.broker.stall_timeout_s)
        await frame.begin(metrics_port=metrics_port)
        health.set_ready(True)
        # The steps of open episodes are many small objects that live for seconds and hold no cycles.
        collect_seldom()
        log.info("serving", extra={"address": address, "run_name": specification.run})
        await _until(stop, hosted)
        health.set_ready(False, "draining")
        await _drain(frame, hosted, run_follower, lifecycle)
    finally:
        for task in hosted.background_tasks.tasks:
            task.cancel()
        await frame.close()
        hosted.close()
    return EXIT_OK


def _rates(settings: Settings) -> Rates:
    return Rates(
        calls=settings.serving.max_calls_per_s,
        bytes=settings.broker.max_bytes_per_s,
        settings="serving.max_calls_per_s, broker.max_bytes_per_s",
    )


async def _sweep(hosted: HostedService) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        hosted.sweep()


def _hosted(
    settings: Settings, source: Source, specification: RunSpecification, run_follower: RunFollower | None
) -> HostedService:
    """What the run's workload has clients answered with; the core's own where it names nothing."""
    workload = find(specification.workload)
    if not workload.server:
        return PolicyServer(settings, source, specification, run_follower)
    made: HostedService = load(workload.server)(settings, source, specification, run_follower)
    return made


async def _until(stop: asyncio.Event, hosted: HostedService) -> None:
    """Until `stop`; raises what an errand raises."""
    stopped, failed = (
        asyncio.ensure_future(stop.wait()),
        asyncio.ensure_future(hosted.background_tasks.first_error()),
    )
    done, rest = await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    for task in done:
        task.result()


async def _drain(
    frame: ServerFrame, hosted: HostedService, run_follower: RunFollower | None, lifecycle: Lifecycle
) -> None:
    """Say so, finish what is in flight, hand over what was learned."""
    await frame.drain(SERVER_CALLS_S)
    await hosted.finish()
    if run_follower is not None:
        lifecycle.drain("the server is done")
        run_follower.finish()
        await asyncio.to_thread(run_follower.join)
