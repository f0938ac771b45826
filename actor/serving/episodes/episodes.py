"""Episodes whose environment lives in a client: who they are, what was answered last, when they are given up.

    start ─► act ─► act ─► … ─► end ─► remembered for late rewards and repeated calls ─► forgotten
               └── not heard of for the timeout ─► given up ──┘

Memory is bounded: so many episodes are open, so many remembered, and no caller has so many of either that
others have none (`caller_shares`). What an id proves after that stands in `episode_ids`.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.actor.serving.episodes.caller_shares import CallerShares
from penstock.actor.serving.episodes.episode_ids import EpisodeIds, unknown
from penstock.actor.serving.episodes.segments import Segment, SegmentBuilder
from penstock.actor.serving.inference.forward_pass import Loaded
from penstock.actor.serving.versions.loaded_versions import MAX_LOADED
from penstock.config.settings import ServingSection
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.tensor import Array
from penstock.registry.routing import Arm
from penstock.rpc.identity import CALLER, Identity

REMEMBERED_REQUESTS: Final = 64
"""Of one episode, so that none of them counts twice."""
REMEMBERED_EPISODES: Final = 4096
_RETRY_MS: Final = 1000


_Start = tuple[Identity | None, str, str]
"""Caller, client key and request id."""


class Watched(Protocol):
    """A client of a canary's trial."""

    def end(self, episode: "Episode", *, is_whole: bool) -> None:
        """One of its episodes is over."""


@dataclass(slots=True, eq=False)
class Opinion:
    """Holds what a person thinks of a conversation, where that is what its rewards say.

    turns: that were answered. asked: those that somebody was asked about. newest: the newest reward of the
    others; None: no opinion was given.
    """

    turns: int = 0
    asked: set[int] = field(default_factory=set)
    newest: float | None = None

    @property
    def counts(self) -> bool:
        """Return whether it says anything about its arm: a turn was answered that nobody was asked about."""
        return len(self.asked) < self.turns

    @property
    def likes(self) -> bool:
        """Return whether the newest opinion is a good one; no opinion is none."""
        return self.newest is not None and self.newest > 0.0

    def hear(self, rewards: Iterable[tuple[int, float]], *, asked: bool) -> None:
        """Take rewards by turn. asked: somebody was asked about these turns."""
        for turn, amount in rewards:
            if asked:
                self.asked.add(turn)
            elif amount and turn not in self.asked:
                self.newest = amount


@dataclass(slots=True, eq=False)
class Episode:
    """One that is open, or over and remembered."""

    id: str
    number: int
    lane: int
    client_key: str
    arm: Arm
    owner: Identity | None
    segment_builder: SegmentBuilder
    learned: bool
    heard_s: float
    loaded: Loaded | None = None
    state: Mapping[str, Array] = field(default_factory=dict)
    """What the policy remembers of it, by name, [1, *shape]; empty before the first step."""
    total_return: float = 0.0
    version: int = 0
    unlearned_as: str = ""
    """Why its steps are not learned from, where they are not."""
    last_request: str = ""
    last_reply: bytes = b""
    """To `last_request`; empty while there is none."""
    waiting: "list[asyncio.Future[bytes]] | None" = None
    """The waiter for the reply to the step that is under way; None: no step is."""
    is_over: bool = False
    ending_request: str = ""
    rewarded: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Requests whose rewards were taken, and how many of them came late."""
    acted: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_REQUESTS))
    ripening: list[Segment] = field(default_factory=list)
    """Cut, and open for rewards still."""
    started_as: "_Start | None" = None
    watched: "Watched | None" = None
    """Who plays it, where a canary is on trial."""
    is_rewarded: bool = False
    opinion: Opinion | None = None
    """None: its rewards are a return."""

    def segment_of(self, step: int) -> Segment | None:
        """Return where the step's reward can still be changed."""
        newest = self.segment_builder.open
        if newest is not None and newest.holds(step):
            return newest
        return next((segment for segment in self.ripening if segment.holds(step)), None)

    def add_reward(self, step: int, amount: float) -> None:
        """To what the step has."""
        self.is_rewarded = True
        segment = self.segment_of(step)
        if segment is not None:
            segment.add_reward(step, amount)
        if not self.is_over:
            self.total_return += amount

    def remember_reward(self, request_id: str, late: int) -> None:
        """Remember that the request's rewards were taken."""
        if request_id:
            self.rewarded[request_id] = late
            if len(self.rewarded) > REMEMBERED_REQUESTS:
                self.rewarded.popitem(last=False)


