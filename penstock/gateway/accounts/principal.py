"""Who a request is from, the secrets by which that is known, and what the accounts refuse.

Messages say what to do, not whether an account or a project exists.
"""

import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from penstock.gateway.store.tables import Role


class AccountError(Exception):
    """Base of all refusals of this package."""


class BadInput(AccountError):
    """Reports a value that cannot be used. field: the name under which it came."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Unauthenticated(AccountError):
    """Reports that what was presented belongs to no account."""


class Forbidden(AccountError):
    """Reports that the caller's role does not suffice."""


class NoSuchThing(AccountError):
    """Reports that there is no such thing, or none that the caller may know of."""


class AccountConflict(AccountError):
    """Reports that the state does not admit the change."""


class QuotaReached(AccountError):
    """Reports that a project has all that it may have of something."""


class TooManyAttempts(AccountError):
    """Reports that signing in was tried too often. wait_s: seconds after which it may be tried again."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"signing in was tried too often: wait {wait_s:.0f} s")
        self.wait_s = wait_s


API: Final = "pst"
REFRESH: Final = "psr"
INVITATION: Final = "psi"
LINK: Final = "psl"
_SECRET = re.compile(r"ps[a-z]_[A-Za-z0-9_-]{43}")


def new_secret(kind: str) -> str:
    """Return 256 random bits as text, behind a prefix by which scanners find a leaked secret."""
    return f"{kind}_{secrets.token_urlsafe(32)}"


def is_secret(text: str, kind: str) -> bool:
    return text.startswith(f"{kind}_") and _SECRET.fullmatch(text) is not None


def digest(secret: str) -> str:
    """Return what is stored of a secret. It is random, so a fast hash without salt keeps it."""
    return sha256(secret.encode()).hexdigest()


def new_id() -> str:
    """Return a random id of a row, 24 hexadecimal characters."""
    return secrets.token_hex(12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A person who signed in, or a program with an API token.

    subject: `user/ID` or `token/ID`, as the audit shows it. name: for people to read. user, session, number:
    of a person and what all their sessions have in common until they end together, else None. project, role:
    those of a token, else None.
    """

    subject: str
    name: str
    user: str | None = None
    session: str | None = None
    number: int | None = None
    project: str | None = None
    role: Role | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a principal is in a project."""

    principal: Principal
    project: str
    role: Role
