"""Paths that were shown to somebody, and what people say of them.

A rating is kept in the run's registry, whatever comes of it. Where people's ratings are the reward of the
run, the steps of a path that was drawn are stored with it: the last one earns the rating, from -1 to 1.
"""

import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.prompts.checked_reward import Better, Check
from penstock.workloads.prompts.http.chains import Step

KEPT: Final = 64
"""Paths that are remembered, of all callers."""
POLICY: Final = "default"
_SOURCE: Final = "prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPath:
    """A path. steps: those that can be learned from; none of a path that was not drawn."""

    id: str
    caller: str
    start: str
    prompt: str
    version: int
    steps: tuple[Step, ...] = ()


class ShownPaths:
    """The newest paths; used by one event loop."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._paths: OrderedDict[str, ShownPath] = OrderedDict()

    def keep(
        self, caller: str, start: str, prompt: str, version: int, steps: tuple[Step, ...] = ()
    ) -> ShownPath:
        """Remember a path, and forget the oldest beyond those that are kept."""
        made = ShownPath(
            id=secrets.token_hex(12),
            caller=caller,
            start=start,
            prompt=prompt,
            version=version,
            steps=steps,
        )
        self._paths[made.id] = made
        while len(self._paths) > self._kept:
            self._paths.popitem(last=False)
        return made

    def find(self, caller: str, id_: str) -> ShownPath | None:
        """Return a path that was shown to this caller; None where it is not remembered."""
        found = self._paths.get(id_)
        return found if found is not None and found.caller == caller else None

    def restore(self, path: ShownPath) -> None:
        """Remember a path again that was forgotten."""
        self._paths[path.id] = path

    def forget(self, id_: str) -> None:
        """Let a path be rated no further."""
        self._paths.pop(id_, None)


def keep_rating(registry: str, path: ShownPath, score: float) -> None:
    """Keep what somebody says of a path, from 0 to 1, once; raises RegistryError."""
    rating = Rating(
        prompt=path.start,
        response=path.prompt,
        score=score,
        source=_SOURCE,
        version=path.version or None,
        rater=path.caller,
        request_key=f"path-{path.id}",
    )
    _keep(registry, rating)


def keep_check(registry: str, check: Check, better: Better, caller: str) -> None:
    """Keep which of two texts somebody prefers, once; raises RegistryError."""
    better_text, worse = (check.before, check.after) if better == "before" else (check.after, check.before)
    rating = Rating(
        prompt=check.start,
        response=better_text,
        rejected=worse,
        source=_SOURCE,
        rater=caller,
        request_key=f"check-{check.id}",
    )
    _keep(registry, rating)


def _keep(registry: str, rating: Rating) -> None:
    with Registry.open(registry, migrate=True) as opened:
        opened.add_ratings(POLICY, (rating,))
