"""The trial of a canary: its clients' returns and answers, compared with those of the active version.

    episodes ─► ClientReturns ─┐
                               ├─► `take` ─► the registry judges, for all servers together ─► `judged`
    answers ─► AnswerWindows ──┘      (`penstock.registry.traffic`)

Several servers and restarts make one trial. A canary that is found worse is withdrawn by its number, so a
second server changes nothing. An answer that is not finite, where the active version's is, withdraws it at
once.
"""

import asyncio
import hashlib
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.actor.serving.batcher import Answered
from penstock.actor.serving.episodes import Episode
from penstock.actor.serving.loaded_versions import LoadedVersions, Weights
from penstock.config.settings import CanarySection, ConfigurationError
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.specification import RunSpecification
from penstock.registry.canary import (
    LEVEL_FACTOR,
    LEVELS,
    SHARES,
    ClientReturn,
    Seen,
    Trial,
    TrialState,
    Verdict,
    Window,
)
from penstock.registry.records import PolicyVersion, RegistryError, Status, UnknownVersion
from penstock.registry.registry import Registry
from penstock.registry.routing import Arm, Arms
from penstock.registry.weight_files import read_kept, read_specification
from penstock.runtime import metrics

# ---- Answers of the canary and the active version, pooled over all clients in windows of a few seconds.

WINDOW_S: Final = 5.0
WINDOW_ANSWERS: Final = 256
MAX_WINDOWS: Final = 64
"""Most that wait to be taken; further ones are left out."""


@dataclass(slots=True)
class _Open:
    began_s: float
    answers: int = 0
    failed: int = 0
    not_finite: int = 0
    passes: Counter[tuple[int, bool, bool]] = field(default_factory=Counter)
    """Answers by the size of their pass (the power of two of its rows), the canary's or not, slow or not."""


class AnswerWindows:
    """Used by one event loop; times in seconds of one monotonic clock."""

    def __init__(self, slow_s: float, now_s: float) -> None:
        self._slow_s = slow_s
        self._open = _Open(now_s)
        self._closed: list[Window] = []

    def answered(self, answered: Answered, *, canary: bool, now_s: float) -> None:
        window = self._open
        if canary:
            window.answers += 1
            window.failed += answered.is_to_blame
            window.not_finite += answered.is_to_blame and answered.not_finite
        answer = answered.answer
        if answer is not None and answer.passed is not None and not answered.fallback:
            size = answer.passed.rows.bit_length()
            window.passes[size, canary, answer.passed.seconds > self._slow_s] += 1
        if window.answers >= WINDOW_ANSWERS:
            self._close(now_s)

    def take(self, now_s: float) -> list[Window]:
        if now_s - self._open.began_s >= WINDOW_S or self._open.not_finite:
            self._close(now_s)
        closed, self._closed = self._closed, []
        return closed

    def _close(self, now_s: float) -> None:
        window, self._open = self._open, _Open(now_s)
        if window.answers and len(self._closed) < MAX_WINDOWS:
            self._closed.append(
                Window(
                    answers=window.answers,
                    failed=window.failed,
                    not_finite=window.not_finite,
                    slower=_slower(window.passes),
                )
            )


def _slower(passes: Counter[tuple[int, bool, bool]]) -> float | None:
    """Return by how much more often the canary was slow; None without passes to compare with."""
    compared = active = active_slow = 0
    more = 0.0
    for size in sorted({size for size, _, _ in passes}, reverse=True):
        canary_slow, slow = passes[size, True, True], passes[size, False, True]
        canary = passes[size, True, False] + canary_slow
        active += passes[size, False, False] + slow
        active_slow += slow
        if canary and active:
            compared += canary
            more += canary_slow - canary * active_slow / active
    return more / compared if compared else None


# ---- The returns of each client of a trial, until it has been compared at the last level.

MAX_WATCHED: Final = 4096
"""Most clients that are watched for one level at once."""


