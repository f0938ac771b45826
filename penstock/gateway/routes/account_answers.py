"""Answers about people, programs and projects, as the document describes them."""

from datetime import datetime
from typing import Any, Literal

from penstock.gateway.frame.answer import Answer
from penstock.gateway.store.tables import Role


class Health(Answer):
    """The gateway answers."""

    status: Literal["ok"]


class Tokens(Answer):
    """Tokens of a session. expires_in: seconds. refresh_token: of people alone."""

    access_token: str
    token_type: Literal["bearer"]
    expires_in: int
    refresh_token: str = ""


class Joined(Answer):
    """The project that somebody now belongs to."""

    project: str


class Belonging(Answer):
    """What somebody is in a project."""

    project: str
    role: Role


class Me(Answer):
    """Who calls. subject: `user/ID` or `token/ID`."""

    subject: str
    name: str
    projects: list[Belonging]


class OfferedProvider(Answer):
    """The provider of identities at which people may sign in. title: null where there is none."""

    title: str | None


class ProviderAddress(Answer):
    """Where the browser goes to sign in."""

    address: str


class MemberShown(Answer):
    """A member of a project. since: when they joined it."""

    user: str
    name: str
    role: Role
    since: datetime


class MemberList(Answer):
    """Who belongs to a project."""

    members: list[MemberShown]


class InvitationMade(Answer):
    """An invitation. invitation: its secret, which is shown this once."""

    invitation: str
    role: Role
    days: int


class TokenShown(Answer):
    """An API token without its secret. expires: null: when it is revoked."""

    id: str
    name: str
    role: Role
    created: datetime
    expires: datetime | None
    revoked: datetime | None


class TokenList(Answer):
    """The API tokens of a project."""

    tokens: list[TokenShown]


class TokenMade(TokenShown):
    """A new API token. token: its secret, which is shown this once."""

    token: str


class AuditEntryShown(Answer):
    """What somebody did. by: `user/ID`, `token/ID` or `operator`. detail: facts, by what was done."""

    number: int
    time: datetime
    by: str
    action: str
    subject: str
    detail: dict[str, Any]


class AuditLog(Answer):
    """Who did what in a project, newest first."""

    entries: list[AuditEntryShown]


class ApiDocument(Answer):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
