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
import math
import os
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import torch

from penstock.actor.acting.masks import learner_reward, potentials
from penstock.actor.link.broker_client import BrokerClient, connect
from penstock.actor.serving.batcher import Batcher
from penstock.actor.serving.episodes import Episodes
from penstock.actor.serving.experience import Learning, RunFollower, ServedQueue
from penstock.actor.serving.loaded_versions import LoadedVersions, Weights
from penstock.actor.serving.policy_service import NAME, PolicyService
from penstock.actor.serving.release import CanaryMonitor, Traffic
from penstock.actor.serving.request_handler import RequestHandler
from penstock.actor.serving.shadow import open_shadow_record
from penstock.actor.specification import actor_section, environment_section, policy_maker, probe_answer
from penstock.config.credentials import registry_with_password
from penstock.config.settings import ConfigurationError, ServingSection, Settings
from penstock.config.trusted import check_trusted
from penstock.config.workload import find, load
from penstock.protocol.limits import SERVER_CALLS_S, check_id, to_id
from penstock.protocol.specification import RunSpecification
from penstock.registry.weight_files import read_specification, registry_url
from penstock.rpc.auth import NO_CALLS, Calls
from penstock.rpc.gate import Boundary, Rates
from penstock.runtime import metrics
from penstock.runtime.compute_threads import run_loop
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.health import Health, collect_seldom, serve_http
from penstock.runtime.lifecycle import BackgroundTasks, Lifecycle, share_interpreter
from penstock.runtime.metrics import EVENT_LOOP, watch_loop
from penstock.runtime.server_frame import ServerFrame, setter


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Names what is served: the versions in a run's folder, a live run, or both."""

    run_dir: Path | None
    broker: str | None
    actor_id: str | None = None


class PolicyServer:
    """Answers with single actions: a `HostedService`."""

    def __init__(
        self,
        settings: Settings,
        source: Source,
        specification: RunSpecification,
        run_follower: RunFollower | None,
    ) -> None:
        """Raises ConfigurationError for settings that fit neither one another nor the run."""
        section = settings.serving
        self.names, self.calls, self.background_tasks = (NAME,), NO_CALLS, BackgroundTasks()
        self._specification, self._refresh_s = specification, settings.registry.refresh_s
        self._traffic = traffic = make_traffic(settings, source, run_follower, specification)
        make_policy = policy_maker(specification, settings.actor)
        self._loaded_versions = LoadedVersions(make_policy, traffic.fetch, section)
        self._batcher = Batcher(
            max_rows=section.max_batch_rows,
            max_wait_s=section.max_wait_ms / 1000,
            max_delay_s=section.max_delay_ms / 1000,
        )
        now = asyncio.get_running_loop().time
        self._canary_monitor = CanaryMonitor(settings.canary, self._withdraw, now)
        self._episodes = Episodes(section, specification.unroll_length)
        self._learning = None if run_follower is None else _learning(settings, specification, run_follower)
        spaces = (specification.observation_space, specification.action_space)
        self._record = open_shadow_record(section, source.run_dir)
        self._handler = RequestHandler(
            section,
            (*spaces, make_policy().state_space),
            self._loaded_versions,
            self._batcher,
            self._record,
            self._episodes,
            self._learning,
            traffic.feedback,
            self._canary_monitor,
            now,
        )
        self._service = PolicyService(self._handler, section, (specification.run, *spaces))

    def add_to(self, server: "grpc.aio.Server") -> None:
        self._service.add_to(server)

    async def begin(self) -> None:
        await self._traffic.begin(self._loaded_versions, self._canary_monitor)
        self.background_tasks.send(
            self._traffic.follow(self._loaded_versions, self._canary_monitor, self._refresh_s)
        )

    def _withdraw(self, version: int, reason: str) -> None:
        self.background_tasks.send(self._traffic.withdraw(version, reason))

    async def apply(self, weights: Weights) -> tuple[float, ...]:
        try:
            loaded = await self._loaded_versions.load(weights)
        except ValueError as error:
            raise Fatal(f"weights {weights.version} cannot be applied: {error}") from error
        answer = await asyncio.to_thread(probe_answer, loaded.policy, self._specification.probe)
        self._loaded_versions.follow_with(loaded)
        self._episodes.let_go_of_old()
        return answer

    def cut(self) -> None:
        if self._learning is not None:
            self._learning.flush(self._episodes, asyncio.get_running_loop().time())

    def sweep(self) -> None:
        self._handler.sweep()

    async def finish(self) -> None:
        await self._handler.shadow.finish()
        for episode in self._episodes:
            self._handler.abandon(episode)
        if self._learning is not None:
            self._learning.ripen(math.inf)

    def close(self) -> None:
        self._batcher.close()
        self._handler.shadow.close()
        if self._record is not None:
            self._record.close()


