"""What the newest reward model of the loop expects people to say of an answer, where there is one."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.workloads.language.prompt import Message
from penstock.workloads.language.reward.reward_client import RewardClient
from penstock.workloads.language.reward.reward_source import RewardError, Sample

log = logging.getLogger(__name__)

DEADLINE_S: Final = 1.0
"""So long an answer waits for what is expected of it."""


class Judge:
    """Used by one event loop. address: returns where the model answers; "" where it does not."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address
        self._clients: dict[str, RewardClient] = {}
        """The one of the newest address."""

    async def shares(self, before: Sequence[dict[str, Any]], answer: str) -> dict[str, float]:
        """Return what is expected, 0 to 1 by head; nothing where no model answers in time."""
        client = self._client(await asyncio.to_thread(self._address))
        if client is None:
            return {}
        prompt = tuple(Message(str(one["role"]), str(one["content"])) for one in before)
        try:
            return await asyncio.to_thread(client.judge, Sample(prompt=prompt, response=answer))
        except RewardError as error:
            log.warning("an answer was not judged", extra={"why": str(error)})
            return {}

    def close(self) -> None:
        """Close the connection."""
        while self._clients:
            self._clients.popitem()[1].close()

    def _client(self, address: str) -> RewardClient | None:
        if address not in self._clients:
            self.close()
            if address:
                self._clients[address] = RewardClient(address, deadline_s=DEADLINE_S)
        return self._clients.get(address)
