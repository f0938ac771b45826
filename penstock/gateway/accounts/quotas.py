"""How much a project may have stored at a time: who belongs to it could fill the disk of everybody else."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts.account_errors import QuotaReached
from penstock.protocol.limits import MIB
from penstock.registry.rating_usage import RatingBounds

_REMEDIES: Final = {
    "ratings": "delete those of a rater",
    "feedback_mib": "delete the ratings of a rater",
    "links": "revoke those that are done with, which gives room a day later",
    "invitations": "wait until some have been used or have expired, for a day",
    "tokens": "revoke those that are not needed",
    "conversations": "tell those of fewer conversations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The most that a project may have.

    feedback_mib: text of its ratings, in MiB. links, invitations: until a day after they have ended. tokens:
    that count. conversations: that were told of its agents.
    """

    ratings: int = 1_000_000
    feedback_mib: int = 4096
    links: int = 5000
    invitations: int = 1000
    tokens: int = 1000
    conversations: int = 1_000_000

    @classmethod
    def of(cls, said: Sequence[str]) -> Self:
        """Return the quotas that are said as NAME=NUMBER, others by default; raises ConfigurationError."""
        known, found = [one.name for one in fields(cls)], dict[str, int]()
        for one in said:
            name, _, number = one.partition("=")
            if name not in known or not (number.isascii() and number.isdigit() and len(number) <= 15):
                raise ConfigurationError(
                    f"--quota {one}: write NAME=NUMBER, with one of the names {', '.join(known)}"
                )
            found[name] = int(number)
        return cls(**found)

    def check(self, name: str, there: int, more: int = 1) -> None:
        """Raise QuotaReached where a project that has so many may not have more. name: of a field."""
        if there + more > getattr(self, name):
            raise self.reached(name)

    def reached(self, name: str) -> QuotaReached:
        """Return the error of a project that has as much as it may."""
        most = getattr(self, name)
        return QuotaReached(
            f"the project has all that it may have (quota {name}: {most}): {_REMEDIES[name]}, or have the "
            f"gateway's operator raise it, --quota {name}=NUMBER"
        )

    def of_ratings(self) -> RatingBounds:
        """Return those of ratings, as the registry keeps them."""
        return RatingBounds(ratings=self.ratings, text_bytes=self.feedback_mib * MIB)
