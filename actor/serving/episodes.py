"""Episodes whose environment runs in a client: their ids, their last replies, and when they are given up.

    start ─► act ─► act ─► … ─► end ─► remembered for late rewards and repeated calls ─► forgotten
               └── no call within the timeout ─► given up ──┘

Memory is bounded: so many episodes are open, so many remembered, and no caller has so many of either that
others have none.
"""

import hmac
import math
import re
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.actor.rollout.generator import HeaderFields
from penstock.actor.serving.batcher import Loaded
from penstock.actor.serving.loaded_versions import MAX_LOADED
from penstock.config.settings import ServingSection
from penstock.protocol.fragment import Fragment, Slot, build
from penstock.protocol.messages import Publication
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.schema import FragmentSchema
from penstock.protocol.tensor import Array
from penstock.registry.routing import Arm
from penstock.rpc.identity import CALLER, Identity

if TYPE_CHECKING:
    from penstock.actor.serving.release import WatchedClient

# ---- Shares of callers in a bounded resource.


class CallerShares:
    """The amounts that callers hold. whole: the most of all together, in any unit. For one event loop."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self._held = Counter[Identity | None]()
        self.used = 0

    def fits(self, owner: Identity | None, amount: int) -> bool:
        free = self.whole - self.used
        return amount <= free and (owner is None or self._held[owner] + amount <= free)

    def why_not(self, owner: Identity | None, setting: str) -> str:
        """Return why an amount does not fit, for the refusal. setting: the name of the bound."""
        if owner is None or self.used >= self.whole:
            return f"callers have {self.used} of {self.whole} ({setting})"
        return (
            f"this caller has {self._held[owner]}, and may have no more than the others leave free "
            f"of {self.whole} ({setting})"
        )

    def add(self, owner: Identity | None, amount: int) -> None:
        """Count more, or less where the amount is negative."""
        self.used += amount
        self._held[owner] += amount
        if not self._held[owner]:
            del self._held[owner]


# ---- Ids of episodes, `SERVER-NUMBER-TOKEN`; the token proves that this server gave the id to its owner.

_GRAMMAR: Final = re.compile(r"([0-9a-f]{8})-([1-9][0-9]{0,15})-([0-9a-f]{12})", re.ASCII)
_TOKEN_DIGITS: Final = 12


class EpisodeIds:
    """Gives and checks the ids of one server."""

    def __init__(self) -> None:
        self.server = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)

    def give(self, number: int, owner: Identity | None) -> str:
        """Return the id of episode `number` of this owner; None: on a server that asks for no identity."""
        return f"{self.server}-{number}-{self._token(number, owner)}"

    def check(self, episode_id: str, owner: Identity | None) -> None:
        """Raise Refused: EPISODE_ELSEWHERE for another server's, UNKNOWN unless given to this owner."""
        match = _GRAMMAR.fullmatch(episode_id)
        if match is None:
            raise unknown(episode_id, "no such id was ever given")
        server, number, token = match.groups()
        if server != self.server:
            text = f"episode_id={episode_id!r} is of server {server}, this is {self.server}: start a new one"
            raise Refused(Refusal(reason=Reason.EPISODE_ELSEWHERE, detail=text))
        if not hmac.compare_digest(token, self._token(int(number), owner)):
            raise unknown(episode_id, "it was not given to this client")

    def _token(self, number: int, owner: Identity | None) -> str:
        text = f"{number} {'' if owner is None else owner}".encode()
        return hmac.digest(self._key, text, "sha256").hex()[:_TOKEN_DIGITS]


def unknown(episode_id: str, why: str) -> Refused:
    """Return the refusal (EPISODE_UNKNOWN) of an id, which may be of any length."""
    text = f"episode_id={episode_id[:80]!r}: {why}"
    return Refused(Refusal(reason=Reason.EPISODE_UNKNOWN, detail=text))


# ---- The steps of one episode that the learner has not got yet, cut into segments.

_MOST: Final = float(np.finfo(np.float32).max)

