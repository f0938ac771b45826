"""The parts of one policy server, put together; needs a running event loop."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.actor.acting.masks import learner_reward, potentials
from penstock.actor.serving.answering import open_shadow_record
from penstock.actor.serving.batcher import Batcher
from penstock.actor.serving.episode_requests import EpisodeRequests
from penstock.actor.serving.episodes import Episodes
from penstock.actor.serving.experience.recorder import Learning, ServedQueue
from penstock.actor.serving.experience.run_follower import RunFollower
from penstock.actor.serving.loaded_versions import LoadedVersions, Weights
from penstock.actor.serving.policy_service import NAME, PolicyService
from penstock.actor.serving.release.canary_monitor import CanaryMonitor
from penstock.actor.serving.release.traffic import Traffic
from penstock.actor.serving.request_handler import RequestHandler
from penstock.actor.specification.policy_maker import policy_maker, probe_answer
from penstock.actor.specification.run import actor_section, environment_section
from penstock.config.credentials import registry_with_password
from penstock.config.settings import CanarySection, ConfigurationError, ServingSection, Settings
from penstock.config.trusted import check_trusted
from penstock.protocol.specification import RunSpecification
from penstock.registry.weight_files import registry_url
from penstock.rpc.auth import NO_CALLS
from penstock.runtime.exit import Fatal
from penstock.runtime.lifecycle import BackgroundTasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Names what is served: the versions in a run's folder, a run that goes on, or both."""

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
        check_range(settings.canary)
        self._traffic = traffic = make_traffic(settings, source, run_follower, specification)
        fetch = no_weights if run_follower is None else run_follower.fetch
        make_policy = policy_maker(specification, settings.actor)
        self._loaded_versions = LoadedVersions(
            make_policy, fetch if traffic is None else traffic.fetch, section
        )
        self._batcher = Batcher(
            max_rows=section.max_batch_rows,
            max_wait_s=section.max_wait_ms / 1000,
            max_delay_s=section.max_delay_ms / 1000,
        )
        now = asyncio.get_running_loop().time
        self._canary_monitor = CanaryMonitor(
            settings.canary, withdrawing(traffic, self.background_tasks), now
        )
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
            self._canary_monitor.answered,
            now,
        )
        self._episode_requests = EpisodeRequests(
            self._handler.reader,
            self._loaded_versions,
            self._episodes,
            self._learning,
            None if traffic is None else traffic.keep_feedback,
            self._canary_monitor,
            now,
        )
        self._service = PolicyService(
            self._handler,
            self._episode_requests,
            self._episodes,
            section,
            (specification.run, *spaces),
            learns=self._learning is not None,
        )

    def add_to(self, server: "grpc.aio.Server") -> None:
        """See `HostedService`."""
        self._service.add_to(server)

    async def begin(self) -> None:
        """See `HostedService`."""
        if self._traffic is not None:
            await self._traffic.begin(self._loaded_versions, self._canary_monitor)
            self.background_tasks.send(
                self._traffic.follow(self._loaded_versions, self._canary_monitor, self._refresh_s)
            )

    async def apply(self, weights: Weights) -> tuple[float, ...]:
        """See `HostedService`."""
        try:
            loaded = await self._loaded_versions.load(weights)
        except ValueError as error:
            raise Fatal(f"weights {weights.version} cannot be applied: {error}") from error
        answer = await asyncio.to_thread(probe_answer, loaded.policy, self._specification.probe)
        self._loaded_versions.follow_with(loaded)
        self._episodes.let_go_of_old()
        return answer

    def cut(self) -> None:
        """See `HostedService`."""
        if self._learning is not None:
            self._learning.flush(self._episodes, asyncio.get_running_loop().time())

    def sweep(self) -> None:
        """See `HostedService`."""
        self._episode_requests.sweep()

    async def finish(self) -> None:
        """See `HostedService`."""
        await self._handler.shadow.finish()
        for episode in self._episodes:
            self._episode_requests.abandon(episode)
        if self._learning is not None:
            self._learning.send_all()

    def close(self) -> None:
        """See `HostedService`."""
        self._batcher.close()
        self._handler.shadow.close()
        if self._record is not None:
            self._record.close()


def make_traffic(
    settings: Settings, source: Source, run_follower: RunFollower | None, specification: RunSpecification
) -> Traffic | None:
    """Return what reads the registry of what is served; None without one."""
    url = registry_with_password(settings.registry)
    if source.run_dir is not None:
        url = registry_url(source.run_dir, url)
    elif not url:
        return None
    return Traffic(
        url,
        settings.serving.policy,
        source.run_dir,
        None if run_follower is None else run_follower.fetch,
        specification,
    )


def no_weights(_version: int) -> Weights | None:
    """Return None: there is nothing that holds any."""
    return None


def withdrawing(traffic: Traffic | None, background_tasks: BackgroundTasks) -> Callable[[int, str], None]:
    """Return what rolls a version back, beside the calls, and says why."""

    def withdraw(version: int, reason: str) -> None:
        if traffic is not None:
            background_tasks.send(traffic.withdraw(version, reason))

    return withdraw


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


def check_range(section: CanarySection) -> None:
    """Raise ConfigurationError for a range of returns that holds none."""
    known = section.return_range
    if known is not None and not known[0] < known[1]:
        raise ConfigurationError(f"canary.return_range={list(known)}: the first must be below the second")


def check_window(section: ServingSection, specification: RunSpecification) -> None:
    """Raise ConfigurationError for a window of rewards in which the learner gets too far ahead.

    Nothing of an episode could then be learned from.
    """
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
