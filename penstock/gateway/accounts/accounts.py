"""The accounts of a gateway. Each method is one transaction, or two where a refusal must be recorded.

Calls wait for the disk, the network and argon2id: an event loop runs them in a thread. Every method may raise
`Unavailable` and `Conflict` of the database.
"""

import base64
import binascii
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from sqlalchemy import CursorResult, Delete, delete, or_, select
from sqlalchemy.orm import Session

from penstock.gateway.accounts import api_tokens, projects, sessions, users
from penstock.gateway.accounts.principal import (
    API,
    REFRESH,
    Forbidden,
    Membership,
    Principal,
    TooManyAttempts,
    Unauthenticated,
    is_secret,
)
from penstock.gateway.accounts.sessions import Grant, Keys
from penstock.gateway.accounts.users import hash_password, is_password
from penstock.gateway.store.tables import (
    FeedbackLinkRow,
    InvitationRow,
    RefreshRow,
    Role,
    SessionRow,
    UserRow,
)
from penstock.registry.records import RegistryError
from penstock.registry.registry import Database

T = TypeVar("T")
_NOT_KNOWN = "name or password is wrong"


class Accounts:
    """Accounts in a database; safe to use from several threads. clock: returns the time."""

    def __init__(
        self, database: Database, keys: Keys, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._database = database
        self._keys = keys
        self._clock = clock

    def now(self) -> datetime:
        return self._clock()

    # ------------------------------------------------------------ who calls

    def authenticate(self, header: str) -> Principal:
        """Return the principal of an `Authorization` header; raises Unauthenticated.

        Bearer: an access token or an API token. Basic: an API token as the password, which a netrc file
        gives; the password of a person is not accepted there.
        """
        scheme, _, value = header.partition(" ")
        credential = _password_of(value) if scheme.lower() == "basic" else value.strip()
        if scheme.lower() not in {"basic", "bearer"} or not credential:
            raise Unauthenticated("send `Authorization: Bearer TOKEN`, or Basic with it as the password")
        if is_secret(credential, API):
            return self.look(lambda session: api_tokens.by_secret(session, self._clock(), credential))
        if scheme.lower() == "basic":
            raise Unauthenticated("Basic takes an API token as the password, nothing else")
        return self.look(
            lambda session: sessions.by_access_token(session, self._clock(), self._keys, credential)
        )

    def count_attempt(self, account: str, address: str) -> None:
        """Count an attempt to sign in; raises TooManyAttempts for one too many."""
        wait_s = self.run(
            lambda session, now: users.count_attempt(session, now, account=account, address=address)
        )
        if wait_s > 0:  # outside of the transaction, which keeps the count
            raise TooManyAttempts(wait_s)

    def sign_in(self, name: str, password: str, *, address: str) -> Grant:
        """Begin a session; raises Unauthenticated, TooManyAttempts."""
        account = name.strip().lower()
        self.count_attempt(account, address)
        user = self.look(lambda session: users.find(session, account))
        if not is_password(None if user is None or user.disabled else user.password, password):
            raise Unauthenticated(_NOT_KNOWN)
        assert user is not None

        def work(session: Session, now: datetime) -> Grant:
            users.forgive_attempts(session, account=account, address=address)
            return sessions.begin(session, now, self._keys, self._same(session, user))

        return self.run(work)

    def refresh(self, token: str) -> Grant:
        """Exchange a refresh token; raises Unauthenticated for an invalid one."""
        grant = None
        if is_secret(token, REFRESH):
            grant = self.run(lambda session, now: sessions.exchange(session, now, self._keys, token))
        if grant is None:
            raise Unauthenticated("the refresh token is not valid (any more): sign in again")
        return grant

    def sign_in_program(self, secret: str) -> Grant:
        if not is_secret(secret, API):
            raise Unauthenticated("client_secret is an API token of a project")
        found = self.look(lambda session: api_tokens.by_secret(session, self._clock(), secret))
        return sessions.grant_to_program(self._clock(), self._keys, found)

    def sign_out(self, principal: Principal) -> None:
        """End the session of a person; a program has none."""
        if principal.session is not None:
            session_id = principal.session
            self.run(lambda session, now: sessions.end(session, now, session_id))

    def change_password(self, principal: Principal, current: str, new: str, *, address: str) -> None:
        """Set a new password and end all sessions; raises Unauthenticated, TooManyAttempts, BadInput."""
        account, subject = principal.name, principal.subject
        self.count_attempt(account, address)
        user = self.look(lambda session: users.find(session, account))
        if user is None or not is_password(user.password, current):
            raise Unauthenticated(_NOT_KNOWN)
        encoded = hash_password(new, name=account)

        def work(session: Session, now: datetime) -> None:
            users.forgive_attempts(session, account=account, address=address)
            users.change_password(session, now, self._same(session, user), password=encoded, by=subject)

        self.run(work)

    # ------------------------------------------------------------ people and projects

    def membership(self, principal: Principal, project: str) -> Membership:
        return self.look(lambda session: projects.membership(session, principal, project))

    def check_still(self, member: Membership) -> None:
        """Raise Unauthenticated or NoSuchThing where a member has lost their session, token or project."""

        def work(session: Session) -> None:
            principal = sessions.again(session, self._clock(), member.principal)
            projects.membership(session, principal, member.project)

        self.look(work)

    def projects_of(self, principal: Principal) -> tuple[Membership, ...]:
        return self.look(lambda session: projects.projects_of(session, principal))

    def add_user(self, name: str, password: str, *, project: str | None, role: Role, by: str) -> str:
        """Add a person, and make them a member of a project; returns their id.

        Raises BadInput, AccountConflict. A project that is absent is added with its owner.
        """
        account = users.check_name(name)
        encoded = hash_password(password, name=account)
        if project is not None:
            projects.check_project(project)

        def work(session: Session, now: datetime) -> str:
            user = users.add(session, now, name=account, password=encoded, by=by)
            if project is not None:
                projects.known_or_owned(session, now, project, role, by=by)
                projects.set_role(session, now, project=project, user=user.id, role=role, by=by)
            return user.id

        return self.run(work)

    def add_member(self, name: str, *, project: str, role: Role, by: str) -> None:
        """Make a person a member of a project, which is added where absent with its owner.

        Raises NoSuchThing, BadInput.
        """
        projects.check_project(project)

        def work(session: Session, now: datetime) -> None:
            user = users.known(session, name)
            projects.known_or_owned(session, now, project, role, by=by)
            projects.set_role(session, now, project=project, user=user.id, role=role, by=by)

        self.run(work)

    def sign_up(self, invitation: str, name: str, password: str, *, address: str) -> str:
        """Add the person who holds an invitation; returns the project.

        Raises BadInput, AccountConflict, TooManyAttempts.
        """
        account = users.check_name(name)
        self.count_attempt(account, address)
        encoded = hash_password(password, name=account)

        def work(session: Session, now: datetime) -> str:
            row = projects.find_invitation(session, now, invitation)
            users.forgive_attempts(session, account=account, address=address)
            user = users.add(session, now, name=account, password=encoded, by=None, invited_by=row.by)
            return projects.redeem(session, now, row, user=user.id)

        return self.run(work)

    def pseudonym(self, purpose: str, *parts: str) -> str:
        return self._keys.pseudonym(purpose, *parts)

    def run(self, work: Callable[[Session, datetime], T]) -> T:
        """Return the result of a change, committed, as `Database.write` does."""
        return self._database.write(lambda session: work(session, self._clock()))

    def run_by(self, member: Membership, work: Callable[[Session, datetime], T]) -> T:
        """Return the result of a change by a member, committed, if they still have their role.

        The member was authorized by the head of the request, and the body may come half a minute later: a
        member who was removed meanwhile must not issue tokens. Raises Unauthenticated, NoSuchThing,
        Forbidden.
        """

        def checked(session: Session, now: datetime) -> T:
            principal = sessions.again(session, now, member.principal)
            if not projects.membership(session, principal, member.project).role.includes(member.role):
                raise Forbidden("your role in this project has just become another one: ask again")
            return work(session, now)

        return self.run(checked)

    def look(self, work: Callable[[Session], T]) -> T:
        """Return the result of `work`, from one consistent view."""
        return self._database.read(work)

    def _same(self, session: Session, user: UserRow) -> UserRow:
        """Return the row of a person again, as long as their password is the one that was looked at."""
        row = session.get(UserRow, user.id)
        if row is None or row.password != user.password or row.disabled:
            raise Unauthenticated(_NOT_KNOWN)
        return row


def _password_of(value: str) -> str:
    """Return the password of a Basic credential, "" if it is malformed."""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


# ---- Deletes expired rows, so that the database of a gateway does not grow with every sign-in.

KEPT: Final = timedelta(days=1)
"""Time for which rows that ended early are kept for inspection."""
AT_ONCE: Final = 1000
"""Most sessions in a transaction, since other writers wait for it."""
EVERY_S: Final = 600.0

log = logging.getLogger(__name__)


def sweep(accounts: Accounts, end: threading.Event, every_s: float = EVERY_S) -> None:
    """Delete expired rows every `every_s` seconds until `end` is set; the body of a thread."""
    while not end.is_set():
        try:
            gone = accounts.run(delete_expired)
        except RegistryError as error:
            log.warning("expired rows were not deleted", extra={"error": str(error)})
        else:
            log.debug("expired rows deleted", extra={"rows": gone})
        end.wait(every_s)


def delete_expired(session: Session, now: datetime) -> int:
    """Delete at most AT_ONCE sessions, and other expired rows; returns the number of deleted rows."""
    over = or_(SessionRow.expires <= now, SessionRow.ended <= now - KEPT)
    ids = session.scalars(select(SessionRow.id).where(over).limit(AT_ONCE)).all()
    return sum(
        _count(session, statement)
        for statement in (
            delete(RefreshRow).where(RefreshRow.session.in_(ids)),
            delete(SessionRow).where(SessionRow.id.in_(ids)),
            delete(InvitationRow).where(
                or_(InvitationRow.expires <= now - KEPT, InvitationRow.used <= now - KEPT)
            ),
            delete(FeedbackLinkRow).where(
                or_(FeedbackLinkRow.expires <= now - KEPT, FeedbackLinkRow.revoked <= now - KEPT)
            ),
        )
    )


def _count(session: Session, statement: Delete) -> int:
    done = session.execute(statement)
    assert isinstance(done, CursorResult)
    return done.rowcount
