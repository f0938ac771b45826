"""A server of text: TextService on gRPC, and the server that puts its parts together."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, Final

import grpc
import torch

from penstock.config.settings import ServingSection, Settings
from penstock.protocol.limits import KIB
from penstock.protocol.refusal import Refused, invalid
from penstock.protocol.specification import RunSpecification
from penstock.registry.routing import Arm, labels
from penstock.rpc.auth import CLIENT, Calls
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ComputeThread
from penstock.runtime.exit import Fatal
from penstock.v1 import policy_pb2
from penstock.v1 import text_pb2 as pb
from penstock.v1.text_pb2_grpc import add_TextServiceServicer_to_server
from penstock.workloads.language.cached_generation import device_of
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.engine import OWN, EngineTolerance, open_engine
from penstock.workloads.language.policy import LanguagePolicy
from penstock.workloads.language.prompt import Message, ToolCall
from penstock.workloads.language.serving.chat_api import ChatApi, ChatListener
from penstock.workloads.language.serving.conversations import ColumnExperience, Conversations, Limits
from penstock.workloads.language.serving.text_answerer import (
    AdapterVersions,
    AnswerGuard,
    TextAnswerer,
    ThinkingForm,
)
from penstock.workloads.language.serving.text_request import (
    TextAnswer,
    TextReply,
    TextRequest,
    Thought,
    check_counts,
    checked_tool,
)
from penstock.workloads.language.settings import as_configuration_error, quieten
from penstock.workloads.language.tokenizer import Tokenizer, end_ids
from penstock.workloads.plugin.acting import Run
from penstock.workloads.plugin.fragments import learner_reward
from penstock.workloads.plugin.serving import (
    ARMS,
    BackgroundTasks,
    CanaryMonitor,
    Episodes,
    LoadedVersions,
    RequestErrors,
    RunFollower,
    Source,
    Weights,
    check_count,
    check_window,
    make_traffic,
    served_versions,
)

NAME: Final = "penstock.v1.TextService"
CALLS: Final[Calls] = {
    f"/{NAME}/{one.name}": CLIENT for one in pb.DESCRIPTOR.services_by_name["TextService"].methods
}
"""Which party may call what."""
_CHUNK_BYTES: Final = 256 * KIB

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""
_ARM_OF: Final[dict[int, Arm]] = {number: arm for arm, number in ARMS.items()}
_PLAIN: Final = (
    *("request_id", "conversation_id", "client_key", "version", "max_tokens", "not_learned", "regenerate"),
    *("begins_with", "presence_penalty", "frequency_penalty", "show_thought"),
)
"""Fields of `GenerateRequest` that `TextRequest` has by the same name."""
_OPTIONAL: Final[tuple[Any, ...]] = ("temperature", "top_p", "seed", "thought_tokens")
"""Fields with a default in `TextRequest` where the message has none."""
_ENDINGS: Final = (policy_pb2.ENDING_TERMINATED, policy_pb2.ENDING_TRUNCATED, policy_pb2.ENDING_ABANDONED)


class TextService:
    """The calls of text.proto. Used by one event loop."""

    def __init__(
        self, run: str, section: ServingSection, conversations: Conversations, versions: LoadedVersions
    ) -> None:
        self._run, self._section = run, section
        self._conversations, self._versions = conversations, versions
        self._request_errors = RequestErrors()
        self.chat_api = ChatApi(run, section.policy, conversations, versions, self._request_errors)
        self._loop = asyncio.get_running_loop()

    def add_to(self, server: "grpc.aio.Server") -> None:
        refusing = self._request_errors.refusing
        methods: Any = SimpleNamespace(
            Generate=self.generate,
            GenerateStream=self.generate_stream,
            StartConversation=refusing("start_conversation", pb.StartConversationReply, self._start),
            Reward=refusing("reward", pb.TurnRewardsReply, self._reward),
            EndConversation=refusing("end_conversation", pb.EndConversationReply, self._end),
            Describe=refusing("describe", pb.DescribeTextReply, self.describe),
            Http=self.http,
        )
        add_TextServiceServicer_to_server(methods, server)

    async def generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateReply:
        metrics.POLICY_CALLS.labels("generate").inc()
        try:
            self._check(request.policy)
            reply = await self._conversations.generate(self._text_request(request), self._until_s(context))
        except Refused as error:
            return pb.GenerateReply(
                refusal=self._request_errors.refused(request, error), request_id=request.request_id
            )
        return _to_proto(request, reply)

    async def generate_stream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateChunk]:
        """See text.proto. The answers end when the caller goes away."""
        metrics.POLICY_CALLS.labels("generate_stream").inc()
        try:
            self._check(request.policy)
            parts = self._conversations.stream(self._text_request(request), self._until_s(context))
            async with aclosing(parts):
                async for part in parts:
                    if isinstance(part, TextReply):
                        yield pb.GenerateChunk(reply=_to_proto(request, part))
                    else:
                        yield pb.GenerateChunk(index=part[0], text=part[1])
        except Refused as error:
            refusal = self._request_errors.refused(request, error)
            yield pb.GenerateChunk(reply=pb.GenerateReply(refusal=refusal, request_id=request.request_id))

    async def http(self, request: pb.HttpRequest, context: Context) -> AsyncIterator[pb.HttpChunk]:
        reply = await self.chat_api.answer(request, self._until_s(context))
        yield pb.HttpChunk(status=reply.status, headers=reply.headers)
        async with aclosing(reply.parts):
            async for part in reply.parts:
                for begin in range(0, len(part), _CHUNK_BYTES):
                    yield pb.HttpChunk(body=part[begin : begin + _CHUNK_BYTES])

    def _start(self, request: pb.StartConversationRequest) -> pb.StartConversationReply:
        self._check(request.policy)
        episode = self._conversations.start(
            request.client_key,
            request.request_id,
            not_learned=request.not_learned,
            arm=_arm(request.arm),
            must_exist=request.must_exist,
            opinions=request.opinions,
        )
        return pb.StartConversationReply(
            conversation_id=episode.id, arm=ARMS[episode.arm], learned=episode.learned
        )

    async def _reward(self, request: pb.TurnRewardsRequest) -> pb.TurnRewardsReply:
        check_count(len(request.rewards))
        rewards = [(one.turn if one.HasField("turn") else None, one.amount) for one in request.rewards]
        late = await self._conversations.reward(
            request.conversation_id,
            request.request_id,
            rewards,
            asked=request.asked,
            choice=request.choice if request.HasField("choice") else None,
        )
        return pb.TurnRewardsReply(late=late)

    def _end(self, request: pb.EndConversationRequest) -> pb.EndConversationReply:
        if request.ending not in _ENDINGS:
            raise invalid(f"ending={request.ending}: say TERMINATED, TRUNCATED or ABANDONED")
        total, turns = self._conversations.end(
            request.conversation_id,
            request.request_id,
            terminated=request.ending == policy_pb2.ENDING_TERMINATED,
            abandoned=request.ending == policy_pb2.ENDING_ABANDONED,
            reward=request.reward if request.HasField("reward") else None,
        )
        return pb.EndConversationReply(total_return=total, turns=turns)

    def describe(self, request: pb.DescribeTextRequest) -> pb.DescribeTextReply:
        """Return what is served; raises Refused for another policy."""
        self._check(request.policy)
        section, limits = self._section, self._conversations.limits
        return pb.DescribeTextReply(
            run=self._run,
            policy=section.policy,
            versions=served_versions(self._versions.served()),
            max_tokens=limits.most_tokens,
            answer_tokens=limits.answer_tokens,
            max_conversations=section.max_episodes,
            reward_window_ms=round(section.reward_window_s * 1000),
            conversation_timeout_ms=round(section.episode_timeout_s * 1000),
            server=self._conversations.episodes.server,
            learns=self._conversations.learns,
            labels={} if self._versions.arms is None else labels(self._versions.arms),
            thought_tokens=limits.thought_tokens,
        )

    def _text_request(self, request: pb.GenerateRequest) -> TextRequest:
        """Return a request as data; raises Refused for too many parts, bad tools and an unknown arm."""
        check_counts(  # each message and each tool call takes at least one token
            self._conversations.limits.most_tokens,
            messages=len(request.messages),
            calls=sum(len(message.tool_calls) for message in request.messages),
            tools=len(request.tools),
            characters=sum(map(len, request.tools)),
            stops=len(request.stop),
            biased=len(request.logit_bias),
        )
        given = {name: getattr(request, name) for name in _PLAIN}
        given |= {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
        return TextRequest(
            messages=tuple(map(_message, request.messages)),
            tools=tuple(_tool(index, text) for index, text in enumerate(request.tools)),
            arm=_arm(request.arm),
            stop=tuple(request.stop),
            count=request.count or 1,
            logit_bias=dict(request.logit_bias),
            **given,
        )

    def _check(self, policy: str) -> None:
        if policy not in ("", self._section.policy):
            raise invalid(f"policy={policy[:80]!r}: this server has {self._section.policy!r}")

    def _until_s(self, context: Context) -> float:
        left_s = context.time_remaining()
        return math.inf if left_s is None else self._loop.time() + left_s


def _message(message: pb.TextMessage) -> Message:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return Message(message.role, message.content, calls, message.tool_call_id)


def _tool(index: int, text: str) -> dict[str, Any]:
    try:
        tool = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"tools[{index}]: is no JSON: {error}") from error
    return checked_tool(index, tool)


def _arm(number: int) -> Arm | None:
    if number == policy_pb2.ARM_UNSPECIFIED:
        return None
    if number not in _ARM_OF:
        raise invalid(f"arm={number}: use one of {sorted(_ARM_OF)}")
    return _ARM_OF[number]


def _to_proto(request: pb.GenerateRequest, reply: TextReply) -> pb.GenerateReply:
    return pb.GenerateReply(
        request_id=request.request_id,
        answers=[_answer(one.visible()) for one in reply.answers],
        version=reply.version,
        arm=ARMS[reply.arm],
        fallback=policy_pb2.FALLBACK_ADAPTER_OFF if reply.is_fallback else policy_pb2.FALLBACK_UNSPECIFIED,
        conversation_id=reply.conversation_id,
        turn=reply.turn,
        learned=not reply.unlearned,
        unlearned=reply.unlearned,
        prompt_tokens=reply.prompt_tokens,
        cut=reply.cut,
    )


def _answer(answer: TextAnswer) -> pb.TextAnswer:
    message = answer.message
    calls = [pb.ToolCall(id=one.id, name=one.name, arguments=one.arguments) for one in message.tool_calls]
    return pb.TextAnswer(
        message=pb.TextMessage(role=message.role, content=message.content, tool_calls=calls),
        finish=pb.Finish.Value(f"FINISH_{answer.finish.upper()}"),
        thought=None if answer.thought is None else _thought(answer.thought),
        token_ids=answer.ids,
        log_prob=answer.log_prob,
        tokens=answer.tokens,
    )


def _thought(thought: Thought) -> pb.Thought:
    return pb.Thought(
        tokens=thought.tokens,
        milliseconds=thought.milliseconds,
        is_cut=thought.is_cut,
        text=thought.text or "",
        token_ids=thought.ids,
    )


# ---- One server of text, put together; needs a running event loop.

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
        """of: the run. tokenizer: of its model. answer_tokens: of an answer whose request names no limit.

        device: as torch names it; "auto": CUDA where there is one. engine_name: see `open_engine`. guard:
        checks messages and answers; None: nothing is checked. form: how the model thinks; None: it answers at
        once. Answers behind thoughts are not learned from. words: the words that messages may hold; None: any
        text. Raises ConfigurationError for settings that do not fit one another or the run.
        """
        quieten()
        torch.set_num_threads(of.actor.threads)
        section, self._of, self._refresh_s = settings.serving, of, settings.registry.refresh_s
        now = asyncio.get_running_loop().time
        # Before the model is loaded: it checks its settings.
        self._canary_monitor = CanaryMonitor(settings.canary, self._withdraw, now)
        policy = _policy(of, device)
        with as_configuration_error("policy.kwargs.model", ValueError):
            encoder = ChatEncoder(tokenizer, words)
        ends, pad, seed = end_ids(tokenizer), tokenizer.pad_token_id, of.specification.seed
        engine = open_engine(engine_name, policy, end_ids=ends, pad_id=pad, max_rows=MAX_ROWS, seed=seed)
        self.background_tasks = BackgroundTasks()
        self._traffic = traffic = make_traffic(settings, source, run_follower, of.specification)
        tolerance = _tolerance(settings, of, engine_name, policy)
        self._versions = AdapterVersions(engine, policy, traffic.fetch, section, tolerance)
        episodes = Episodes(section, of.specification.unroll_length)
        self._conversations = Conversations(
            section,
            _limits(of.specification, policy, answer_tokens, form),
            encoder,
            self._versions,
            TextAnswerer(engine, tokenizer, section, MAX_ROWS, self._canary_monitor.answered, guard, form),
            episodes,
            _experience(section, of, run_follower if form is None else None, episodes.server, pad),
            traffic.feedback,
            self._canary_monitor,
            now,
        )
        self._service = TextService(of.specification.run, section, self._conversations, self._versions)
        listen = section.http_listen
        self._listener = ChatListener(listen, self._service.chat_api) if listen else None
        self._over = threading.Event()
        self._thread = ComputeThread(target=engine.run, args=(self._over.is_set,), name="engine", daemon=True)

    def add_to(self, server: "grpc.aio.Server") -> None:
        self._service.add_to(server)

    async def begin(self) -> None:
        self._thread.start()
        if self._listener is not None:
            self.background_tasks.send(self._listener.serve())
        await self._traffic.begin(self._versions, self._canary_monitor)
        self.background_tasks.send(
            self._traffic.follow(self._versions, self._canary_monitor, self._refresh_s)
        )

    def _withdraw(self, version: int, reason: str) -> None:
        self.background_tasks.send(self._traffic.withdraw(version, reason))

    async def apply(self, weights: Weights) -> tuple[float, ...]:
        """See `HostedService`; raises Fatal for weights that do not fit the run's policy."""
        try:
            return await self._versions.take_probed(weights, self._of.specification.probe)
        except ValueError as error:
            raise Fatal(f"weights {weights.version} cannot be applied: {error}") from error

    def cut(self) -> None:
        """See `HostedService`: an open conversation is not cut, because its rewards may still come."""

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
    """Return what sends columns to the run's learner; None without a run to follow."""
    if run_follower is None:
        return None
    check_window(section, of.specification)
    journal = run_follower.open_sample_journal(of.specification.run, server)
    reward = learner_reward(of.environment)
    return ColumnExperience(of.specification, section, run_follower, pad_id, reward, journal)


def _tolerance(
    settings: Settings, of: Run, engine_name: str, policy: LanguagePolicy
) -> EngineTolerance | None:
    """Return what measures an engine; None for one whose answers to the probe are the plain pass itself."""
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
