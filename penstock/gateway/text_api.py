"""The gateway in front of servers of text: a request goes to the server of the agent that its model names.

An agent serves the models NAME, NAME:latest, NAME:40, …; those of the first begin with its policy's name.
Requests and answers pass as they are: the server reads the body.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

from penstock.client import AsyncTextClient, PolicyError, Unreachable
from penstock.client.text_calls import (
    EVENTS,
    ChatError,
    HttpReply,
    HttpRequest,
    event,
    json_reply,
    once,
    unanswered,
    unknown_model,
)
from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.route_access import Listener
from penstock.gateway.text_listener import text_listener
from penstock.gateway.upstream import RunBehind, ServedText, Upstream
from penstock.rpc.auth import Credentials

FIRST: Final = ""
"""Name of the agent whose models begin with the name of its policy."""
DESCRIBE_S: Final = 5.0
"""Seconds in which a server answers what it serves. A stopped process accepts calls and answers none."""
_MODELS: Final = "/v1/models"


def option_of(agent: str) -> str:
    return f"--agent {agent}=…" if agent else "--server"


class Agents:
    """Forwards requests to servers of text. Used by one event loop.

    servers: at least one, by the agent's name. describe_s: seconds in which a server answers what it serves.
    """

    def __init__(self, servers: Mapping[str, ServedText], describe_s: float = DESCRIBE_S) -> None:
        self._servers, self._describe_s = servers, describe_s
        self._first_policy = ""

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Return the answer of the agent's server; raises ChatError where no server gives one."""
        if request.path == _MODELS:
            return await self._models(request)
        if request.path.startswith(f"{_MODELS}/"):
            return await self._describe(self._agent_of(request.path.removeprefix(f"{_MODELS}/")), request)
        return await self._forward(self._chosen(request), request)

    def _chosen(self, request: HttpRequest) -> str:
        """Return the agent of a body, of which only `model` is read; any server refuses a malformed body."""
        try:
            body = json.loads(request.body)
        except (ValueError, RecursionError):
            body = None
        model = body.get("model") if isinstance(body, dict) else ""
        if model is None and request.path == "/v1/rewards" and FIRST not in self._servers:
            if len(self._servers) > 1:
                raise ChatError(400, f"model: say which, of {', '.join(self._servers)}", param="model")
            return next(iter(self._servers))
        return self._agent_of(model) if isinstance(model, str) and body else next(iter(self._servers))

    def _agent_of(self, model: str) -> str:
        """Return the agent of a model's name; raises ChatError 404 for the name of no agent."""
        agent = model.partition(":")[0]
        if agent in self._servers and agent != FIRST:
            return agent
        if FIRST in self._servers:
            return FIRST
        known, *others = self._servers
        raise unknown_model(known, others)

    async def _forward(self, agent: str, request: HttpRequest) -> HttpReply:
        client = await self._client(agent)
        try:
            reply = await client.http(self._named(agent, request))
            if reply.status == 404 and agent != FIRST and FIRST in self._servers and not self._first_policy:
                # The error lists all models: ask the first server for the name of its policy, then again.
                with contextlib.suppress(ChatError, PolicyError, TimeoutError):
                    async with asyncio.timeout(self._describe_s):
                        self._first_policy = (await (await self._client(FIRST)).describe()).policy
                await reply.parts.aclose()
                reply = await client.http(self._named(agent, request))
        except PolicyError as error:
            raise _failed(error, agent) from error
        return replace(reply, parts=_parts(reply, agent))

    def _named(self, agent: str, request: HttpRequest) -> HttpRequest:
        """Return the request with the names of this agent and of the others, for errors of its server."""
        first = [self._first_policy] if self._first_policy and agent != FIRST else []
        others = [*first, *(name for name in self._servers if name not in (agent, FIRST))]
        named = HttpRequest(agent=agent, others=others)
        named.MergeFrom(request)
        return named

    async def _client(self, agent: str) -> AsyncTextClient:
        found = await self._servers[agent].client()
        if found is None:
            raise _unready(agent, "has no server yet, or none any more", "not_ready")
        return found

    async def _describe(self, agent: str, request: HttpRequest) -> HttpReply:
        """Return the whole answer to a request for models, within `describe_s`."""
        try:
            async with asyncio.timeout(self._describe_s):
                reply = await self._forward(agent, request)
                return replace(reply, parts=once(await reply.whole()))
        except TimeoutError as error:
            why = f"has not said in {self._describe_s:g} s what it serves"
            raise _unready(agent, why, "unreachable") from error

    async def _models(self, request: HttpRequest) -> HttpReply:
        """Return the models of all servers that answer; raises ChatError where none does."""
        found = await asyncio.gather(*(self._models_of(one, request) for one in self._servers))
        errors = [one for one in found if isinstance(one, ChatError)]
        if len(errors) == len(found):
            raise errors[0]
        return json_reply(
            {"object": "list", "data": [one for rows in found if isinstance(rows, list) for one in rows]}
        )

    async def _models_of(self, agent: str, request: HttpRequest) -> list[dict[str, Any]] | ChatError:
        try:
            reply = await self._describe(agent, request)
        except ChatError as error:
            return error
        rows: list[dict[str, Any]] = json.loads(await reply.whole())["data"]
        return [] if agent == FIRST and rows[0]["id"] in self._servers else rows  # an agent has its name


async def _parts(reply: HttpReply, agent: str) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(reply.parts) as parts:
            async for part in parts:
                yield part
    except PolicyError as error:
        failed = _failed(error, agent)
        if reply.headers.get("content-type") != EVENTS:
            raise failed from error
        yield event(failed.body).encode()


def _failed(error: PolicyError, agent: str) -> ChatError:
    remedy = f"; start it, or start the gateway with another {option_of(agent)}"
    return unanswered(error, remedy if isinstance(error, Unreachable) else "")


def _unready(agent: str, why: str, code: str) -> ChatError:
    text = f"model: {agent or 'the first'} {why}: look after the run of {option_of(agent)}"
    return ChatError(503, text, param="model", code=code, kind="server_error", retry_s=1)


@contextmanager
def text_of(
    runs: Mapping[str, AbstractContextManager[RunBehind]], own: Credentials
) -> Iterator[tuple[Listener, dict[str, Any]]]:
    """Yield the listener of `penstock gateway text`, without accounts, and no work in the background.

    runs: at least one with a server of text, by the agent's name. own: the gateway's credentials. Raises
    ConfigurationError for an address that cannot be reached with these credentials.
    """
    with ExitStack() as stack:
        served = {}
        for name, context in runs.items():
            run = stack.enter_context(context)
            try:
                if address := run.addresses().server:
                    own.for_channel(address)
            except ValueError as error:
                raise ConfigurationError(f"{option_of(name)}: {error}") from error
            served[name] = ServedText(Upstream(addresses=run.addresses, credentials=own))
        yield text_listener(Agents(served).answer), {}