@dataclass(slots=True, eq=False)
class WatchedClient:
    """The returns of one client. client: digest of its key, "" for one without.

    part: its chance of the canary. total: sum over its `count` episodes that count. rated: how many of them
    have an opinion. newest: the episode that began last.
    """

    client: str
    canary: bool
    part: float
    since_s: float
    newest: Episode
    total: float = 0.0
    count: int = 0
    rated: float = 0.0

    def end(self, episode: Episode, *, is_whole: bool) -> None:
        """Count an episode that is over; one that was abandoned or never rewarded does not count."""
        worth = _worth(episode)
        if worth is not None and (is_whole or episode.opinion is not None):
            self.total += worth.value
            self.rated += worth.rated or 0.0
            self.count += 1

    def worth(self) -> "Worth | None":
        """Return the mean of its episodes; that of the open one so far where none counts; None: neither."""
        if not self.count:
            return None if self.newest.is_over else _worth(self.newest)
        share = None if self.newest.opinion is None else self.rated / self.count
        return Worth(self.total / self.count, share)


class Worth(NamedTuple):
    """The mean value of episodes. rated: share of them with an opinion; None: they have returns."""

    value: float
    rated: float | None


def _worth(episode: Episode) -> Worth | None:
    opinion = episode.opinion
    if opinion is None:
        return Worth(episode.total_return, None) if episode.is_rewarded else None
    return Worth(float(opinion.likes), float(opinion.newest is not None)) if opinion.counts else None


class ClientReturns:
    """Used by one event loop; times in seconds of one monotonic clock."""

    def __init__(self, settle_s: float, returns: tuple[float, float] | None) -> None:
        """settle_s: after which a client is compared first. returns: outside which none is believed."""
        self._ages_s = tuple(settle_s * LEVEL_FACTOR**level for level in range(LEVELS))
        self._low, self._high = returns or (-float("inf"), float("inf"))
        self._known: dict[str, WatchedClient] = {}
        self._due: tuple[deque[WatchedClient], ...] = tuple(deque() for _ in range(LEVELS))

    def begin(self, episode: Episode, *, canary: bool, part: float, now_s: float) -> WatchedClient | None:
        """Return the client of an episode that begins; None for one that is not watched."""
        client = digest(episode.client_key)
        known = self._known.get(client) if client else None
        if known is not None:
            known.newest = episode
            return known
        if len(self._due[0]) >= MAX_WATCHED:
            return None
        watched = WatchedClient(client, canary, part, now_s, episode)
        self._due[0].append(watched)
        if client:
            self._known[client] = watched
        return watched

    def settled(self, now_s: float) -> list[ClientReturn]:
        """Return the returns of clients that are due for comparison, in the order in which they began."""
        found = []
        for level, due in enumerate(self._due):
            while due and now_s - due[0].since_s >= self._ages_s[level]:
                watched = due.popleft()
                worth = watched.worth()
                if worth is not None:
                    value = worth.value
                    if worth.rated is None:
                        value = min(max(value, self._low), self._high)
                    found.append(
                        ClientReturn(
                            client=watched.client,
                            level=level,
                            canary=watched.canary,
                            part=watched.part,
                            value=value,
                            rated=worth.rated,
                        )
                    )
                self._go_on(watched, level + 1)
        return found

    def clear(self) -> None:
        """Forget all: another trial begins, or clients are assigned anew."""
        self._known.clear()
        for due in self._due:
            due.clear()

    def _go_on(self, watched: WatchedClient, level: int) -> None:
        """Move a client to its next level; without a key it is a new client with its next episode."""
        if watched.client and level < LEVELS and len(self._due[level]) < MAX_WATCHED:
            self._due[level].append(watched)
        else:
            self._known.pop(watched.client, None)


def digest(client_key: str) -> str:
    """Return the name under which servers share what they know of a client; "" for one without a key."""
    return sha256(client_key.encode("utf-8", "surrogatepass")).hexdigest()[:16] if client_key else ""


log = logging.getLogger(__name__)

MAX_WAITING: Final = 4096
"""Most observations kept for the registry while it does not answer; the oldest are dropped."""
MAX_AT_ONCE: Final = 1024
_JUDGED: Final = (Arm.ACTIVE, Arm.CANARY)


