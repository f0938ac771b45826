"""Versions and traffic, as the registry has them now.

They are read repeatedly; the next forward pass follows a change.
"""

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from penstock.actor.serving.loaded_versions import LoadedVersions, Weights
from penstock.actor.serving.release.canary_monitor import CanaryMonitor
from penstock.config.settings import ConfigurationError
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.specification import RunSpecification
from penstock.registry.records import PolicyVersion, RegistryError, Status, UnknownVersion
from penstock.registry.registry import Registry
from penstock.registry.routing import Arms
from penstock.registry.weight_files import read_kept, read_specification

# ---- Whether weights of one run are weights of another run's network, too.

_SAME_TEXT: Final = ("workload", "observation_space", "action_space")


def is_same_network(one: RunSpecification, other: RunSpecification) -> bool:
    """Return whether both describe the same network, as far as folders that they name can be read."""
    if any(getattr(one, name) != getattr(other, name) for name in _SAME_TEXT):
        return False
    try:
        return _is_same(json.loads(one.policy_json), json.loads(other.policy_json))
    except OSError:
        return False


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, str) and isinstance(other, str) and one != other:
        both = Path(one), Path(other)
        return all(path.is_absolute() and path.is_dir() for path in both) and _contents(*both)
    return bool(one == other)


@lru_cache(maxsize=64)
def _contents(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same files; large ones are read once for each pair."""
    names = [{str(file.relative_to(folder)) for file in _files(folder)} for folder in (one, other)]
    return names[0] == names[1] and all(_digest(one / name) == _digest(other / name) for name in names[0])


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


log = logging.getLogger(__name__)

_BY: Final = "server"


@dataclass(frozen=True, slots=True)
class TrafficSnapshot:
    """What the registry says at one moment.

    newest: of the versions that are kept and neither tried nor withdrawn.
    """

    arms: Arms
    newest: PolicyVersion | None


class Traffic:
    """Reads the registry at `url`.

    Weights come from `live` (a run that goes on), from the run's folder, or, of another run of the same
    policy, from the folder that the registry names as their place.
    """

    def __init__(
        self,
        url: str,
        policy: str,
        run_dir: Path | None,
        live: Callable[[int], Weights | None] | None,
        specification: RunSpecification,
    ) -> None:
        self._url, self._policy, self._run_dir, self._live = url, policy, run_dir, live
        self._specification = specification
        self._registry: Registry | None = None
        self._opening = threading.Lock()
        self._said: list[str] = []
        self._is_filled = False

    def look(self) -> TrafficSnapshot | None:
        """Return what the registry says, None while nothing was ever registered.

        Blocks; raises RegistryError.
        """
        if self._registry is None:
            file = self._url.removeprefix("sqlite:///")
            if file != self._url and not Path(file).exists():
                return None
        registry = self._opened()
        arms = registry.arms(self._policy)
        pinned = registry.pinned(self._policy)
        candidates = [row for row in pinned if row.status not in (Status.CANARY, Status.ROLLED_BACK)]
        return TrafficSnapshot(arms, candidates[-1] if candidates else None)

    def _opened(self) -> Registry:
        with self._opening:
            if self._registry is None:
                self._registry = Registry.open(self._url, migrate=True)
            return self._registry

    def fetch(self, version: int) -> Weights | None:
        """Return the weights of a version that is held. Blocks; raises ValueError for damaged ones."""
        found = self._live(version) if self._live is not None else None
        if found is not None or self._registry is None:
            return found
        try:
            row = self._registry.get(self._policy, version)
        except UnknownVersion:
            return None
        folder = self._folder(row) if row.pinned else None
        return (
            None if folder is None else Weights(version, row.update, read_kept(folder, version, row.sha256))
        )

    def _folder(self, row: PolicyVersion) -> Path | None:
        """Return where the weights of a version lie; raises ValueError where they are of another network."""
        if not row.place or row.run == self._specification.run:
            return self._run_dir
        other = read_specification(Path(row.place))
        if not is_same_network(other, self._specification):
            raise ValueError(
                f"version {row.version} of run {row.run!r} has another network, or another base model, than "
                f"run {self._specification.run!r}: it is served from a server of its own run"
            )
        return Path(row.place)

    async def follow(
        self, loaded_versions: LoadedVersions, canary_monitor: CanaryMonitor, refresh_s: float
    ) -> None:
        """For ever: look, and steer."""
        while True:
            await asyncio.sleep(refresh_s)
            try:
                await self.steer(loaded_versions, canary_monitor)
            except RegistryError as error:
                self._say([f"registry: {error}"])

    async def begin(self, loaded_versions: LoadedVersions, canary_monitor: CanaryMonitor) -> None:
        """Look first; raises ConfigurationError where nothing could ever be answered with."""
        try:
            await self.steer(loaded_versions, canary_monitor)
        except RegistryError as error:
            raise ConfigurationError(f"registry: {error}") from error
        if self._live is None and not self._is_filled:
            raise ConfigurationError(
                f"{self._run_dir or self._url}: no version of policy {self._policy!r} is kept there; wait "
                "until the run has registered one (`penstock policy list`), or follow it with --broker"
            )

    async def steer(self, loaded_versions: LoadedVersions, canary_monitor: CanaryMonitor) -> None:
        """Look once; raises RegistryError."""
        look = await asyncio.to_thread(self.look)
        if look is None:
            return
        self._is_filled = look.newest is not None
        wrong = []
        if look.newest is not None and (self._live is None or loaded_versions.latest is None):
            wrong += await self._take_newest(loaded_versions, look.newest)
        wrong += await loaded_versions.steer(look.arms)
        canary_monitor.steer(look.arms)
        self._say(wrong)
        await self._judge(canary_monitor)

    async def _take_newest(self, loaded_versions: LoadedVersions, newest: PolicyVersion) -> list[str]:
        """Without a live run, and before it is heard, the newest version that is kept is the latest.

        Returns what is wrong with it.
        """
        if loaded_versions.latest is not None and loaded_versions.latest.version == newest.version:
            return []
        try:
            weights = await asyncio.to_thread(self.fetch, newest.version)
            if weights is not None:
                await loaded_versions.take_latest(weights)
        except ValueError as error:
            return [str(error)]
        return []

    async def _judge(self, canary_monitor: CanaryMonitor) -> None:
        """Hand what was seen to the registry; raises RegistryError, and then it is handed again."""
        trial = canary_monitor.trial
        if trial is None or self._registry is None:
            return
        seen = canary_monitor.take()
        try:
            state = await asyncio.to_thread(
                self._registry.judge, self._policy, trial, canary_monitor.bounds, seen
            )
        except RegistryError:
            canary_monitor.give_back(seen)
            raise
        canary_monitor.judged(trial, state)

    def _say(self, wrong: list[str]) -> None:
        """Once, until it changes."""
        if wrong and wrong != self._said:
            log.warning("versions that cannot be served", extra={"why": wrong})
        self._said = wrong

    async def keep_feedback(self, caller: str, rewards: Sequence[tuple[str, int, float]]) -> None:
        """Store rewards (episode id, step, amount) that came too late to be learned from now.

        The first of them make the registry where the learner has kept no version yet. caller: who sent them.
        Raises Refused (NOT_READY) when they cannot be stored: the registry fails.
        """
        try:
            registry = await asyncio.to_thread(self._opened)
            keep = partial(registry.add_feedback, self._policy, rewards, caller=caller)
            await asyncio.to_thread(keep)
        except RegistryError as error:
            text = f"feedback table: {error}"
            raise Refused(Refusal(reason=Reason.NOT_READY, detail=text, retry_after_ms=1000)) from error

    async def withdraw(self, version: int, reason: str) -> None:
        """Roll the canary back, unless somebody has done so already."""
        registry = self._registry
        if registry is None:
            return
        try:
            await asyncio.to_thread(registry.rollback, self._policy, reason[:1000], by=_BY, version=version)
        except RegistryError as error:
            log.warning("canary not withdrawn", extra={"version": version, "error": str(error)})
