"""Whom a model name means: one of several servers of text, each with its versions.

    NAME, NAME:latest, NAME:40     an agent's, by the name that the gateway was told
    POLICY, POLICY:latest, …       those of the first, by the name of its policy

A server that is away is away for its own names alone.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.client import Arm, AsyncTextClient, PolicyError, TextDescription
from penstock.gateway.sites.site import ServedText
from penstock.gateway.text.chat_answers import ChatError, models, of_server
from penstock.gateway.text.chat_requests import is_plain, model_of, unknown_model

FIRST: Final = ""
DESCRIBE_S: Final = 5.0
"""Seconds in which a server says what it serves, or is away: a halted one takes calls and answers none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a model name means. arm: None: as the client's key decides. version: 0: as the arm has it."""

    agent: str
    client: AsyncTextClient
    arm: Arm | None
    version: int


def option_of(agent: str) -> str:
    """Return the option by which the gateway is told where an agent is."""
    return f"--agent {agent}=…" if agent else "--server"


class Agents:
    """Used by one event loop.

    servers: at least one, by name; FIRST: that which is known by its policy's. describe_s: in which a server
    says what it serves, or is away.
    """

    def __init__(self, servers: Mapping[str, ServedText], describe_s: float = DESCRIBE_S) -> None:
        self._servers, self._describe_s = servers, describe_s
        self._policies = {name: name for name in servers if name != FIRST}

    async def choose(self, model: str) -> Chosen:
        """Return what a model name means; raises ChatError: 404 for an unknown one, 503 without its server.

        What the first serves is asked for anew where it may say another name.
        """
        agent = self.agent_of(model)
        client = await self.client(agent)
        policy, labels = self._policies.get(agent), dict[str, int]()
        if policy is None or model.partition(":")[0] != policy or not is_plain(model):
            described = await self.describe(agent)
            policy, labels = agent or described.policy, dict(described.labels)
            self._policies[agent] = policy
        try:
            arm, version = model_of(model, policy, labels)
        except ChatError:
            raise await self._unknown(agent, policy) from None
        return Chosen(agent=agent, client=client, arm=arm, version=version)

    def agent_of(self, model: str) -> str:
        """Return whose a model name is, FIRST where it is no agent's; raises ChatError 404 without one."""
        agent = model.partition(":")[0]
        if agent in self._servers and agent != FIRST:
            return agent
        if FIRST in self._servers:
            return FIRST
        known, *others = self._servers
        raise unknown_model(known, others)

    def only(self) -> str:
        """Return whom a call is about that names no model; raises ChatError 400 where that is not clear."""
        if FIRST in self._servers:
            return FIRST
        if len(self._servers) == 1:
            return next(iter(self._servers))
        raise ChatError(400, f"model: say which, of {', '.join(self._servers)}", param="model")

    async def client(self, agent: str) -> AsyncTextClient:
        """Return the client of an agent; raises ChatError 503 where it has no server yet."""
        found = await self._servers[agent].client()
        if found is None:
            raise ChatError(
                503,
                f"model: {agent or 'the first'} has no server yet, or none any more: look after the run of "
                f"{option_of(agent)}",
                param="model",
                code="not_ready",
                kind="server_error",
                retry_s=1,
            )
        return found

    async def describe(self, agent: str) -> TextDescription:
        """Return what an agent serves now; raises ChatError: 503 for one that does not say so in time."""
        client = await self.client(agent)
        try:
            async with asyncio.timeout(self._describe_s):
                return await client.describe()
        except PolicyError as error:
            raise of_server(error, option=option_of(agent)) from error
        except TimeoutError as error:
            raise ChatError(
                503,
                f"model: the server of {agent or 'the first'} has not said in {self._describe_s:g} s what "
                f"it serves: look after that of {option_of(agent)}",
                param="model",
                code="unreachable",
                kind="server_error",
                retry_s=1,
            ) from error

    async def models(self) -> dict[str, Any]:
        """Return the names of all whose servers answer; raises ChatError where none does."""
        told = await asyncio.gather(*map(self._models_of, self._servers))
        found = [one for rows in told if not isinstance(rows, ChatError) for one in rows]
        if not found:
            raise next(one for one in told if isinstance(one, ChatError))
        return {"object": "list", "data": found}

    async def show(self, model: str) -> dict[str, Any]:
        """Return what is told of a model name; raises ChatError."""
        agent = self.agent_of(model)
        described = await self.describe(agent)
        for one in models(described, agent):
            if one["id"] == model:
                return one
        raise await self._unknown(agent, agent or described.policy)

    async def _models_of(self, agent: str) -> list[dict[str, Any]] | ChatError:
        try:
            described = await self.describe(agent)
        except ChatError as error:
            return error
        if agent == FIRST and described.policy in self._servers:
            return []  # an agent has its name
        return models(described, agent)

    async def _unknown(self, agent: str, policy: str) -> ChatError:
        """The error of a name that is none of an agent's, with the names of the others."""
        if FIRST in self._servers and FIRST not in self._policies:
            with contextlib.suppress(ChatError):  # it is away, and has no names then
                self._policies[FIRST] = (await self.describe(FIRST)).policy
        return unknown_model(policy, [name for one, name in self._policies.items() if one != agent])