class Episodes:
    """All of one server; `clock` in seconds, monotonic."""

    def __init__(self, section: ServingSection, unroll_length: int) -> None:
        self._section, self._unroll_length = section, unroll_length
        self._ids = EpisodeIds()
        self.server = self._ids.server
        self._open: OrderedDict[str, Episode] = OrderedDict()
        self._shares = CallerShares(section.max_episodes)
        self._over: OrderedDict[str, Episode] = OrderedDict()
        self._over_of = Counter[Identity | None]()
        self._started: dict[_Start, Episode] = {}
        self._lanes: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def __iter__(self) -> Iterator[Episode]:
        """The open ones, longest unheard first."""
        return iter(list(self._open.values()))

    def started_by(self, client_key: str, request_id: str) -> Episode | None:
        """Return the episode that this very request started already."""
        return self._started.get((CALLER.get(), client_key, request_id)) if request_id else None

    def start(self, client_key: str, request_id: str, arm: Arm, *, learned: bool, now_s: float) -> Episode:
        """Begin a new one; raises Refused (OVERLOADED) when as many as may be are open."""
        owner = CALLER.get()
        if not self._shares.fits(owner, 1):
            text = f"episodes: {self._shares.why_not(owner, 'serving.max_episodes')}; end some"
            raise Refused(Refusal(reason=Reason.OVERLOADED, detail=text, retry_after_ms=_RETRY_MS))
        self._count += 1
        lane = self._lanes.pop() if self._lanes else len(self._open)
        episode = Episode(
            id=self._ids.give(self._count, owner),
            number=self._count,
            lane=lane,
            client_key=client_key,
            arm=arm,
            owner=owner,
            segment_builder=SegmentBuilder(
                lane, self._count, self._unroll_length, self._section.max_fragment_age_s
            ),
            learned=learned,
            heard_s=now_s,
        )
        self._open[episode.id] = episode
        self._shares.add(owner, 1)
        if request_id:
            episode.started_as = (episode.owner, client_key, request_id)
            self._started[episode.started_as] = episode
        return episode

    def find(self, episode_id: str, now_s: float) -> Episode:
        """Return an open one, heard of now; raises Refused (EPISODE_UNKNOWN, EPISODE_ELSEWHERE)."""
        episode = self.find_any(episode_id)
        if episode is None or episode.id not in self._open:
            raise unknown(episode_id, "it has ended or was given up: start a new one")
        episode.heard_s = now_s
        self._open.move_to_end(episode_id)
        return episode

    def find_any(self, episode_id: str) -> Episode | None:
        """Return one that is open or remembered; None for one that was given and is forgotten.

        Raises Refused as `find` for any other id, and for somebody else's.
        """
        episode = self._open.get(episode_id) or self._over.get(episode_id)
        if episode is None:
            self._ids.check(episode_id, CALLER.get())
            return None
        if episode.owner != CALLER.get():
            raise unknown(episode_id, "it is another client's")
        return episode

    def close(self, episode: Episode) -> None:
        """It is over: remembered for a while."""
        if self._open.pop(episode.id, None) is None:
            return
        self._shares.add(episode.owner, -1)
        self._lanes.append(episode.lane)
        episode.loaded, episode.state = None, {}
        self._over[episode.id] = episode
        self._over_of[episode.owner] += 1
        while len(self._over) > REMEMBERED_EPISODES:
            self._forget(self._least_needed(episode.owner))

    def _least_needed(self, owner: Identity | None) -> Episode:
        """Return the oldest of this owner if it has more than an even part, else of those who have."""
        if self._has_more(owner):
            return next(one for one in self._over.values() if one.owner == owner)
        return next(one for one in self._over.values() if self._has_more(one.owner))

    def _has_more(self, owner: Identity | None) -> bool:
        return self._over_of[owner] * len(self._over_of) > REMEMBERED_EPISODES

    def _forget(self, episode: Episode) -> None:
        del self._over[episode.id]
        self._over_of[episode.owner] -= 1
        if not self._over_of[episode.owner]:
            del self._over_of[episode.owner]
        if episode.started_as is not None:
            del self._started[episode.started_as]

    def let_go_of_old(self) -> None:
        """Keep at most MAX_LOADED versions for episodes.

        The others take newer weights with their next step.
        """
        versions = {episode.version for episode in self._open.values() if episode.loaded is not None}
        for version in sorted(versions)[:-MAX_LOADED]:
            for episode in self._open.values():
                if episode.version == version:
                    episode.loaded = None

    def overdue(self, now_s: float) -> list[Episode]:
        """Open ones that were not heard of for the timeout."""
        late = []
        for episode in self._open.values():
            if now_s - episode.heard_s < self._section.episode_timeout_s:
                break
            late.append(episode)
        return late