class CanaryMonitor:
    """One event loop uses it. withdraw: called with version and reason. now: seconds, monotonic."""

    def __init__(
        self, section: CanarySection, withdraw: Callable[[int, str], None], now: Callable[[], float]
    ) -> None:
        """Raise ConfigurationError for a range of returns that does not rise."""
        known = section.return_range
        if known is not None and not known[0] < known[1]:
            text = f"canary.return_range={list(known)}: the first must be below the second"
            raise ConfigurationError(text)
        self._slow_s, self._withdraw, self._now = section.slow_ms / 1000, withdraw, now
        self.bounds = section
        self._returns = ClientReturns(section.settle_s, section.return_range)
        self._windows = AnswerWindows(self._slow_s, now())
        self._waiting: deque[Seen] = deque(maxlen=MAX_WAITING)
        self._has_canary = self._is_out_of_reach = self._is_withdrawn = self._is_counted = False
        self._part = 0.0
        self.trial: Trial | None = None
        self.state = TrialState()
        self._show()

    # ------------------------------------------------------------ observations

    def begin(self, episode: Episode) -> None:
        if self.trial is not None and episode.arm in _JUDGED:
            is_canary = episode.arm is Arm.CANARY
            episode.watched = self._returns.begin(
                episode, canary=is_canary, part=self._part, now_s=self._now()
            )

    def end(self, episode: Episode, *, is_whole: bool) -> None:
        if episode.watched is not None:
            episode.watched.end(episode, is_whole=is_whole)

    def answered(self, answered: Answered) -> None:
        if self.trial is None or answered.arm not in _JUDGED:
            return
        is_canary = answered.arm is Arm.CANARY
        self._windows.answered(answered, canary=is_canary, now_s=self._now())
        if is_canary and answered.is_to_blame and answered.not_finite:
            self._withdraw_once(self.trial, "an answer was not finite where the active version's was")

    # ------------------------------------------------------------ the trial

    def steer(self, arms: Arms) -> None:
        """Judge this canary against this active version; begin anew when they or their clients change."""
        # Withdrawn again after each look: the registry may have been away.
        self._has_canary, self._is_withdrawn = arms.canary is not None, False
        trial = Trial.of(arms)
        part = 0.0 if trial is None else trial.part_of(arms.traffic.canary_share)
        if (trial, part) != (self.trial, self._part):
            # A client that changes its arm now has earned returns on both.
            self._returns.clear()
            self._part = part
        if trial != self.trial:
            self.trial, self.state = trial, TrialState()
            self._is_counted = False
            self._waiting.clear()
            self._windows = AnswerWindows(self._slow_s, self._now())
        self._show()

    def take(self) -> list[Seen]:
        """Return the next observations to be judged, at most MAX_AT_ONCE."""
        if self.trial is None:
            return []
        self._waiting.extend(self._windows.take(self._now()))
        self._waiting.extend(self._returns.settled(self._now()))
        return [self._waiting.popleft() for _ in range(min(MAX_AT_ONCE, len(self._waiting)))]

    def give_back(self, seen: list[Seen]) -> None:
        """Take back observations that were not judged: the registry could not be reached."""
        self._waiting.extendleft(reversed(seen[: MAX_WAITING - len(self._waiting)]))
        self._is_out_of_reach = True
        self._show()

    def judged(self, trial: Trial, state: TrialState | None) -> None:
        """Take the verdict over all servers; None where the trial is over."""
        self._is_out_of_reach = False
        if state is not None and trial == self.trial:
            before, self.state = self.state.verdict, state
            if state.verdict is not before:
                log.info("canary judged", extra={"version": trial.canary, "verdict": state.explain()})
            if state.verdict is Verdict.WITHDRAW:
                self._withdraw_once(trial, state.explain())
        self._show()

    def _withdraw_once(self, trial: Trial, why: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            metrics.CANARIES_WITHDRAWN.inc()
        if not self._is_withdrawn:
            self._is_withdrawn = True
            self._withdraw(trial.canary, why)

    def _show(self) -> None:
        is_judged = self.trial is not None
        unguarded = {
            "no_comparison": self._has_canary and not is_judged,
            "registry": is_judged and self._is_out_of_reach,
            "returns": is_judged and (self.state.is_full or not self.state.compares_returns),
        }
        for reason, holds in unguarded.items():
            metrics.CANARY_UNGUARDED.labels(reason).set(holds)
        metrics.CANARY_UNDECIDED.set(is_judged and self.state.verdict is Verdict.UNDECIDED)
        for cause in SHARES:
            progress = self.state.progress(cause, self.bounds.false_alarm) if is_judged else 0.0
            metrics.CANARY_EVIDENCE.labels(cause).set(progress)


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
    names = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (one, other)
    ]
    return names[0] == names[1] and all(_digest(one / name) == _digest(other / name) for name in names[0])


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ---- Versions and traffic, as the registry has them now. They are read repeatedly; the next forward pass
# follows a change.

