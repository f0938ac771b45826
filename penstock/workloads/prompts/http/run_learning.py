"""Commands to the run's learner, the answers that were given, and chains of transitions.

A command continues in the run when its caller stops waiting. The next call after a timeout sends the same
command again, under the same request id.
"""

import asyncio
import hashlib
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.client import (
    AsyncControlClient,
    AsyncEpisode,
    AsyncPolicyClient,
    CommandRefusal,
    CommandReport,
    CommandState,
    EpisodeElsewhere,
    EpisodeUnknown,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyError,
    UnknownVersion,
)
from penstock.client.values import RunStatus
from penstock.gateway.frame.requests import ApiError
from penstock.protocol.tensor import Array

LEAST_STEPS: Final = 128
"""Fewest steps of an update."""
WAIT_S: Final = 120.0
_LOOK_S: Final = 0.05
_FIGURES_S: Final = 5.0
"""Longest wait for the metrics of a finished update, in seconds."""
_KEPT_UPDATES: Final = 10
_REASON: Final = "asked for over HTTP"

_NOT_KEPT: Final[dict[CommandRefusal | None, str]] = {
    CommandRefusal.NAME: "path: a checkpoint has this name already; choose another",
    CommandRefusal.LIMIT: "path: no more checkpoints may have names, or the disk is full: make room",
}
"""Texts for refusals whose details name folders of the run."""

Ask = Callable[[str], Awaitable[CommandReport]]
"""(request id) → the state of the command."""


