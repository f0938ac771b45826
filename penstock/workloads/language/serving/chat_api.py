"""OpenAI's API over the conversations of a server of text: chat completions, models and rewards.

Requests come by the call `Http` of text.proto, or by the listener of `serving.http_listen`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from penstock.client.calls import checked_text
from penstock.client.text_calls import (
    DEADLINE_S,
    EVENTS,
    JSON,
    ChatError,
    HttpReply,
    HttpRequest,
    event,
    json_reply,
    unknown_model,
)
from penstock.config.configuration_error import ConfigurationError
from penstock.protocol.refusal import Reason, Refused
from penstock.registry.routing import Arm, labels
from penstock.rpc.address import is_local
from penstock.runtime import metrics
from penstock.runtime.retry import full_jitter
from penstock.workloads.language.serving.chat_forms import (
    ChatRequest,
    Envelope,
    RewardRequest,
    model_of,
    models,
    refusal_error,
    validation_error,
    value_error,
)
from penstock.workloads.language.serving.conversations import Conversations
from penstock.workloads.language.serving.text_request import TextReply, TextRequest
from penstock.workloads.plugin.serving import Episode, LoadedVersions, RequestErrors

log = logging.getLogger(__name__)

_FINAL: Final = "final"
"""Id of the request that ends a conversation, and of the reward in it."""
_FAILED: Final = "failed"
_MODELS: Final = "/v1/models"
_LONGEST_WAIT_S: Final = 1.0
"""Seconds between two attempts at an answer when the server had no room."""

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


class ChatApi:
    """Answers requests to the API. Used by one event loop. policy: its name."""

    def __init__(
        self,
        run: str,
        policy: str,
        conversations: Conversations,
        versions: LoadedVersions,
        request_errors: RequestErrors,
    ) -> None:
        self._run, self._policy = run, policy
        self._conversations, self._versions = conversations, versions
        self._request_errors = request_errors
        self._routes: dict[str, tuple[str, Callable[[HttpRequest, float], Awaitable[HttpReply]]]] = {
            "/v1/chat/completions": ("POST", self._complete),
            "/v1/rewards": ("POST", self._reward),
            _MODELS: ("GET", self._models),
        }

    async def answer(self, request: HttpRequest, until_s: float) -> HttpReply:
        """Return the answer, which may be an error. until_s: by the clock of the event loop."""
        path = _MODELS if request.path.startswith(f"{_MODELS}/") else request.path
        method, answer = self._routes.get(path, ("", self._models))
        if request.headers.get("content-type", JSON).partition(";")[0].strip().lower() != JSON:
            return ChatError(415, "content-type: send application/json", code="unsupported_type").reply()
        if not method:
            return ChatError(404, "Not Found", code="not_found").reply()
        if request.method != method:
            return ChatError(405, "Method Not Allowed", code="method_not_allowed").reply()
        try:
            return await answer(request, until_s)
        except ChatError as error:
            return error.reply()

    # ---- Chat completions.

    async def _complete(self, request: HttpRequest, until_s: float) -> HttpReply:
        body = _read(ChatRequest, request)
        name = ""
        try:
            wanted = body.text_request(request.request_id, self._conversations.limits.most_tokens)
            arm, version = model_of(body.model, *self._names(request))
            user = checked_text("client_key", body.user or "")
            name = "" if version else body.conversation(request.headers.get("x-conversation-id"))
            if name:
                metrics.POLICY_CALLS.labels("start_conversation").inc()
                episode = await self._patiently(partial(self._start, user, name, arm), until_s)
                wanted = replace(wanted, conversation_id=episode.id)
            else:
                wanted = replace(wanted, client_key=user, arm=arm, version=version)
            envelope = Envelope(body.model, request.request_id[:24])
            if body.stream:
                metrics.POLICY_CALLS.labels("generate_stream").inc()
                events = self._events(wanted, body, envelope, until_s)
                # A refusal before the first part is an error of the call, not of the stream.
                first = await anext(events)
                return HttpReply(200, {"content-type": EVENTS}, self._behind(first, events))
            metrics.POLICY_CALLS.labels("generate").inc()
            generate = self._conversations.generate
            given = await self._patiently(lambda: generate(wanted, until_s), until_s)
        except Refused as error:
            raise self._refused(request, error, name) from error
        except ValueError as error:
            raise value_error(error) from error
        return json_reply(envelope.completion(given, logprobs=bool(body.logprobs)))

    async def _start(self, user: str, name: str, arm: Arm | None) -> Episode:
        return self._conversations.start(user, name, arm=arm)

    async def _patiently(self, attempt: Callable[[], Awaitable[T]], until_s: float) -> T:
        """Return the result of an attempt; repeat it while the server has no room and the caller has time."""
        loop, waits = asyncio.get_running_loop(), full_jitter(cap_s=_LONGEST_WAIT_S)
        while True:
            try:
                return await attempt()
            except Refused as error:
                wait_s = error.refusal.retry_after_ms / 1000 + next(waits)
                if error.refusal.reason is not Reason.OVERLOADED or loop.time() + wait_s >= until_s:
                    raise
            await asyncio.sleep(wait_s)

    async def _events(
        self, wanted: TextRequest, body: ChatRequest, envelope: Envelope, until_s: float
    ) -> AsyncGenerator[str, None]:
        begun = set[int]()
        async with aclosing(self._conversations.stream(wanted, until_s)) as parts:
            async for part in parts:
                if isinstance(part, TextReply):
                    for index in sorted({*range(len(part.answers))} - begun):
                        yield envelope.part(index, {"role": "assistant", "content": ""})
                    with_usage = body.stream_options is not None and body.stream_options.include_usage
                    for last in envelope.last_parts(
                        part, logprobs=bool(body.logprobs), with_usage=with_usage
                    ):
                        yield last
                    return
                index, text = part
                if index not in begun:
                    begun.add(index)
                    yield envelope.part(index, {"role": "assistant", "content": ""})
                yield envelope.part(index, {"content": text})

    async def _behind(self, first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            yield first.encode()
            try:
                async for one in events:
                    yield one.encode()
            except Refused as error:
                yield event(refusal_error(error).body).encode()

    # ---- Models and rewards.

    async def _models(self, request: HttpRequest, _until_s: float) -> HttpReply:
        metrics.POLICY_CALLS.labels("describe").inc()
        policy, named, others = self._names(request)
        served = {version: arms for version, (_, arms) in self._versions.served().items()}
        found = models(self._run, policy, served, named)
        wanted = request.path.removeprefix(_MODELS).removeprefix("/")
        if not wanted:
            return json_reply({"object": "list", "data": found})
        for one in found:
            if one["id"] == wanted:
                return json_reply(one)
        raise unknown_model(policy, others)

    async def _reward(self, request: HttpRequest, _until_s: float) -> HttpReply:
        body = _read(RewardRequest, request)
        if body.failed and body.reward is not None:
            raise ChatError(
                400, "failed: a failed conversation takes no reward: leave it out", param="failed"
            )
        if body.reward is None and not body.final and not body.failed:
            remedy = "give one, or say that the conversation is over (final) or has failed (failed)"
            raise ChatError(400, f"reward: {remedy}", param="reward")
        if body.model is not None:
            model_of(body.model, *self._names(request))
        try:
            result = await self._rewarded(body, request.request_id)
        except Refused as error:
            raise self._refused(request, error, body.conversation_id, is_reward=True) from error
        except ValueError as error:
            raise value_error(error) from error
        return json_reply(result)

    async def _rewarded(self, body: RewardRequest, request_id: str) -> dict[str, Any]:
        metrics.POLICY_CALLS.labels("start_conversation").inc()
        user, once = checked_text("client_key", body.user), checked_text("request_id", body.id)
        episode = self._conversations.start(user, body.conversation_id, must_exist=True)
        late = 0
        if body.reward is not None:
            metrics.POLICY_CALLS.labels("reward").inc()
            once = once or (_FINAL if body.final else request_id)
            rewards = [(body.turn, body.reward)]
            late = await self._conversations.reward(episode.id, once, rewards, choice=body.choice)
        result: dict[str, Any] = {
            "object": "reward",
            "conversation_id": body.conversation_id,
            "late": bool(late),
        }
        if body.final or body.failed:
            metrics.POLICY_CALLS.labels("end_conversation").inc()
            how: dict[str, Any] = {"terminated": True, "abandoned": False, "reward": None}
            once = _FAILED if body.failed else _FINAL
            total, turns = self._conversations.end(episode.id, once, **how, failed=bool(body.failed))
            result |= {"total_return": total, "turns": turns}
        if body.failed:
            log.info("a conversation failed", extra={"why": body.failed})
        return result

    def _names(self, request: HttpRequest) -> tuple[str, dict[str, int], Sequence[str]]:
        """Return the policy's name for this caller, its labels, and the names of other agents."""
        arms = self._versions.arms
        return request.agent or self._policy, {} if arms is None else labels(arms), request.others

    def _refused(
        self, request: HttpRequest, error: Refused, conversation: str, *, is_reward: bool = False
    ) -> ChatError:
        self._request_errors.refused(request, error)
        return refusal_error(error, conversation=conversation, is_reward=is_reward)