Row = Mapping[str, Array]
"""One observation or action by tensor name, arrays [1, *shape]."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """T steps, T + 1 observations once it is cut. Rewards may still be added.

    observations: with action masks, where the run has them. state: the policy's before the first step.
    final: the true last observation, where the episode ended with the last step.
    """

    slot: Slot
    version: int
    update: int
    bytes: int = 0
    """What its observations and actions take."""
    observations: list[Row] = field(default_factory=list)
    actions: list[Row] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    state: Row = field(default_factory=dict)
    final: Row | None = None

    @property
    def steps(self) -> int:
        """Steps taken, the last perhaps not whole."""
        return len(self.actions)

    def holds(self, step: int) -> bool:
        return self.slot.first_step <= step < self.slot.first_step + self.steps

    def add_reward(self, step: int, amount: float) -> None:
        self.rewards[step - self.slot.first_step] += amount

    def drop_last(self) -> None:
        """Forget a last step whose outcome is unknown; its observation stays, as the end of the segment."""
        del self.actions[-1], self.log_probs[-1], self.rewards[-1], self.valid[-1]

    def to_fragment(
        self,
        schema: FragmentSchema,
        run: str,
        policy: str,
        *,
        compress: bool,
        reward: Callable[[Mapping[str, Array]], Array] | None = None,
    ) -> Fragment:
        """Return the steps as a fragment of one slot, not numbered. reward: see `FragmentBuilder`."""
        fields = HeaderFields(
            run=run,
            session=0,
            sequence=0,
            weights=Publication(self.version, self.update),
            round=0,
            policy=policy,
        )
        names = frozenset(self.observations[0]) if compress else frozenset[str]()
        tensors = self._tensors()
        if reward is not None:
            tensors["reward"] = reward(tensors)
        return build(fields.header(schema, self.steps, (self.slot,)), tensors, names)

    def _tensors(self) -> dict[str, Array]:
        steps = self.steps
        rows, last = self.observations[:-1], self.observations[-1]
        tensors: dict[str, Any] = {}
        for name, first in self.observations[0].items():
            # What was seen last has no mask: nothing was done there.
            end = last[name] if name in last else np.ones_like(first)
            tensors[name] = _stacked([*(row[name] for row in rows), end])
        tensors |= {name: _stacked([row[name] for row in self.actions]) for name in self.actions[0]}
        # Each reward is finite as a float32, their sum need not be; a fragment with infinity ends the
        # session.
        tensors["reward"] = np.clip(self.rewards, -_MOST, _MOST).astype(np.float32)[:, np.newaxis]
        tensors["log_prob"] = np.asarray(self.log_probs, np.float32)[:, np.newaxis]
        tensors["valid"] = np.asarray(self.valid, bool)[:, np.newaxis]
        ends = np.zeros((steps, 1), bool)
        tensors["terminated"], tensors["truncated"] = ends.copy(), ends
        tensors["terminated"][-1], tensors["truncated"][-1] = self.terminated, self.truncated
        # Of a step that is no experience nothing is valued.
        final = self.final if self.valid[-1] else None
        count = int(final is not None)
        tensors["final/slot"] = np.zeros(count, np.int32)
        tensors["final/step"] = np.full(count, steps - 1, np.int32)
        for name, row in self.observations[0].items():
            if not name.startswith("mask/"):
                tensors[f"final/{name}"] = row[:0] if final is None else final[name]
        if self.state:
            tensors |= self.state
            tensors["begins"] = np.zeros((steps + 1, 1), bool)
            tensors["begins"][0] = self.slot.first_step == 0
        return tensors


def _stacked(rows: list[Array]) -> Array:
    """Of arrays [1, *shape] one of [n, 1, *shape], as `np.stack` makes it in more time."""
    return np.concatenate(rows)[:, np.newaxis]


class SegmentBuilder:
    """The open segment of an episode; `step` and `end` return the one that they complete."""

    def __init__(self, lane: int, number: int, unroll_length: int, max_age_s: float) -> None:
        self._lane, self._number = lane, number
        self._unroll_length, self._max_age_s = unroll_length, max_age_s
        self._begun = 0
        self._began_s = -math.inf
        self.open: Segment | None = None
        self.length = 0
        """Steps of the episode."""

    def is_due(self, now_s: float) -> bool:
        """Return whether the next action begins a new segment, and so may come from newer weights."""
        return (
            self.length == 0
            or self.length - self._begun >= self._unroll_length
            or now_s - self._began_s >= self._max_age_s
        )

    def skip(self, now_s: float) -> None:
        if self.is_due(now_s):
            self._begun, self._began_s = self.length, now_s
        self.length += 1

    def step(
        self,
        observation: Row,
        action: Row,
        log_prob: float | None,
        weights: tuple[int, int],
        now_s: float,
        state: Row,
    ) -> Segment | None:
        """Add a step. log_prob: None where the policy did not draw the action. weights: version and update.

        state: the policy's before it.
        """
        done = None
        if self.open is not None and (self.is_due(now_s) or self.open.version != weights[0]):
            done, self.open = self.open, None
            done.observations.append(observation)
        if self.open is None:
            slot = Slot(self._lane, self._number, self.length)
            self.open = Segment(slot=slot, version=weights[0], update=weights[1], state=state)
            self._begun, self._began_s = self.length, now_s
        segment = self.open
        segment.observations.append(observation)
        segment.actions.append(action)
        segment.log_probs.append(0.0 if log_prob is None else log_prob)
        segment.valid.append(log_prob is not None)
        segment.rewards.append(0.0)
        self.length += 1
        return done

    def cut(self) -> Segment | None:
        """Return the whole steps; None without any, or where the state before the last one is not known."""
        done = self.open
        if done is None or done.steps < 2 or done.state:
            return None
        slot = Slot(self._lane, self._number, self.length - 1)
        self.open = last = Segment(slot=slot, version=done.version, update=done.update)
        last.bytes = done.bytes // done.steps
        done.bytes -= last.bytes
        last.observations, last.actions = [done.observations[-1]], [done.actions[-1]]
        last.log_probs, last.rewards = [done.log_probs[-1]], [done.rewards[-1]]
        last.valid = [done.valid[-1]]
        done.drop_last()
        self._begun = self.length - 1
        return done

    def end(self, *, terminated: bool, final: Row | None) -> Segment | None:
        """End the episode, by the environment (`terminated`) or by truncation."""
        done, self.open = self.open, None
        if done is not None:
            done.terminated, done.truncated, done.final = terminated, not terminated, final
            done.observations.append(final if final is not None else done.observations[-1])
        return done

    def give_up(self) -> Segment | None:
        """Return the steps before the last one, if any: the outcome of the last step will not be reported."""
        done, self.open = self.open, None
        if done is None:
            return None
        done.drop_last()
        return done if done.steps else None


REMEMBERED_REQUESTS: Final = 64
"""Of one episode, so that none of them counts twice."""
REMEMBERED_EPISODES: Final = 4096
_RETRY_MS: Final = 1000


_Start = tuple[Identity | None, str, str]
"""Caller, client key and request id of a StartEpisode."""


@dataclass(slots=True, eq=False)
class Opinion:
    """Holds a person's opinion of a conversation whose rewards are opinions.

    turns: number of answered turns. asked: turns that raters were asked about. newest: the newest reward of
    the other turns; None: no opinion was given.
    """

    turns: int = 0
    asked: set[int] = field(default_factory=set)
    newest: float | None = None

    @property
    def counts(self) -> bool:
        """Return whether the conversation counts for its arm: a rater was not asked about every turn."""
        return len(self.asked) < self.turns

    @property
    def likes(self) -> bool:
        """Return whether the newest opinion is a good one; no opinion is none."""
        return self.newest is not None and self.newest > 0.0

    def hear(self, rewards: Iterable[tuple[int, float]], *, asked: bool) -> None:
        """Take rewards by turn. asked: whether a rater was asked about these turns."""
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
    last_call_s: float
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
    waiting: list[Callable[[bytes | Exception], None]] | None = None
    """Callbacks for the reply to the step in progress; None: there is none."""
    is_over: bool = False
    ending_request: str = ""
    rewarded: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Requests whose rewards were taken, and how many of them came late."""
    acted: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_REQUESTS))
    ripening: list[Segment] = field(default_factory=list)
    """Segments that were cut and still take rewards."""
    started_as: "_Start | None" = None
    watched: "WatchedClient | None" = None
    """Its client, where a canary is on trial."""
    is_rewarded: bool = False
    opinion: Opinion | None = None
    """None: its rewards are a return."""

    def segment_of(self, step: int) -> Segment | None:
        """Return the segment of a step whose reward can still be changed; None: it was sent."""
        newest = self.segment_builder.open
        if newest is not None and newest.holds(step):
            return newest
        return next((segment for segment in self.ripening if segment.holds(step)), None)

    def add_reward(self, step: int, amount: float) -> None:
        self.is_rewarded = True
        segment = self.segment_of(step)
        if segment is not None:
            segment.add_reward(step, amount)
        if not self.is_over:
            self.total_return += amount

    def remember_reward(self, request_id: str, late: int) -> None:
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
        return len(self._open)

    def __iter__(self) -> Iterator[Episode]:
        """The open ones, the one with the oldest last call first."""
        return iter(list(self._open.values()))

    def started_by(self, client_key: str, request_id: str) -> Episode | None:
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
            last_call_s=now_s,
        )
        self._open[episode.id] = episode
        self._shares.add(owner, 1)
        if request_id:
            episode.started_as = (episode.owner, client_key, request_id)
            self._started[episode.started_as] = episode
        return episode

    def find(self, episode_id: str, now_s: float) -> Episode:
        """Return an open one and note its call; raises Refused (EPISODE_UNKNOWN, EPISODE_ELSEWHERE)."""
        episode = self.find_any(episode_id)
        if episode is None or episode.id not in self._open:
            raise unknown(episode_id, "it has ended or was given up: start a new one")
        episode.last_call_s = now_s
        self._open.move_to_end(episode_id)
        return episode

    def find_any(self, episode_id: str) -> Episode | None:
        """Return one that is open or remembered, None for a forgotten one; raises Refused as `find`."""
        episode = self._open.get(episode_id) or self._over.get(episode_id)
        if episode is None:
            self._ids.check(episode_id, CALLER.get())
            return None
        if episode.owner != CALLER.get():
            raise unknown(episode_id, "it is another client's")
        return episode

    def close(self, episode: Episode) -> None:
        """Remember it for a while."""
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
        """Keep at most MAX_LOADED versions; other episodes take newer weights with their next step."""
        versions = {episode.version for episode in self._open.values() if episode.loaded is not None}
        for version in sorted(versions)[:-MAX_LOADED]:
            for episode in self._open.values():
                if episode.version == version:
                    episode.loaded = None

    def overdue(self, now_s: float) -> list[Episode]:
        late = []
        for episode in self._open.values():
            if now_s - episode.last_call_s < self._section.episode_timeout_s:
                break
            late.append(episode)
        return late