_BY: Final = "server"


class Traffic:
    """Reads the registry at `url`; "": there is none, and all clients get the learner's newest version.

    Weights come from `live` (a live run), from the run's folder, or, of another run of the same
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
        self.feedback = self.keep_feedback if url else None
        """`keep_feedback` where there is a registry."""
        self._registry: Registry | None = None
        self._opening = threading.Lock()
        self._reported: list[str] = []
        self._is_filled = False

    def look(self) -> tuple[Arms, PolicyVersion | None] | None:
        """Read the registry; blocks, and raises RegistryError.

        Returns the arms, and the newest version that is kept and neither tried nor withdrawn, None without
        one; None before the registry holds anything.
        """
        if self._registry is None:
            file = self._url.removeprefix("sqlite:///")
            if file != self._url and not Path(file).exists():
                return None
        registry = self._opened()
        arms = registry.arms(self._policy)
        pinned = registry.pinned(self._policy)
        candidates = [row for row in pinned if row.status not in (Status.CANARY, Status.ROLLED_BACK)]
        return arms, candidates[-1] if candidates else None

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

    async def begin(self, loaded_versions: LoadedVersions, canary_monitor: CanaryMonitor) -> None:
        """Read the registry once; raises ConfigurationError where no version could ever answer."""
        if not self._url:
            return
        try:
            await self.steer(loaded_versions, canary_monitor)
        except RegistryError as error:
            raise ConfigurationError(f"registry: {error}") from error
        if self._live is None and not self._is_filled:
            raise ConfigurationError(
                f"{self._run_dir or self._url}: no version of policy {self._policy!r} is kept there; wait "
                "until the run has registered one (`penstock policy list`), or follow it with --broker"
            )

    async def follow(
        self, loaded_versions: LoadedVersions, canary_monitor: CanaryMonitor, refresh_s: float
    ) -> None:
        """Read the registry again and again, and follow it; returns at once where there is no registry."""
        while self._url:
            await asyncio.sleep(refresh_s)
            try:
                await self.steer(loaded_versions, canary_monitor)
            except RegistryError as error:
                self._report([f"registry: {error}"])

    async def steer(self, loaded_versions: LoadedVersions, canary_monitor: CanaryMonitor) -> None:
        """Raises RegistryError."""
        found = await asyncio.to_thread(self.look)
        if found is None:
            return
        arms, newest = found
        self._is_filled = newest is not None
        wrong = []
        if newest is not None and (self._live is None or loaded_versions.latest is None):
            wrong += await self._take_newest(loaded_versions, newest)
        wrong += await loaded_versions.steer(arms)
        canary_monitor.steer(arms)
        self._report(wrong)
        await self._judge(canary_monitor)

    async def _take_newest(self, loaded_versions: LoadedVersions, newest: PolicyVersion) -> list[str]:
        """Answer `latest` with the newest version kept, where there is no live run; returns errors."""
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
        """Hand observations to the registry; raises RegistryError, and then they are handed again."""
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

    def _report(self, wrong: list[str]) -> None:
        """Log errors of versions, once until they change."""
        if wrong and wrong != self._reported:
            log.warning("versions that cannot be served", extra={"why": wrong})
        self._reported = wrong

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
        """Roll the canary back, unless that is done already."""
        registry = self._registry
        if registry is None:
            return
        try:
            await asyncio.to_thread(registry.rollback, self._policy, reason[:1000], by=_BY, version=version)
        except RegistryError as error:
            log.warning("canary not withdrawn", extra={"version": version, "error": str(error)})
