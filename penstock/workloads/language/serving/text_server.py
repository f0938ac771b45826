"""One server of text, put together; needs a running event loop."""

import asyncio
import threading
from collections.abc import Collection
from typing import Final

import grpc
import torch

from penstock.config.settings import ServingSection, Settings
from penstock.protocol.specification import RunSpecification
from penstock.rpc.auth import Calls
from penstock.runtime.compute_threads import ComputeThread
from penstock.runtime.exit import Fatal
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.engine import OWN, EngineTolerance, open_engine
from penstock.workloads.language.loading import device_of, quieten
from penstock.workloads.language.policy import LanguagePolicy
from penstock.workloads.language.serving.chat_api import ChatListener
from penstock.workloads.language.serving.conversations import ColumnExperience, Conversations, Limits
from penstock.workloads.language.serving.text_answerer import (
    AdapterVersions,
    AnswerGuard,
    TextAnswerer,
    Thinker,
    ThinkingForm,
)
from penstock.workloads.language.serving.text_service import CALLS, NAME, TextService
from penstock.workloads.language.settings import told_as
from penstock.workloads.language.tokenizer import Tokenizer
from penstock.workloads.plugin.acting import Run
from penstock.workloads.plugin.fragments import learner_reward
from penstock.workloads.plugin.serving import (
    BackgroundTasks,
    CanaryMonitor,
    Episodes,
    RunFollower,
    Source,
    Weights,
    check_range,
    check_window,
    make_traffic,
    no_weights,
    withdrawing,
)

MAX_ROWS: Final = 32
"""Answers that grow at once."""


class TextServer:
    """The server of a run of a language model: a `HostedService`."""

    names: tuple[str, ...] = (NAME,)
    calls: Calls = CALLS

    def __init__(
        self,
        settings: Settings,
        source: Source,
        of: Run,
        run_follower: RunFollower | None,
        *,
        tokenizer: Tokenizer,
        answer_tokens: int,
        device: str,
        engine_name: str,
        guard: AnswerGuard | None = None,
        form: ThinkingForm | None = None,
        words: Collection[str] | None = None,
    ) -> None:
        """of: the run, as it was read. tokenizer: of its model. answer_tokens: where a request does not say.

        device: where it generates, "auto": CUDA where there is one. engine_name: see `open_engine`. guard:
        what messages and answers pass. form: how the model thinks; None: it answers at once. What is answered
        behind thoughts is not learned from. words: that messages may hold; None: any. Raises
        ConfigurationError for settings that fit neither one another nor the run.
        """
        quieten()
        torch.set_num_threads(of.actor.threads)
        section, self._specification = settings.serving, of.specification
        self._refresh_s = settings.registry.refresh_s
        check_range(settings.canary)
        policy = _policy(of, device)
        with told_as("policy.kwargs.model", ValueError):
            encoder = ChatEncoder(tokenizer, words)
        engine = open_engine(
            engine_name,
            policy,
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            max_rows=MAX_ROWS,
            seed=of.specification.seed,
        )
        self.background_tasks = BackgroundTasks()
        self._traffic = traffic = make_traffic(settings, source, run_follower, of.specification)
        fetch = no_weights if run_follower is None else run_follower.fetch
        self._versions = AdapterVersions(
            engine,
            policy,
            fetch if traffic is None else traffic.fetch,
            section,
            _tolerance(settings, of, engine_name, policy),
        )
        now = asyncio.get_running_loop().time
        withdraw = withdrawing(traffic, self.background_tasks)
        self._canary_monitor = CanaryMonitor(settings.canary, withdraw, now)
        episodes = Episodes(section, of.specification.unroll_length)
        learns_for = run_follower if form is None else None
        thinker = None if form is None else Thinker(engine, form, tokenizer)
        self._conversations = Conversations(
            section,
            _limits(of.specification, policy, answer_tokens, form),
            encoder,
            self._versions,
            TextAnswerer(engine, tokenizer, section, MAX_ROWS, self._canary_monitor.answered, guard, thinker),
            episodes,
            _experience(section, of, learns_for, episodes.server, tokenizer.pad_token_id),
            None if traffic is None else traffic.keep_feedback,
            self._canary_monitor,
            now,
        )
        self._service = TextService(of.specification.run, section, self._conversations, self._versions)
        self._listener = (
            ChatListener(section.http_listen, self._service.chat_api) if section.http_listen else None
        )
        self._over = threading.Event()
        self._thread = ComputeThread(target=engine.run, args=(self._over.is_set,), name="engine", daemon=True)

    def add_to(self, server: "grpc.aio.Server") -> None:
        self._service.add_to(server)

    async def begin(self) -> None:
        self._thread.start()
        if self._listener is not None:
            self.background_tasks.send(self._listener.serve())
        if self._traffic is not None:
            await self._traffic.begin(self._versions, self._canary_monitor)
            self.background_tasks.send(
                self._traffic.follow(self._versions, self._canary_monitor, self._refresh_s)
            )

    async def apply(self, weights: Weights) -> tuple[float, ...]:
        """Answer with these weights as `HostedService` says; raises Fatal for those that do not fit."""
        try:
            return await self._versions.take_probed(weights, self._specification.probe)
        except ValueError as error:
            raise Fatal(f"weights {weights.version} cannot be applied: {error}") from error

    def cut(self) -> None:
        """See `HostedService`: a conversation that goes on is not cut, its rewards are still to come."""

    def sweep(self) -> None:
        self._conversations.sweep()

    async def finish(self) -> None:
        if self._listener is not None:
            await self._listener.finish()
        self._conversations.finish()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._conversations.close()


def _policy(of: Run, device: str) -> LanguagePolicy:
    made = of.make_policy(of.specification.seed).policy
    assert isinstance(made, LanguagePolicy)
    return made.to(device_of(device))


def _experience(
    section: ServingSection, of: Run, run_follower: RunFollower | None, server: str, pad_id: int
) -> ColumnExperience | None:
    """What is learned from, sent to the learner of the run that is followed; None: nothing is."""
    if run_follower is None:
        return None
    check_window(section, of.specification)
    journal = run_follower.open_sample_journal(of.specification.run, server)
    reward = learner_reward(of.environment)
    return ColumnExperience(of.specification, section, run_follower, pad_id, reward, journal)


def _tolerance(
    settings: Settings, of: Run, engine_name: str, policy: LanguagePolicy
) -> EngineTolerance | None:
    """What measures an engine that does not answer the probe by the very pass it is measured against."""
    if engine_name == OWN and policy.device.type == "cpu":
        return None
    return EngineTolerance(engine_name, lambda: _policy(of, "cpu"), settings.learner.probe_tolerance)


def _limits(
    specification: RunSpecification, policy: LanguagePolicy, answer_tokens: int, form: ThinkingForm | None
) -> Limits:
    column = specification.unroll_length + 1
    return Limits(
        most_tokens=max(column, policy.positions or 0),
        column_tokens=column,
        answer_tokens=answer_tokens,
        vocabulary=policy.vocabulary,
        most_lag=specification.stale_after or None,
        thought_tokens=0 if form is None else form.most,
        thought_room=0 if form is None else form.room,
    )
