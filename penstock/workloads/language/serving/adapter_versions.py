"""The versions that can answer: adapters of one base model, in the engine that generates with them."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.config.settings import ServingSection
from penstock.policy.weights import sha256
from penstock.protocol.specification import Probe
from penstock.registry.routing import Arms
from penstock.workloads.language.engine.engine_choice import EngineTolerance, TextEngine
from penstock.workloads.plugin.serving import Choice, Loaded, LoadedVersions, Weights


class AdapterVersions(LoadedVersions):
    """See `LoadedVersions`. Whatever loads and drops adapters does so one after the other."""

    def __init__(
        self,
        engine: TextEngine,
        policy: Any,
        fetch: Any,
        section: ServingSection,
        tolerance: EngineTolerance | None = None,
    ) -> None:
        """policy: whose network the engine generates with. fetch: see `LoadedVersions`.

        tolerance: measures the engine with the first weights; None: it answers by a plain pass itself.
        """
        super().__init__(lambda: policy, fetch, section)
        self._engine, self._policy = engine, policy
        self._changing, self._unmeasured = asyncio.Lock(), tolerance
        self._in_use = Counter[int]()

    async def load(self, weights: Weights) -> Loaded:
        """See `LoadedVersions.load`; the policy of what is returned is that of all versions."""
        await asyncio.to_thread(self._engine.load, weights.version, weights.blob)
        return Loaded(self._policy, weights.version, weights.update, sha256(weights.blob))

    async def take_probed(self, weights: Weights, probe: Probe) -> tuple[float, ...]:
        """Answer `latest` with these; what the probe says under them, as they are loaded.

        Raises RunFailed for an engine whose first answer the learner would not take.
        """
        async with self._changing:
            loaded = await self.load(weights)
            answer = await asyncio.to_thread(self._engine.probe_answer, weights.version, probe)
            if self._unmeasured is not None:
                await asyncio.to_thread(self._unmeasured.measure, weights, probe, answer)
                self._unmeasured = None
            self.follow_with(loaded)
            await self._let_go()
        return answer

    async def take_latest(self, weights: Weights) -> None:
        async with self._changing:
            await super().take_latest(weights)
            await self._let_go()

    async def steer(self, arms: Arms) -> list[str]:
        """See `LoadedVersions.steer`; a shadow is not asked, and that is said."""
        unasked = []
        if arms.traffic.shadow is not None:
            unasked = [f"shadow={arms.traffic.shadow}: a server of text asks none; set it to 0"]
            arms = replace(arms, traffic=replace(arms.traffic, shadow=None))
        async with self._changing:
            wrong = await super().steer(arms)
            await self._let_go()
        return unasked + wrong

    async def exactly(self, version: int) -> Choice:
        if self._find(version) is not None:
            return await super().exactly(version)
        async with self._changing:
            choice = await super().exactly(version)
            await self._let_go()
        return choice

    @contextmanager
    def in_use(self, loaded: Loaded | None) -> Iterator[None]:
        """Keep a version for a request that comes to the engine several times. None: there is none."""
        if loaded is None:
            yield
            return
        self._in_use[loaded.version] += 1
        try:
            yield
        finally:
            self._in_use[loaded.version] -= 1
            self._in_use += Counter()  # forget those that are in use no more

    async def _let_go(self) -> None:
        """Drop the adapters that answer no arm and no request; one that is answering stays until later."""
        for version in sorted({*self._engine.versions} - self.served().keys() - self._in_use.keys()):
            await asyncio.to_thread(self._engine.drop, version)
