"""Crowds of simulated actors, and what became of them (`benchmarks.credit_stand` lets them act)."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

SLOWER: Final = 10
"""A slow actor's fragments take so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Which actors take part in which run.

    Attributes:
        actors: how many there are.
        budget: most fragments that may be outstanding.
        batch: fragments of an update.
        slow: number of actors whose fragments take `SLOWER` times as long.
        hung: number of actors that end no fragment after their first `hung_after`.
        fragment_ms: mean time of a fragment of an actor that is not slow; each takes between half and one and
            a half of it.
        weights_first: whether the first weights are published before the actors connect.
        lock_step: staleness 0; each round takes a fragment of every actor.
    """

    actors: int
    budget: int
    batch: int
    slow: int = 0
    hung: int = 0
    hung_after: int = 1
    fragment_ms: int = 1_000
    weights_first: bool = True
    lock_step: bool = False

    @property
    def rest(self) -> range:
        """The actors that are neither slow nor hung, by index; the slow come first, then the hung."""
        return range(self.slow + self.hung, self.actors)

    def make(self) -> "list[Actor]":
        """The actors."""
        return [self._actor(index) for index in range(self.actors)]

    def _actor(self, index: int) -> "Actor":
        is_hung = self.slow <= index < self.slow + self.hung
        time_ms = self.fragment_ms * (SLOWER if index < self.slow else 1)
        return Actor(f"actor-{index:04d}", time_ms, self.hung_after if is_hung else None)


@dataclass(slots=True)
class Actor:
    """One of them. ends_after: a hung one ends so many fragments."""

    name: str
    fragment_ms: int
    ends_after: int | None = None
    session: int = 0
    acked: int = 0
    begun: int = 0
    through: int = 0
    waits: bool = False

    @property
    def may_begin(self) -> bool:
        """It has appended all that it has begun, and has credit for more."""
        return self.begun == self.acked and self.through > self.begun

    @property
    def hangs(self) -> bool:
        """It never ends what it has begun."""
        return self.ends_after is not None and self.begun > self.ends_after


@dataclass(slots=True)
class Outcome:
    """What happened.

    Attributes:
        crowd: the actors and the run.
        fragments: (milliseconds, actor) of each fragment that was appended.
        updates: milliseconds of each update.
        most_outstanding: the most that was outstanding at once, in fragments.
        looks: watches that reached Redis.
        vain_looks: watches that brought no credit.
    """

    crowd: Crowd
    fragments: list[tuple[int, int]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    most_outstanding: float = 0.0
    looks: int = 0
    vain_looks: int = 0

    def rounds_until_all(self, actors: Collection[int]) -> float:
        """Rounds of the budget until each of these actors has appended; infinite if one never did."""
        missing = set(actors)
        for number, (_, actor) in enumerate(self.fragments, 1):
            missing.discard(actor)
            if not missing:
                return math.ceil(number / self.crowd.budget)
        return math.inf

    def count(self, actors: Collection[int], since_ms: int, until_ms: int) -> int:
        """Fragments of these actors in a span of time."""
        return sum(since_ms <= at < until_ms and actor in actors for at, actor in self.fragments)
