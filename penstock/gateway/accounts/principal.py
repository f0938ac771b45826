"""Principals, their secrets, and the errors of accounts.

Error messages say what to do, and never reveal whether an account or a project exists.
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
    """Reports invalid credentials."""


class Forbidden(AccountError):
    """Reports that the caller's role does not suffice."""


class NoSuchThing(AccountError):
    """Reports an object that is absent, or that the caller may not know of."""


class AccountConflict(AccountError):
    """Reports a change that conflicts with the current state."""


class QuotaReached(AccountError):
    """Reports that a project has reached a quota."""


class TooManyAttempts(AccountError):
    """Reports too many attempts to sign in. wait_s: seconds until the next one is allowed."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"signing in was tried too often: wait {wait_s:.0f} s")
        self.wait_s = wait_s


API: Final = "pst"
REFRESH: Final = "psr"
INVITATION: Final = "psi"
LINK: Final = "psl"
_SECRET = re.compile(r"ps[a-z]_[A-Za-z0-9_-]{43}")


def new_secret(kind: str) -> str:
    """Return 256 random bits as text, with a prefix by which scanners find leaked secrets."""
    return f"{kind}_{secrets.token_urlsafe(32)}"


def is_secret(text: str, kind: str) -> bool:
    return text.startswith(f"{kind}_") and _SECRET.fullmatch(text) is not None


def digest(secret: str) -> str:
    """Return the digest to store of a secret. Secrets are random, so a fast hash without salt suffices."""
    return sha256(secret.encode()).hexdigest()


def new_id() -> str:
    """Return a random id of a row, 24 hexadecimal characters."""
    return secrets.token_hex(12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A person who signed in, or a program with an API token.

    subject: `user/ID` or `token/ID`, as in the audit. name: for display. user, session, number: of a person:
    account, session, and number of the account's sessions (`UserRow.session_number`); None for a program.
    project, role: of a token; None for a person.
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
    """The role of a principal in a project."""

    principal: Principal
    project: str
    role: Role