def make_traffic(
    settings: Settings, source: Source, run_follower: RunFollower | None, specification: RunSpecification
) -> Traffic:
    """Return what reads the registry of what is served."""
    url = registry_with_password(settings.registry)
    if source.run_dir is not None:
        url = registry_url(source.run_dir, url)
    live = None if run_follower is None else run_follower.fetch
    return Traffic(url, settings.serving.policy, source.run_dir, live, specification)


def _learning(settings: Settings, specification: RunSpecification, run_follower: RunFollower) -> Learning:
    section = settings.serving
    check_window(section, specification)
    queue = run_follower.queue = ServedQueue(section.outbox_fragments, specification.stale_after)
    compress = actor_section(specification).compress == "lz4"
    environment = environment_section(specification)
    for potential in potentials(environment):
        check_trusted("environment.reward", potential, settings.actor.allow_modules)
    reward = learner_reward(environment)
    return Learning(specification, section, queue, run_follower.send_queued, compress=compress, reward=reward)


def check_window(section: ServingSection, specification: RunSpecification) -> None:
    """Raise ConfigurationError for a window of rewards whose episodes could not be learned from."""
    rate, stale_after, batch = (
        section.declared_steps_per_s,
        specification.stale_after,
        specification.update_steps,
    )
    if rate is None or stale_after == 0 or batch == 0:
        return
    updates = rate * section.reward_window_s / batch
    if updates > stale_after:
        raise ConfigurationError(
            f"serving.reward_window_s={section.reward_window_s:g}: at {rate:g} steps/s "
            f"(serving.declared_steps_per_s) and batches of {batch} that are {updates:.1f} updates, and what "
            f"is older than {stale_after} is stale: shorten the window, or raise algorithm.stale_after"
        )


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
        """Tasks that run beside its calls; an error in one ends the process."""

    def add_to(self, server: "grpc.aio.Server") -> None:
        """Serve its calls from `server`."""

    async def begin(self) -> None:
        """Look for versions; raises ConfigurationError where no version could ever answer."""

    async def apply(self, weights: Weights) -> tuple[float, ...]:
        """Answer `latest` with these; returns the probe's log-probabilities under them. Raises Fatal."""

    def cut(self) -> None:
        """Cut the open episodes, and queue their steps for the learner."""

    def sweep(self) -> None:
        """Give up episodes of silent clients, and send segments whose reward window is over; called often."""

    async def finish(self) -> None:
        """After the last call: queue all steps that are to be learned from."""

    def close(self) -> None: ...


def main(lifecycle: Lifecycle, settings: Settings, *, source: Source, listen: str) -> int:
    """Serve until the lifecycle drains, also when the run has ended; returns the exit code.

    Raises ConfigurationError for an address, folder or settings that cannot be used, else Fatal.
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
    workload = find(specification.workload)
    make = load(workload.server) if workload.server else PolicyServer
    hosted: HostedService = make(settings, source, specification, run_follower)
    frame = ServerFrame(
        ROLE,
        hosted.names,
        settings,
        listen,
        boundary=Boundary(on_malformed=metrics.REFUSALS.labels("malformed").inc),
        rates=Rates(
            calls=settings.serving.max_calls_per_s,
            bytes=settings.broker.max_bytes_per_s,
            settings="serving.max_calls_per_s, broker.max_bytes_per_s",
        ),
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
        await _first_of(stop.wait(), hosted.background_tasks.first_error())
        health.set_ready(False, "draining")
        await _drain(frame, hosted, run_follower, lifecycle)
    finally:
        for task in hosted.background_tasks.tasks:
            task.cancel()
        await frame.close()
        hosted.close()
    return EXIT_OK


async def _sweep(hosted: HostedService) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        hosted.sweep()


async def _first_of(*ends: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(end) for end in ends]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    for task in done:
        task.result()


async def _drain(
    frame: ServerFrame, hosted: HostedService, run_follower: RunFollower | None, lifecycle: Lifecycle
) -> None:
    await frame.drain(SERVER_CALLS_S)
    await hosted.finish()
    if run_follower is not None:
        lifecycle.drain("the server is done")
        run_follower.finish()
        await asyncio.to_thread(run_follower.join)