@dataclass(slots=True, eq=False)
class RunLearning:
    """Commands of one event loop. wait_s: longest wait for one, in seconds."""

    wait_s: float = WAIT_S
    waiting_steps: int = 0
    """Steps stored since the last update."""
    figures: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_KEPT_UPDATES))
    """Metrics of the last updates, oldest first."""
    status: RunStatus | None = None
    _pending: dict[str, str] = field(default_factory=dict)
    """Request ids of unanswered commands, by command."""
    _flushing: "asyncio.Task[CommandReport] | None" = None

    async def look(self, control: AsyncControlClient) -> RunStatus:
        """Read the run's status, and update the figures; raises PolicyError."""
        before, now = self.status, await control.status()
        self.status = now
        if before is None or before.run != now.run:
            return now
        made = _count(now, "updates") - _count(before, "updates")
        learned = _count(now, "env_steps") - _count(before, "env_steps")
        if made > 0:
            self.waiting_steps = max(0, self.waiting_steps - max(learned, 0))
            if last := now.learner.get("last_update"):
                self.figures.append(dict(last))
        return now

    async def flush(
        self, control: AsyncControlClient, end_chains: Callable[[], Awaitable[None]]
    ) -> CommandReport:
        """Train on the pending steps; concurrent calls share one update. Raises ApiError, PolicyError."""
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush(control, end_chains))
        return await asyncio.shield(self._flushing)

    async def save(self, control: AsyncControlClient, name: str) -> None:
        report = await self._answered(
            f"save {name}", lambda id_: control.checkpoint(id_, name, reason=_REASON)
        )
        if report.state is CommandState.REFUSED:
            raise ApiError(409, _NOT_KEPT.get(report.refusal, report.detail), field="path")

    async def load(self, control: AsyncControlClient, name: str) -> tuple[int, int]:
        """Return to a named checkpoint; returns the restored version, and the number of dropped steps.

        Steps that waited for an update are dropped, since the replaced weights chose them. Raises ApiError,
        PolicyError.
        """
        report = await self._answered(f"load {name}", lambda id_: control.restore(id_, name, reason=_REASON))
        if report.refusal is CommandRefusal.NAME:
            raise ApiError(404, report.detail, field="path", error="File not found")
        if report.state is CommandState.REFUSED:
            raise ApiError(409, report.detail, field="path")
        given_up, self.waiting_steps = self.waiting_steps, 0
        return report.version, given_up

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the last updates; None where none has it."""
        found = [one[name] for one in self.figures if math.isfinite(one.get(name, math.nan))]
        return sum(found) / len(found) if found else None

    def last(self, name: str) -> float | None:
        found = self.figures[-1].get(name, math.nan) if self.figures else math.nan
        return found if math.isfinite(found) else None

    async def _flush(
        self, control: AsyncControlClient, end_chains: Callable[[], Awaitable[None]]
    ) -> CommandReport:
        before = _count(await self.look(control), "updates")
        await end_chains()
        report = await self._answered(
            "update", lambda id_: control.flush(id_, min_steps=LEAST_STEPS, reason=_REASON)
        )
        if report.refusal is CommandRefusal.TOO_FEW_STEPS:
            self.waiting_steps = report.steps
        elif report.state is CommandState.REFUSED:
            raise ApiError(409, report.detail)
        else:
            await self._await_figures(control, before)
        return report

    async def _await_figures(self, control: AsyncControlClient, before: int) -> None:
        until_s = time.monotonic() + _FIGURES_S
        while _count(await self.look(control), "updates") <= before:
            if time.monotonic() > until_s:
                return
            await asyncio.sleep(_LOOK_S)

    async def _answered(self, what: str, ask: Ask) -> CommandReport:
        """Return the command once the learner has answered; raises ApiError 504 after `wait_s`."""
        request_id = self._pending.setdefault(what, f"http-{secrets.token_hex(12)}")
        until_s = time.monotonic() + self.wait_s
        while True:
            report = await ask(request_id)
            if report.state is not CommandState.PENDING:
                self._pending.pop(what, None)
                return report
            if time.monotonic() > until_s:
                if len(self._pending) > _KEPT_UPDATES:
                    self._pending.pop(next(iter(self._pending)))
                raise ApiError(
                    504,
                    f"the learner has not answered within {self.wait_s:g} s and still may: call again",
                    error="timeout",
                    retry_s=5,
                )
            await asyncio.sleep(_LOOK_S)


def _count(status: RunStatus, name: str) -> int:
    return int(status.learner.get(name) or 0)


# ---- The last answers, with which transitions are matched.

KEPT: Final = 4096
"""Answers that are stored of one caller."""
CALLERS: Final = 64
"""Callers whose answers are stored; the longest silent one is dropped first."""

StateKey = bytes


def state_key(state: Array) -> StateKey:
    """Return a hash of an embedding, float32 [1536]."""
    # -0.0 and 0.0 are one number in two forms.
    return hashlib.blake2b((np.asarray(state, np.float32) + np.float32(0)).tobytes(), digest_size=16).digest()


@dataclass(slots=True, kw_only=True, eq=False)
class GivenAnswer:
    """An answer. log_prob: None where the action was not drawn. is_used: whether a transition belongs to it.

    found_for: that transition, where it came without a ticket.
    """

    state: StateKey
    action: int
    log_prob: float | None
    version: int
    ticket: str = field(default_factory=lambda: secrets.token_hex(12))
    is_used: bool = False
    found_for: bytes = b""


class GivenAnswers:
    """Stores the answers of each caller by ticket, oldest first; used by one event loop."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, _AnswersOfCaller] = OrderedDict()

    def give(self, caller: str, given: GivenAnswer) -> None:
        """Store an answer, and drop the oldest beyond KEPT."""
        self._of(caller).add(given)

    def by_ticket(self, caller: str, ticket: str) -> GivenAnswer | None:
        return self._of(caller).by_ticket.get(ticket)

    def unused(self, caller: str, state: StateKey, action: int) -> GivenAnswer | None:
        """Return the newest answer with this state and action that has no transition."""
        found = self._of(caller).by_place.get((state, action), ())
        return next((one for one in reversed(found) if not one.is_used), None)

    def leave_to(self, caller: str, given: GivenAnswer, transition: bytes) -> None:
        """Free an answer that a transition without a ticket took, for a transition that names its ticket.

        transition: the one with the ticket. The earlier transition takes another unused answer. Without one,
        equal transitions are the same, and the answer stays used; different ones both count.
        """
        if not given.found_for:
            return
        other = self.unused(caller, given.state, given.action)
        if other is not None:
            other.is_used, other.found_for = True, given.found_for
        given.is_used = other is None and given.found_for == transition
        given.found_for = b""

    def _of(self, caller: str) -> "_AnswersOfCaller":
        own = self._callers.setdefault(caller, _AnswersOfCaller())
        self._callers.move_to_end(caller)
        if len(self._callers) > CALLERS:
            self._callers.popitem(last=False)
        return own


class _AnswersOfCaller:
    def __init__(self) -> None:
        self.by_ticket: OrderedDict[str, GivenAnswer] = OrderedDict()
        self.by_place: dict[tuple[StateKey, int], deque[GivenAnswer]] = {}

    def add(self, given: GivenAnswer) -> None:
        self.by_ticket[given.ticket] = given
        self.by_place.setdefault((given.state, given.action), deque()).append(given)
        if len(self.by_ticket) > KEPT:
            _, oldest = self.by_ticket.popitem(last=False)
            place = (oldest.state, oldest.action)
            same = self.by_place[place]
            same.popleft()  # the answers of a place are in the order in which they were given
            if not same:
                del self.by_place[place]


# ---- Transitions that follow one another, as episodes of the policy server.
#
#     store ─► does its state equal the last `next_state` of a chain?
#                yes: the chain goes on       Act(state, taken action), with the reward before it
#                no:  a chain begins          StartEpisode, Act
#           ─► done: it terminates            EndEpisode
#     a flush, too many chains, nothing that follows: it ends truncated, its last `next_state` was seen last
#
# So returns over several steps are correct where transitions follow one another, and each single transition
# is an episode of one step. The policy server holds stored steps in memory, and loses them only with its
# process.

