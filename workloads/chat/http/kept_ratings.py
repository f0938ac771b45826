"""What people have said of answers, in the registry of the run: kept, shown to its person, deleted."""

from typing import Any, Final

from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry

_PAGE: Final = 1000


def store(url: str, policy: str, rating: Rating) -> None:
    """Keep a rating, once by its request key; raises RegistryError. url: of the registry."""
    with Registry.open(url, migrate=True) as opened:
        opened.add_ratings(policy, (rating,))


def delete(url: str, rater: str) -> int:
    """Delete all that somebody has said, of every policy; returns how many ratings it was."""
    with Registry.open(url, migrate=True) as opened:
        return sum(len(numbers) for numbers in opened.delete_ratings("", rater).values())


def ratings_by(url: str, policy: str, rater: str) -> list[dict[str, Any]]:
    """Return all that somebody has said of a policy's answers, oldest first, as JSON values."""
    found, after = list[dict[str, Any]](), 0
    with Registry.open(url, migrate=True) as opened:
        while page := opened.ratings(policy, after, _PAGE):
            after = page[-1].number
            found += [
                {
                    "policy": kept.policy,
                    "prompt": kept.rating.prompt,
                    "response": kept.rating.response,
                    "key": kept.rating.key,
                    "score": kept.rating.score,
                    "rejected": kept.rating.rejected,
                    "version": kept.rating.version,
                    "created": kept.created.isoformat(),
                }
                for kept in page
                if kept.rating.rater == rater
            ]
    return found
