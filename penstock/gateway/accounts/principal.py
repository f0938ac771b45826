"""Who a request is from, once that is known."""

from dataclasses import dataclass

from penstock.gateway.store.tables import Role


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
