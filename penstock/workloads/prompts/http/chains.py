"""Transitions that follow one another, as episodes of the policy server.

    store ─► does its state equal the last `next_state` of a chain?
               yes: the chain goes on       Act(state, taken action), with the reward before it
               no:  a chain begins          StartEpisode, Act
          ─► done: it terminates            EndEpisode
    a flush, too many chains, nothing that follows: it ends truncated, and its last `next_state` was seen last

So returns over several steps are right where transitions follow one another, and each loose transition is an
episode of one step. What is taken in here is in the memory of the policy server, which loses it only with its
process.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.client import (
    AsyncEpisode,
    AsyncPolicyClient,
    EpisodeElsewhere,
    EpisodeUnknown,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyError,
    UnknownVersion,
)
from penstock.protocol.tensor import Array
from penstock.workloads.prompts.http.run_learning import StateKey, state_key

MOST_CHAINS: Final = 64
"""Chains of one caller that go on at the same time; the one that was longest silent ends for a new one."""
MOST_OF_ALL: Final = 1024
IDLE_S: Final = 20.0
"""Seconds after which a chain that nothing follows ends; a policy server would give it up after 60."""
_NOT_TAKEN: Final = (InvalidRequest, NotAllowed, NotReady, Overloaded, ValueError)
"""Errors after which a step has surely not happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A transition. log_prob: None where its action was not drawn from a policy. version: that drew it.

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
    """Of the last step, which goes with the next call."""
    last: Array | None = None
    steps: int = 0


_Place = tuple[str, StateKey]


@dataclass(slots=True, eq=False)
class Chains:
    """The chains of all callers; used by one event loop. on_return: told of the return of each that ended.

    most: of one caller. idle_s: see IDLE_S.
    """

    on_return: Callable[[float], None]
    most: int = MOST_CHAINS
    most_of_all: int = MOST_OF_ALL
    idle_s: float = IDLE_S
    lost: int = 0
    """Steps whose episode ended with its policy server."""
    _open: OrderedDict[_Place, list[_Chain]] = field(default_factory=OrderedDict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    async def store(self, client: AsyncPolicyClient, caller: str, step: Step) -> None:
        """Take a transition in; raises a PolicyError, after which it was not taken in."""
        place = (caller, state_key(step.state))
        before = self._pop(place) if place in self._open else None
        try:
            chain = await self._act(client, before, step)
        except (EpisodeUnknown, EpisodeElsewhere):
            # The policy server was started again, or gave the episode up.
            self.lost += 0 if before is None else 1
            chain = await self._act(client, None, step)
        except _NOT_TAKEN:
            if before is not None:
                self._open.setdefault(place, []).append(before)
            raise
        except PolicyError:
            # Whether the step was heard is not known: were it sent again there, it might count twice.
            self.lost += 0 if before is None else 1
            raise
        if step.done:
            await self._end(chain, terminated=True)
            return
        self._open.setdefault((caller, state_key(step.next_state)), []).append(chain)
        self._make_room(caller)

    async def end_all(self) -> None:
        """End all chains, truncated; what cannot be ended is counted as lost."""
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
        """Take the step in a chain, or in a new one."""
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
            # A policy server that was started since the answer knows no version but its own.
            del options["taken_version"]
            await chain.episode.act(step.state, **options)
        chain.reward, chain.last = step.reward, step.next_state
        chain.heard_s, chain.steps = time.monotonic(), chain.steps + 1
        return chain

    def _pop(self, place: _Place, index: int = -1) -> _Chain:
        """Take a chain out of the open ones."""
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
