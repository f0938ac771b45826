"""Actors that fetch weights over one slow line, a chunk at a time, without a network.

Time is counted in chunks: the line carries one from the broker to one of its actors, who take turns, and
then a chunk's time is over. Between two chunks a learner may publish as often as it likes.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.log.replies import Opened
from penstock.broker.log.store import Store
from penstock.broker.service.sessions import Changes, LastCredit, SessionOwners
from penstock.broker.service.weight_service import WeightCache, WeightService
from penstock.protocol.messages import Role
from penstock.rpc.gate import Absent
from penstock.v1 import weights_pb2 as pb

_MOST_FRESH_STARTS: Final = 8


def weight_service(store: Store) -> WeightService:
    return WeightService(
        store,
        WeightCache(store.weights_chunk),
        Changes(),
        SessionOwners(store.owner_of, store.confirm),
        LastCredit(),
    )


@dataclass
class FetchingActor:
    """An actor that always wants the newest weights it can have."""

    service: WeightService
    session: int
    version: int = 0
    given_up: int = 0
    min_version: int = 0
    wanted: pb.Publication = field(default_factory=pb.Publication)
    blob: bytes = b""

    @property
    def is_fetching(self) -> bool:
        return self.wanted.version > self.version

    async def look(self) -> None:
        request = pb.WatchLatestRequest(session=self.session, known_version=self.version)
        reply = pb.WatchLatestReply.FromString(await self.service.WatchLatest(request, None))
        assert not reply.refusal.reason, reply.refusal
        self.min_version = reply.leave.min_version
        if reply.latest.version > self.version:
            self.wanted, self.blob = reply.latest, reply.weights
            self._note_arrival()

    async def take_chunk(self) -> bool:
        """Let the line carry one chunk to this actor; False when there is nothing for it."""
        for _ in range(_MOST_FRESH_STARTS):
            if not self.is_fetching:
                await self.look()
            if not self.is_fetching:
                return False
            if await self._fetch():
                return True
        raise AssertionError(f"session {self.session} is told of versions that it cannot have")

    async def _fetch(self) -> bool:
        request = pb.GetWeightsRequest(
            session=self.session, version=self.wanted.version, offset=len(self.blob)
        )
        try:
            reply = pb.GetWeightsReply.FromString(await self.service.GetWeights(request, None))
        except Absent:
            self.given_up += 1
            self.wanted, self.blob = pb.Publication(version=self.version), b""
            return False
        assert reply.publication == self.wanted
        self.blob += reply.chunk
        self._note_arrival()
        return True

    def _note_arrival(self) -> None:
        if len(self.blob) == self.wanted.size:
            self.version = self.wanted.version


async def fetching_actors(store: Store, count: int, *, brokers: int = 1) -> list[FetchingActor]:
    services = [weight_service(store) for _ in range(brokers)]
    actors = []
    for index in range(count):
        opened = await store.open_session(f"actor-{index}", Role.ROLLOUT)
        assert isinstance(opened, Opened), opened
        actors.append(FetchingActor(services[index % brokers], opened.session))
    return actors


@dataclass
class SlowLine:
    """Carries one chunk at a time to the actor whose turn it is, and remembers when versions rose."""

    actors: list[FetchingActor]
    now: int = 0
    rises: dict[int, list[int]] = field(default_factory=dict)
    _turns: deque[FetchingActor] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._turns = deque(self.actors)
        self.rises = {actor.session: [0] for actor in self.actors}

    async def carry(self) -> None:
        """One chunk to the next actor that waits for one; a chunk's time passes in any case."""
        self.now += 1
        for _ in range(len(self._turns)):
            actor = self._turns[0]
            self._turns.rotate(-1)
            before = actor.version
            carried = await actor.take_chunk()
            if actor.version > before:
                self.rises[actor.session].append(self.now)
            if carried:
                return

    def longest_waits(self) -> Iterator[int]:
        """For each actor the longest time in which its version did not rise, in chunks."""
        for times in self.rises.values():
            ends = [*times, self.now]
            yield max(later - earlier for earlier, later in itertools.pairwise(ends))