MOST_CHAINS: Final = 64
"""Most open chains of one caller; the longest silent one ends for a new one."""
MOST_OF_ALL: Final = 1024
IDLE_S: Final = 20.0
"""Seconds after which an idle chain ends; a policy server drops an idle episode after 60."""
_NOT_TAKEN: Final = (InvalidRequest, NotAllowed, NotReady, Overloaded, ValueError)
"""Errors after which a step was certainly not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A transition. log_prob: None where its action was not drawn. version: that drew it; 0: unknown.

    state, next_state: float32 [1536].
    """

    state: Array
    action: int
    reward: float
    next_state: Array
    done: bool
    log_prob: float | None
    version: int


@dataclass(slots=True, eq=False)
class _Chain:
    episode: AsyncEpisode
    heard_s: float
    reward: float = 0.0
    """Of the last step; the next call sends it."""
    last: Array | None = None
    steps: int = 0


_Place = tuple[str, StateKey]


@dataclass(slots=True, eq=False)
class Chains:
    """The chains of all callers; used by one event loop. on_return: called with the return of each ended one.

    most: of one caller. idle_s: see IDLE_S.
    """

    on_return: Callable[[float], None]
    most: int = MOST_CHAINS
    most_of_all: int = MOST_OF_ALL
    idle_s: float = IDLE_S
    lost: int = 0
    """Steps that were lost with a policy server."""
    _open: OrderedDict[_Place, list[_Chain]] = field(default_factory=OrderedDict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    async def store(self, client: AsyncPolicyClient, caller: str, step: Step) -> None:
        """Store a transition; raises a PolicyError where it was not stored."""
        place = (caller, state_key(step.state))
        before = self._pop(place) if place in self._open else None
        try:
            chain = await self._act(client, before, step)
        except (EpisodeUnknown, EpisodeElsewhere):
            # The policy server was restarted, or dropped the episode.
            self.lost += 0 if before is None else 1
            chain = await self._act(client, None, step)
        except _NOT_TAKEN:
            if before is not None:
                self._open.setdefault(place, []).append(before)
            raise
        except PolicyError:
            # Whether the step was stored is unknown: sent again, it might count twice.
            self.lost += 0 if before is None else 1
            raise
        if step.done:
            await self._end(chain, terminated=True)
            return
        self._open.setdefault((caller, state_key(step.next_state)), []).append(chain)
        self._make_room(caller)

    async def end_all(self) -> None:
        """End all chains as truncated; steps of one that cannot be ended count as lost."""
        chains = [one for place in list(self._open) for one in self._open.pop(place, [])]
        await asyncio.gather(*(self._end_quietly(one) for one in chains))
        if self._ending:
            await asyncio.wait(self._ending)

    def end_idle(self) -> None:
        before_s = time.monotonic() - self.idle_s
        for place, chains in list(self._open.items()):
            while chains and chains[0].heard_s < before_s:
                self._end_first(place)

    async def _act(self, client: AsyncPolicyClient, chain: _Chain | None, step: Step) -> _Chain:
        if chain is None:
            chain = _Chain(await client.start_episode(), time.monotonic())
        options: Any = {"taken_action": step.action, "reward": chain.reward if chain.steps else None}
        if step.log_prob is not None:
            options["taken_log_prob"] = step.log_prob
        if step.version:
            options["taken_version"] = step.version
        try:
            await chain.episode.act(step.state, **options)
        except UnknownVersion:
            # A policy server that started after the answer knows only its own version.
            del options["taken_version"]
            await chain.episode.act(step.state, **options)
        chain.reward, chain.last = step.reward, step.next_state
        chain.heard_s, chain.steps = time.monotonic(), chain.steps + 1
        return chain

    def _pop(self, place: _Place, index: int = -1) -> _Chain:
        chains = self._open[place]
        chain = chains.pop(index)
        if not chains:
            del self._open[place]
        return chain

    def _make_room(self, caller: str) -> None:
        own = [place for place in self._open if place[0] == caller]
        if sum(len(self._open[place]) for place in own) > self.most:
            self._end_first(own[0])
        elif len(self) > self.most_of_all:
            self._end_first(next(iter(self._open)))

    def _end_first(self, place: _Place) -> None:
        task = asyncio.create_task(self._end_quietly(self._pop(place, 0)))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_quietly(self, chain: _Chain) -> None:
        try:
            await self._end(chain, terminated=False)
        except PolicyError:
            self.lost += chain.steps

    async def _end(self, chain: _Chain, *, terminated: bool) -> None:
        result = await chain.episode.end(
            terminated=terminated,
            truncated=not terminated,
            final_observation=chain.last,
            reward=chain.reward,
        )
        self.on_return(result.total_return)
