"""What each client of a canary's trial earns, until it has been compared at the last level.

    first episode begins ─► watched ─► after settle_s ─► 8 × ─► 64 × ─► forgotten
                                            └── its mean return, once each

The times are fixed: neither an episode that never ends nor one that ends early says when a client is
compared, so none delays another. Memory is bounded, whatever keys clients invent: further ones are not
watched, of either arm alike.

What people think of conversations is judged over all of them: one that is liked is 1, one that is not, or
that nobody said anything about, is 0, and one that was given up counts as well. Beside it goes the share that
anything was said about.
"""

from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple

from penstock.actor.serving.episodes.episodes import Episode
from penstock.registry.bounds import LEVEL_FACTOR, LEVELS, ClientReturn

MAX_WATCHED: Final = 4096
"""Most clients that are watched for one level at once."""


@dataclass(slots=True, eq=False)
class WatchedClient:
    """What is known of one client. client: digest of its key, "" for one without.

    part: its chance of the canary. total: of its `count` episodes that count. rated: of them, those with an
    opinion. newest: begun last.
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
        """One of its episodes is over; a return that was abandoned or never rewarded says nothing."""
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
    """What episodes are worth. rated: share of them with an opinion; None: they have returns."""

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
        """Return who plays an episode that begins; None for one that is not watched."""
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
        """Return what clients have earned whose time has come, in the order in which they began."""
        found = []
        for level, due in enumerate(self._due):
            while due and now_s - due[0].since_s >= self._ages_s[level]:
                watched = due.popleft()
                worth = watched.worth()
                if worth is not None:
                    found.append(self._return_of(watched, level, worth))
                self._go_on(watched, level + 1)
        return found

    def clear(self) -> None:
        """Forget all: another trial begins, or clients are assigned anew."""
        self._known.clear()
        for due in self._due:
            due.clear()

    def _return_of(self, watched: WatchedClient, level: int, worth: Worth) -> ClientReturn:
        return ClientReturn(
            client=watched.client,
            level=level,
            canary=watched.canary,
            part=watched.part,
            value=min(max(worth.value, self._low), self._high) if worth.rated is None else worth.value,
            rated=worth.rated,
        )

    def _go_on(self, watched: WatchedClient, level: int) -> None:
        """To its next level; one without a key is another one with its next episode."""
        if watched.client and level < LEVELS and len(self._due[level]) < MAX_WATCHED:
            self._due[level].append(watched)
        else:
            self._known.pop(watched.client, None)


def digest(client_key: str) -> str:
    """Return the name under which servers share what they know of a client; "" for one without a key."""
    return sha256(client_key.encode("utf-8", "surrogatepass")).hexdigest()[:16] if client_key else ""