class ChatListener:
    """Serves the API over HTTP on this machine, without accounts, in the event loop of the server.

    Raises ConfigurationError for an address of another machine, and where packages of HTTP are not installed;
    AddressInUse.
    """

    def __init__(self, listen: str, api: ChatApi) -> None:
        if not is_local(listen):
            raise ConfigurationError(
                f"serving.http_listen={listen}: without accounts it answers this machine alone: say "
                "127.0.0.1:PORT"
            )
        try:
            from penstock.gateway.frame.route_access import make_app  # noqa: PLC0415 - an extra
            from penstock.gateway.http_server import HttpServer  # noqa: PLC0415
            from penstock.gateway.text_listener import text_listener  # noqa: PLC0415
        except ImportError as error:
            raise ConfigurationError(
                f"serving.http_listen={listen}: there is no {error.name} here: install penstock-rl[gateway]"
            ) from error
        loop = asyncio.get_running_loop()
        self._http = HttpServer(
            make_app(text_listener(lambda request: api.answer(request, loop.time() + DEADLINE_S))),
            listen,
            option="serving.http_listen=",
        )
        self.url = self._http.url
        self._over = asyncio.Event()

    async def serve(self) -> None:
        log.info("serving", extra={"url": self.url})
        try:
            await self._http.serve_in_loop()
        finally:
            self._over.set()

    async def finish(self) -> None:
        self._http.end()
        await self._over.wait()


def _read(kind: type[B], request: HttpRequest) -> B:
    try:
        given = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise ChatError(400, "the body is not JSON", code="invalid_json") from error
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise validation_error(error, given) from error
