"""The versions that can answer, and which of them answers a client (`penstock.registry.routing`).

A loaded version is never changed; a newer one takes its place between two passes, and a request that began
with the old one ends with it.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.actor.serving.batcher import Loaded
from penstock.config.settings import ServingSection
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.policy import Policy
from penstock.policy.weights import load_into, sha256
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.registry import routing
from penstock.registry.records import check_client_key
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics

MAX_LOADED: Final = 4
"""Versions that no arm answers with, kept because episodes or requests name them."""
MAX_REMEMBERED: Final = 4096
"""Versions that answered `latest` and whose update count is remembered, without their weights."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a version, from the run or the registry."""

    version: int
    update: int
    blob: bytes
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Figures published with them, by name; empty for kept versions."""


Fetch = Callable[[int], Weights | None]
"""The weights of a version; None when they are not held any more.

Blocks; raises ValueError for damaged ones.
"""


@dataclass(slots=True)
class Choice:
    """The version that answers for `arm`, or the previous one in its place. loaded: None: no weights."""

    arm: Arm
    loaded: Loaded | None
    is_previous: bool = False
    shadow: Loaded | None = None


class LoadedVersions:
    """One event loop uses it; blocking work runs in a thread."""

    def __init__(self, make_policy: Callable[[], Policy], fetch: Fetch, section: ServingSection) -> None:
        self._make_policy, self._fetch, self._section = make_policy, fetch, section
        self._held: dict[int, Loaded] = {}
        self._asked_for: dict[int, Loaded] = {}
        self._answered: dict[Arm, Loaded] = {}
        self._former: dict[Arm, Loaded | None] = {}
        self._loading = asyncio.Lock()
        self.arms: Arms | None = None
        self._only: routing.Route | None = routing.Route(arm=Arm.LATEST, version=None)
        """The route of all clients, where they have the same; else None."""
        self.latest: Loaded | None = None
        self._updates: dict[int, int] = {}

    # ------------------------------------------------------------ choosing a version

    def choose(self, client_key: str) -> Choice:
        """Return the choice for the client's arm; raises Refused for a key that is too long."""
        if self._only is not None and not client_key:
            return self._choice(self._only)
        try:
            # A client without a key is given a random arm for each request.
            key = check_client_key(client_key or secrets.token_hex(8))
        except ValueError as error:
            raise Refused(Refusal(reason=Reason.INVALID, detail=str(error))) from error
        if self.arms is None:
            return self._choice(routing.Route(arm=Arm.LATEST, version=None))
        return self._choice(routing.route(self.arms, key))

    def follow(self, arm: Arm, client_key: str) -> Choice:
        if arm is Arm.PINNED:
            return self.choose(client_key)  # only the traffic knows the pinned version
        if self.arms is None or arm is Arm.LATEST:
            return self._choice(routing.Route(arm=arm, version=None))
        return self._choice(routing.follow(self.arms, arm))

    def shadow_of(self, loaded: Loaded) -> Loaded | None:
        """Return the version that shadows the answers of this one; None without a shadow."""
        shadow = None if self.arms is None else self.arms.traffic.shadow
        return None if shadow is None or shadow == loaded.version else self._find(shadow)

    def note_answered(self, arm: Arm, loaded: Loaded) -> None:
        """Note that this version can answer: it stands in when the next one cannot."""
        if self._answered.get(arm) is not loaded:
            self._former[arm], self._answered[arm] = self._answered.get(arm), loaded

    def former(self, arm: Arm, failing: Loaded | None) -> Loaded | None:
        """Return the version that answered on this arm before `failing`; None where there was none."""
        newest = self._answered.get(arm)
        return self._former.get(arm) if newest is failing else newest

    @property
    def active(self) -> Loaded | None:
        number = None if self.arms is None else self.arms.active
        return None if number is None else self._find(number)

    async def exactly(self, version: int) -> Choice:
        """Choose the version that a request names; raises Refused (UNKNOWN_VERSION) where it is not held."""
        loaded = self._find(version)
        if loaded is None:
            async with self._loading:
                loaded = self._find(version)
                if loaded is None:
                    loaded = self._asked_for[version] = await self._obtain(version)
                    while len(self._asked_for) > MAX_LOADED:
                        del self._asked_for[next(iter(self._asked_for))]
        if version in self._asked_for:
            self._asked_for[version] = self._asked_for.pop(version)  # the last to be let go of
        return Choice(Arm.PINNED, loaded)

    def _choice(self, route: routing.Route) -> Choice:
        loaded = self.latest if route.version is None else self._find(route.version)
        shadow = None if route.shadow is None else self._find(route.shadow)
        if loaded is None:
            stands_in = self.former(route.arm, None) if self._section.fallback == "previous" else None
            return Choice(route.arm, stands_in, True)
        return Choice(route.arm, loaded, False, shadow)

    def _find(self, version: int) -> Loaded | None:
        if self.latest is not None and self.latest.version == version:
            return self.latest
        return self._held.get(version) or self._asked_for.get(version)

    # ------------------------------------------------------------ loading versions

    async def take_latest(self, weights: Weights) -> None:
        """Load, and answer `latest` with these; raises ValueError when they do not fit."""
        self.follow_with(await self.load(weights))

    def follow_with(self, loaded: Loaded) -> None:
        """Answer `latest` with this version from the next pass on."""
        self.latest = loaded
        self._updates[loaded.version] = loaded.update
        if len(self._updates) > MAX_REMEMBERED:
            del self._updates[next(iter(self._updates))]
        metrics.SERVING_VERSION.labels(Arm.LATEST).set(loaded.version)

    async def steer(self, arms: Arms) -> list[str]:
        """Load the versions that the arms need, then follow the arms; returns errors of versions."""
        wanted = {arms.active, arms.canary, arms.traffic.shadow, *arms.traffic.pins.values()} - {None}
        held, wrong = {}, []
        for version in sorted(version for version in wanted if version is not None):
            try:
                held[version] = self._find(version) or await self._obtain(version)
            except Refused as error:
                wrong.append(str(error))
        self._held, self.arms, self._only = held, arms, _only_route(arms)
        for arm, number in ((Arm.ACTIVE, arms.active), (Arm.CANARY, arms.canary)):
            metrics.SERVING_VERSION.labels(arm).set(number or 0)
        return wrong

    def update_of(self, version: int) -> int:
        """Return the update count of a version that answered `latest`; raises Refused (UNKNOWN_VERSION)."""
        update = self._updates.get(version)
        if update is None:
            raise _unknown(version, "it has not answered `latest` here, or too many have since")
        return update

    def served(self) -> dict[int, tuple[Loaded, list[Arm]]]:
        """Return the loaded versions by number, each with the arms that it answers."""
        table: dict[int, tuple[Loaded, list[Arm]]] = {}
        arms = [(Arm.LATEST, self.latest)]
        if self.arms is not None:
            arms += [(Arm.ACTIVE, self._held.get(self.arms.active or 0))]
            arms += [(Arm.CANARY, self._held.get(self.arms.canary or 0))]
        for loaded in (*self._held.values(), *self._asked_for.values()):
            table[loaded.version] = (loaded, [])
        for arm, answers in arms:
            if answers is not None:
                table.setdefault(answers.version, (answers, []))[1].append(arm)
        return dict(sorted(table.items()))

    async def _obtain(self, version: int) -> Loaded:
        if version > MAX_NUMBER:
            raise _unknown(version, "no version has such a number, its weights are not held")
        try:
            weights = await asyncio.to_thread(self._fetch, version)
            if weights is not None:
                return await self.load(weights)
        except ValueError as error:
            raise _unknown(version, str(error)) from error
        raise _unknown(version, "its weights are not held")

    async def load(self, weights: Weights) -> Loaded:
        """Load a version that answers no request yet; raises ValueError when the weights do not fit."""

        def load() -> Loaded:
            policy = self._make_policy()
            load_into(policy, weights.blob)
            policy.explore(
                {**weights.scalars, "temperature": self._section.softmax_temperature}, ExplorationSlots()
            )
            return Loaded(policy, weights.version, weights.update, sha256(weights.blob))

        return await asyncio.to_thread(load)


def _only_route(arms: Arms) -> routing.Route | None:
    """Return the route of all clients; None where it depends on the client."""
    traffic = arms.traffic
    shares = (traffic.canary_share, traffic.latest_share)
    if traffic.pins or shares not in ((0.0, 0.0), (0.0, 1.0)):
        return None
    return routing.follow(arms, Arm.LATEST if traffic.latest_share else Arm.ACTIVE)


def _unknown(version: int, why: str) -> Refused:
    return Refused(Refusal(reason=Reason.UNKNOWN_VERSION, detail=f"version={version}: {why}"))
